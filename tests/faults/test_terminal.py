"""Terminals: nothing of a path steers one, a closed one stops like SIGTERM, and an ASCII one is written to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import TRAIN, command

import evenhand as eh
from evenhand.runs.folder import Folder
from evenhand.runs.verify import verify
from evenhand.terminal import plain
from evenhand.training.attach import Private
from evenhand.training.loop import Interrupted, signals, stopping

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202etxt.exe\r"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def steers(text: str) -> bool:
    return any(mark in text for mark in "\x1b\x07\x9b\u202e\r")


def test_what_steers_is_written_out() -> None:
    assert plain(ESCAPES) == r"\x1b[2J\x1b]0;title\x07\x9b31m\u202etxt.exe\r"
    assert plain("a\tb\nä 漢 \U0001f600") == "a\tb\nä 漢 \U0001f600"
    assert plain("\udcff") == r"\udcff"


@pytest.mark.parametrize("some", [slice(0, 1), pytest.param(slice(1, None), marks=pytest.mark.slow)])
def test_no_path_steers_the_terminal(tmp_path: Path, some: slice) -> None:
    out = tmp_path / ESCAPES
    made = command(*TRAIN, "--out", out)
    assert made.code == 0
    assert not steers(made.text)
    data = tmp_path / f"{ESCAPES}.csv"
    data.write_text("age,ill\n31,no\n58,yes\n", encoding="utf-8")
    commands: list[tuple[object, ...]] = [
        ("train", "--data", data),
        ("verify", out),
        ("statement", out),
        ("statement", out, "--html", tmp_path / f"{ESCAPES}.html"),
        ("statement", out, "--sign", tmp_path / ESCAPES / "no key"),
        ("report", out),
        ("resume", out),
        ("predict", out, data),
        ("keys", "new", "--out", tmp_path / f"{ESCAPES}.key"),
        ("init", data),
        ("train", tmp_path / f"{ESCAPES}.toml"),
        ("train", "--data", "digits", "--out", out),
        ("train", "--data", ESCAPES),
        ("train", "--method", ESCAPES),
        ("train", "--epsilon", ESCAPES),
        ("train", f"--{ESCAPES}"),
        ("compare", tmp_path / f"{ESCAPES}.toml"),
        ("doctor", f"{ESCAPES}.py:f"),
        (ESCAPES,),
    ]
    for arguments in commands[some]:
        ended = command(*arguments)
        assert ended.clean, (arguments, ended.text)
        assert not steers(ended.text), (arguments, ended.text)


@pytest.mark.parametrize("some", [slice(0, 3), pytest.param(slice(3, None), marks=pytest.mark.slow)])
def test_paths_and_names_that_are_too_long(tmp_path: Path, some: slice) -> None:
    for name in ("n" * 300, "/".join(["n" * 200] * 30)):
        long = tmp_path / name
        commands: list[tuple[object, ...]] = [
            (*TRAIN, "--out", long),
            ("verify", long),
            ("train", "--data", f"{long}.csv", "--label", "a"),
            ("resume", long),
            ("report", long),
            ("statement", long),
            ("predict", long, long),
            ("keys", "new", "--out", long),
            ("init", long),
            ("train", long),
            ("train", "--data", "digits", "--owners", long),
            ("train", "--data", "digits", "--model", f"{long}.py:f"),
            ("train", "--data", "mnist", "--data-dir", long),
            ("train", "--data", "digits", "--budgets", f"{long}.toml"),
            ("compare", long),
            ("compare", "--data", "digits", "--methods", "dpsgd", "--epsilons", "3", "--out", long),
            ("doctor", f"{long}.py:f"),
            ("check", f"{long}.py"),
            ("claims", long),
            ("data", "fetch", "mnist", "--data-dir", long),
        ]
        for arguments in commands[some]:
            ended = command(*arguments)
            assert ended.clean, (arguments[:3], ended.text[-2000:])
            assert ended.code in (1, 2), (arguments[:3], ended.text)


@pytest.fixture
def hangup() -> Iterator[None]:
    """The usual answer to SIGHUP, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_a_closed_terminal_stops_after_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Private.step

    def step(self: Private, batch: object) -> torch.Tensor:
        if self.position == 3:
            os.kill(os.getpid(), signal.SIGHUP)
        return usual(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Private, "step", step)
    train, _ = eh.data.digits()
    with pytest.raises(Interrupted, match="evenhand resume") as caught:
        eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=2, out=tmp_path / "run", progress=False)
    assert caught.value.number == signal.SIGHUP
    assert Folder(tmp_path / "run").ledger().reserved == 4
    assert eh.resume(tmp_path / "run", model=torch.nn.Linear(64, 10), train=train, progress=False)
    assert verify(tmp_path / "run")["ok"]


@pytest.mark.usefixtures("hangup")
def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stopping()
        with signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in stopping()


def test_a_terminal_that_is_gone_does_not_end_training(tmp_path: Path) -> None:
    def hang_up() -> None:
        master, slave = os.openpty()
        os.dup2(slave, 2)
        assert os.isatty(2)
        os.close(master)

    ended = command(*TRAIN, "--out", tmp_path / "run", before=hang_up)
    assert ended.code == 0, ended.text
    assert verify(tmp_path / "run")["ok"]


SCRIPT = """
import sys
from pathlib import Path
out, data = Path(sys.argv[1]), Path(sys.argv[2])
from evenhand import terminal
from evenhand.cli import app, main
import locale
assert locale.getpreferredencoding(False) in ("ANSI_X3.4-1968", "US-ASCII"), locale.getpreferredencoding(False)
terminal.accept_all_characters()
commands = [
    ["train", str(data), "--epsilon", "3", "--epochs", "1", "--out", str(out)],
    ["verify", str(out)], ["statement", str(out)], ["report", str(out)], ["resume", str(out)], ["methods"],
    ["compare", str(data), "--methods", "dpsgd", "--epsilons", "3", "--seeds", "1", "--jobs", "1", "--epochs", "1",
     "--out", str(out) + "-compared"],
    ["compare", str(data), "--methods", "dpsgd", "--epsilons", "3", "--seeds", "1", "--jobs", "1", "--epochs", "1",
     "--out", str(out) + "-compared"],
]
if __name__ == "__main__":
    from evenhand.errors import BudgetExhausted
    for arguments in commands:
        try:
            app(arguments)
        except SystemExit as end:
            assert end.code in (0, None), (arguments, end.code)
        except BudgetExhausted as error:
            assert arguments[0] == "resume"
            terminal.say(str(error))
    data.with_name("other.toml").write_text(data.read_text("utf-8").replace("ill.csv", "kränk.csv"), "utf-8")
    sys.argv = ["evenhand", "train", str(data.with_name("other.toml")), "--epsilon", "3"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, end.code
    data.with_name("ill.csv").rename(Path(__import__("os").fsdecode(str(data.with_name("kränk.csv")).encode())))
    other = __import__("os").fsdecode("kränk.csv".encode())
    sys.argv = ["evenhand", "train", str(data), "--data", other, "--epsilon", "3"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, end.code
"""


@pytest.mark.slow
def test_an_ascii_locale(tmp_path: Path) -> None:
    """Names of columns, labels, files and folders need not be ASCII where the locale is."""
    rows = "".join(
        f"{index % 90},{'über' if index % 3 else 'naïve'},{'ja' if index % 2 else 'nein…'}\n" for index in range(400)
    )
    (tmp_path / "ill.csv").write_text(f"älter,größe,krank\n{rows}", encoding="utf-8")
    lines = [
        *('data = "ill.csv"', 'label = "krank"', 'labels = ["ja", "nein…"]', 'groups = "größe"', 'model = "linear"'),
        *('[columns."älter"]', 'kind = "number"', "low = 0", "high = 120"),
        *('[columns."größe"]', 'kind = "category"', 'values = ["über", "naïve"]'),
    ]
    (tmp_path / "config.toml").write_text("\n".join(lines), encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    environment = {**os.environ, **ascii_only, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONIOENCODING")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "läuft"), str(tmp_path / "config.toml")],
        capture_output=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-3000:]
    assert b"Traceback" not in done.stderr
    assert verify(tmp_path / "läuft")["ok"]


def test_no_file_of_a_run_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Standard error would else be written into the ledger."""
    script = (
        "import os, sys; os.close(1); os.close(2); sys.stdout = sys.stderr = None; sys.argv[0] = 'evenhand'\n"
        "from evenhand.cli import main\n"
        "import evenhand.durable as durable; real = durable.open_to_append; numbers = []\n"
        "def opened(*given, **named):\n"
        "    file = real(*given, **named); numbers.append(file.fileno()); return file\n"
        "durable.open_to_append = opened\n"
        "try: main()\n"
        "except SystemExit as end: os._exit(end.code or (0 if numbers and min(numbers) > 2 else 9))\n"
    )
    line = ("train", "--data", "digits", "--epsilon", "3", "--epochs", "1", "--out", str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", script, *line], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0
    assert verify(tmp_path / "run")["ok"]


@pytest.mark.parametrize(("command", "said"), [("train", True), ("methods", False)])
def test_a_command_that_trains_says_where_its_results_are_if_nobody_reads_them(
    command: str, said: bool, tmp_path: Path
) -> None:
    more = ["--data", "digits", "--epsilon", "3", "--epochs", "1", "--out", "run"] if command == "train" else []
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "evenhand", command, *more],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
            env=os.environ | {"EVENHAND_STATE": str(tmp_path / "state")},
        )
    finally:
        os.close(write)
    assert done.returncode == 1
    assert ("nobody reads the output any more" in done.stderr) == said
    assert "Traceback" not in done.stderr
