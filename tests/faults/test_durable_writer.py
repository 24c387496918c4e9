"""The one writer: nothing planted redirects it, a failure leaves nothing, a crash leaves what the next open mends."""

from __future__ import annotations

import errno
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import TRAIN, command, left_over

import evenhand as eh
from commands import evenhand
from evenhand import durable
from evenhand.errors import VerificationError
from evenhand.runs import run_files
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger
from evenhand.runs.verify import verify
from evenhand.training.run import Run

VICTIM = b"not a file of any run\n"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENHAND_STATE", str(folder))
        yield folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_bytes(VICTIM)
    return file


def fit(out: Path, epochs: float = 1) -> Run:
    train, test = eh.data.digits()
    return eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=epochs, test=test, out=out, progress=False)


@pytest.fixture(scope="module")
def names(state: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every file of a run folder, by its path in it."""
    out = tmp_path_factory.mktemp("names") / "run"
    fit(out)
    return sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())


def test_planted_links_of_every_name_redirect_nothing(
    state: Path, names: list[str], tmp_path: Path, victim: Path
) -> None:
    out = tmp_path / "run"
    assert {"plan.json", "report.html", "model.safetensors", "private/checkpoint.pt"} <= set(names)
    for name in ("README.md", "config.toml", "env.json", "plan.json", "statement.md", "model-card.md", "report.html"):
        out.mkdir(exist_ok=True)
        (out / name).symlink_to(victim)
    for name in names:
        for part in (f"{name}.part", f"private/{Path(name).name}.part", str(Path(name).with_suffix(".part"))):
            if not (out / part).is_symlink():
                (out / part).parent.mkdir(parents=True, exist_ok=True)
                (out / part).symlink_to(victim)
    fit(out)
    assert victim.read_bytes() == VICTIM
    assert all((out / name).is_file() and not (out / name).is_symlink() for name in names if "kept" not in name)
    assert verify(out)["ok"], verify(out)["problems"]


@pytest.mark.parametrize(
    "name", ["ledger.jsonl", "ledger.jsonl.lock", "private/training.jsonl", "private", "private/kept"]
)
@pytest.mark.parametrize("hard", [False, True])
def test_links_that_cannot_be_replaced_are_refused(
    state: Path, tmp_path: Path, victim: Path, name: str, hard: bool
) -> None:
    out = tmp_path / "run"
    (out / name).parent.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    if name.endswith(("private", "kept")):
        if hard:
            pytest.skip("folders have no second names")
        (out / name).symlink_to(outside)
    elif hard:
        os.link(victim, out / name)
    else:
        (out / name).symlink_to(victim)
    with pytest.raises(eh.errors.EvenhandError):
        fit(out)
    assert victim.read_bytes() == VICTIM
    assert list(outside.iterdir()) == []


def test_links_in_a_run_that_is_resumed_are_refused(state: Path, tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "run"
    fit(out)
    (out / "private" / "kept").rename(tmp_path / "elsewhere")
    (out / "private" / "kept").symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path / "elsewhere"))
    with pytest.raises(VerificationError, match="is a link"):
        Run(Folder(out)).report().save(out / "report.html")
    assert sorted(os.listdir(tmp_path / "elsewhere")) == before


def test_every_file_that_a_command_opens_for_writing_is_new_and_no_link(state: Path, tmp_path: Path) -> None:
    """The opens are found by an audit hook, so that a writer that is built later is seen too."""
    out, noted = tmp_path / "run", tmp_path / "opened"

    def watch() -> None:
        handle = os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        writing = os.O_WRONLY | os.O_RDWR

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if (
                event == "open"
                and isinstance(arguments[2], int)
                and arguments[2] & writing
                and arguments[0] != os.devnull
            ):
                os.write(handle, f"{arguments[2]} {arguments[0]}\n".encode())

        sys.addaudithook(hook)

    pages = [
        ("report", out),
        ("statement", out, "--html", tmp_path / "page.html", "--out", tmp_path / "words.md"),
        ("keys", "new", "--out", tmp_path / "key"),
        ("statement", out, "--sign", tmp_path / "key"),
        ("plan", "--data", "digits", "--epsilon", "3", "--plot", tmp_path / "plot.svg"),
    ]
    for arguments in ((*TRAIN, "--out", out), *pages):
        ended = command(*arguments, before=watch)
        assert ended.code == 0, ended.text
    opened = [line.split(" ", 1) for line in noted.read_text().splitlines()]
    own = [(int(flags), name) for flags, name in opened if str(tmp_path) in name or str(state) in name]
    assert len(own) > 30
    for flags, name in own:
        if name.endswith(".lock"):
            continue
        assert flags & os.O_NOFOLLOW, name
        assert flags & os.O_EXCL or flags & os.O_APPEND, name
        fixed = Path(name).name in ("ledger.jsonl", "training.jsonl", "key", "key.pub")
        assert fixed or re.fullmatch(r"evenhand-[0-9a-f]{32}\.part", Path(name).name), name
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = tmp_path / "a.json"
    durable.write(file, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left") as caught:
            durable.write(file, b"new")
    assert caught.value.filename == str(file)
    assert (file.read_bytes(), os.listdir(tmp_path)) == (b"old", ["a.json"])


def test_devices_pipes_and_folders_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "null", "folder"):
        with pytest.raises(OSError, match="it is a"):
            durable.write(tmp_path / name, b"x")
    with pytest.raises(VerificationError):
        durable.append(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()


def test_names_may_be_as_long_as_the_disk_allows(tmp_path: Path) -> None:
    durable.write(tmp_path / ("n" * 255), b"x")
    with pytest.raises(OSError, match="too long"):
        durable.write(tmp_path / ("n" * 256), b"x")
    assert left_over(tmp_path) == []


def test_leftovers_are_removed_but_not_what_is_being_written(tmp_path: Path, victim: Path) -> None:
    left = tmp_path / f"evenhand-{secrets.token_hex(16)}.part"
    left.write_bytes(b"half")
    planted = tmp_path / f"evenhand-{secrets.token_hex(16)}.part"
    planted.symlink_to(victim)
    mine = tmp_path / "mine.part"
    mine.write_bytes(b"of the user")
    lines = ["import sys", "sys.path[:0] = sys.argv[2:]", "from pathlib import Path", "from evenhand import durable"]
    other = "; ".join([*lines, "durable.clean(Path(sys.argv[1]))"])
    with durable.writing(tmp_path / "a") as file:
        file.write(b"a")
        subprocess.run([sys.executable, "-c", other, str(tmp_path), *sys.path], check=True)
        assert len(durable.parts(tmp_path)) == 1
    assert (tmp_path / "a").read_bytes() == b"a"
    assert sorted(os.listdir(tmp_path)) == ["a", "mine.part", "victim"]
    assert victim.read_bytes() == VICTIM


def test_a_file_that_was_recorded_but_not_named_is_found_by_its_digest(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    fit(out)
    page = f"<p>another page about {run_files.sha256(out / 'model.safetensors')}</p>".encode()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(durable, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            run_files.write_durably(out / "report.html", page)
    assert "a crash came before it was in place" in verify(out)["problems"][0]
    (out / "private" / f"evenhand-{secrets.token_hex(16)}.part").write_bytes(b"half of something else")
    run_files.write_durably(out / "model-card.md", page)
    assert (out / "report.html").read_bytes() == page
    assert verify(out)["ok"], verify(out)["problems"]
    assert left_over(out) == []


def test_a_second_name_is_a_copy_where_the_disk_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    durable.link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")
    durable.link(tmp_path / "a", tmp_path / "b")

    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", fail)
    durable.link(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"weights"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_what_fails_in_a_callback_is_raised_after_it(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "full")

    sink = durable.Deferred(Full())  # type: ignore[arg-type]
    torch.save({"a": torch.ones(1000)}, sink)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="full"):
        sink.settle()


def test_weights_are_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    from evenhand.runs.folder import publish

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "model"))
    (tmp_path / "run").mkdir()
    start = {"plan": "0" * 64, "steps": 1, "key": "1" * 64, "insecure": False}
    with Ledger.open(tmp_path / "run" / "ledger.jsonl", **start) as ledger:
        publish(model, tmp_path / "run" / "model.safetensors", ledger)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (tmp_path / "model").read_bytes()


def test_kept_features_are_a_file_of_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from evenhand.data.feature_cache import _keep

    features = torch.randn(7, 3, 2)
    _keep(tmp_path / "features" / "a.safetensors", features)
    assert torch.equal(load_file(tmp_path / "features" / "a.safetensors")["features"], features)
    assert (tmp_path / "features" / "a.safetensors").stat().st_mode & 0o777 == 0o600


def test_the_dataset_ledger_writes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: Path) -> None:
    from evenhand.runs.dataset_ledger import DatasetLedger

    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    folder = DatasetLedger.of(eh.data.digits()[0]).folder
    folder.mkdir(parents=True)
    (folder / "000000.json.part").symlink_to(victim)
    (folder / f"evenhand-{secrets.token_hex(16)}.part").write_bytes(b"half")
    fit(tmp_path / "run")
    assert victim.read_bytes() == VICTIM
    assert [name for name in left_over(folder) if name.startswith("evenhand")] == []
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(VerificationError, match="is a link"):
        fit(tmp_path / "other")
    assert victim.read_bytes() == VICTIM


def test_what_a_killed_command_left_beside_a_persons_file_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"evenhand-{secrets.token_hex(16)}.part"
    for write in (lambda path: run_files.write_durably(path, b"page"), lambda path: _initialised(path)):
        left.write_bytes(b"half of a page")
        write(tmp_path / "made.toml")
        assert not left.exists()


def _initialised(target: Path) -> None:
    (target.parent / "people.csv").write_text("age,ill\n30,no\n40,yes\n", encoding="utf-8")
    target.unlink(missing_ok=True)
    settings = ("--label", "ill", "--labels", "no,yes", "--number", "age=0:120")
    done = evenhand("init", target.parent / "people.csv", *settings, "--out", target)
    assert done.returncode == 0, done.stderr
