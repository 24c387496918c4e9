"""What the operating system refuses: one sentence, what is charged, what to type; and typing it works."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import TRAIN, child, command, largest_file, left_over, open_files

import evenhand as eh
from evenhand.errors import EvenhandError, OutOfMemory, StorageError
from evenhand.runs.folder import Folder
from evenhand.runs.os_errors import boundary
from evenhand.runs.verify import verify
from evenhand.training import evaluate
from evenhand.training.run import Run

REFUSALS = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EMFILE", "EFBIG", "EIO", "ENOENT")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def fit(out: Path) -> Run:
    train, test = eh.data.digits()
    model = torch.nn.Linear(64, 10)
    return eh.fit(model, train, epsilon=3.0, epochs=1, batch_size=256, test=test, out=out, progress=False)


def again(out: Path) -> Run:
    train, test = eh.data.digits()
    return eh.resume(out, model=torch.nn.Linear(64, 10), train=train, test=test, progress=False)


def failing(name: str, number: int, code: int, calls: Iterator[int]) -> Callable[..., object]:
    """Return a function of ``os`` whose call with this number is refused, and every later one of the same process."""
    usual = getattr(os, name)

    def call(*arguments: object, **options: object) -> object:
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return usual(*arguments, **options)

    return call


def run_into(out: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch, name: str = "fsync") -> str | None:
    """Train while the disk refuses from one call on; returns what was said, None if the calls were too few."""
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(name, number, code, itertools.count()))
        try:
            fit(out)
        except EvenhandError as error:
            return str(error)
    return None


def check(out: Path, said: str) -> None:
    """What was said is true, the folder reads, and what it says to type ends in a verified run without leftovers."""
    folder = Folder(out)
    charged = folder.ledger().reserved if folder.ledger_file.exists() and folder.ledger_file.stat().st_size else 0
    counted = re.search(r"(\d+) of \d+ steps are charged|All (\d+) steps are charged", said)
    assert charged == (int(counted[1] or counted[2]) if counted else 0), said
    if folder.plan_file.exists() and charged:
        assert isinstance(verify(out)["problems"], list)
    if "evenhand report" in said:
        assert command("report", out).code == 0
        assert {"report.html", "model-card.md"} <= set(os.listdir(out))
    elif charged:
        assert f"evenhand resume {out}" in said
        again(out)
    else:
        fit(out)
    found = verify(out)
    assert found["ok"], (said, found["problems"])
    assert found["steps"] == found["planned"]
    assert left_over(out) == []


@pytest.mark.parametrize("number", [3, 9, 18, 25, 31, 38, 44])
def test_a_disk_that_is_full_from_one_write_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    said = run_into(tmp_path / "run", number, errno.ENOSPC, monkeypatch)
    assert said is not None
    assert "No space left" in said
    check(tmp_path / "run", said)


@pytest.mark.slow
def test_a_disk_that_is_full_from_any_write_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("fsync", "replace"):
        for number in itertools.count():
            out = tmp_path / f"{call}{number}"
            said = run_into(out, number, errno.ENOSPC, monkeypatch, call)
            if said is None:
                assert number > 15
                break
            check(out, said)


@pytest.mark.parametrize("name", REFUSALS)
def test_every_refusal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    code = getattr(errno, name)
    said = run_into(tmp_path / "run", 30, code, monkeypatch)
    assert said is not None
    assert os.strerror(code) in said
    check(tmp_path / "run", said)


def test_an_error_is_one_of_ours_and_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing("fsync", 30, errno.ENOSPC, itertools.count()))
    with pytest.raises(StorageError) as caught:
        fit(tmp_path / "run")
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path / "run") in str(caught.value.filename)


def test_a_loop_of_ones_own_gets_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = eh.data.digits()
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=train.facts, epochs=1, batch_size=256)
    model = torch.nn.Linear(64, 10)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = eh.attach(model, optimizer, loss, plan, out=tmp_path / "run")

    def train_on() -> None:
        with private:
            for number, batch in enumerate(private.batches(train)):
                private.step(batch)
                if number == 1:
                    monkeypatch.setattr(os, "fsync", failing("fsync", 0, errno.ENOSPC, itertools.count()))

    with pytest.raises(StorageError, match=r"2 of \d+ steps are charged|3 of \d+ steps are charged"):
        train_on()


def test_a_folder_that_is_moved_during_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = evaluate.row

    def move(*arguments: object, **options: object) -> object:
        (tmp_path / "run").rename(tmp_path / "moved")
        return usual(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "row", move)
        with pytest.raises(EvenhandError, match=r"not there any more|was moved"):
            fit(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    again(tmp_path / "moved")
    assert verify(tmp_path / "moved")["ok"]


@pytest.mark.parametrize("size", [3000, 45_000])
def test_files_that_may_not_grow(tmp_path: Path, size: int) -> None:
    out = tmp_path / "run"
    ended = command(*TRAIN, "--out", out, before=largest_file(size))
    assert ended.clean, ended.text
    assert ended.code in (1, 2)
    assert "File too large" in ended.text
    assert left_over(tmp_path) == []
    assert command("verify", out).clean
    then = command("report", out) if "evenhand report" in ended.text else command(*TRAIN, "--out", out)
    assert then.code == 0, then.text
    assert command("verify", out).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [*range(0, 6000, 250), *range(6000, 60_000, 3000)])
def test_files_that_may_not_grow_beyond_any_size(tmp_path: Path, size: int) -> None:
    ended = command(*TRAIN, "--out", tmp_path / "run", before=largest_file(size))
    assert ended.clean, ended.text
    assert ended.code in (0, 1, 2)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("count", [1, 3])
def test_too_many_open_files(tmp_path: Path, count: int) -> None:
    ended = command(*TRAIN, "--out", tmp_path / "run", before=open_files(count))
    assert ended.clean, ended.text
    assert ended.code in (1, 2)
    assert "Too many open files" in ended.text
    assert left_over(tmp_path) == []
    assert command(*TRAIN, "--out", tmp_path / "run").code == 0


def test_commands_that_cannot_write_say_so(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fit(out)
    for arguments in (
        ("report", out, "--out", tmp_path / "page.html"),
        ("statement", out, "--html", tmp_path / "page.html"),
        ("keys", "new", "--out", tmp_path / "key"),
        ("plan", "--data", "digits", "--epsilon", "3", "--plot", tmp_path / "plot.svg"),
        ("resume", out),
        ("verify", out),
    ):
        ended = command(*arguments, before=largest_file(10))
        assert ended.clean, (arguments, ended.text)
        assert ended.code != 0 or arguments[0] == "verify"
    assert left_over(tmp_path) == []
    assert not (tmp_path / "key").exists()
    assert verify(out)["ok"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_or_not_read_any_more(tmp_path: Path) -> None:
    def into(path: str) -> Callable[[], None]:
        return lambda: os.dup2(os.open(path, os.O_WRONLY), 1) and None

    full = command("methods", before=into("/dev/full"))
    assert (full.code, full.text) == (1, "evenhand: the output cannot be written (No space left on device).\n")

    def closed() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    ended = command("methods", before=closed)
    assert ended.text == ""
    assert ended.code == 1


def test_memory_that_is_full() -> None:
    with pytest.raises(OutOfMemory, match="memory"), boundary():
        raise MemoryError
    with pytest.raises(OutOfMemory, match="memory"), boundary():
        torch.empty(2**55)
    with pytest.raises(RuntimeError, match="something else"), boundary():
        raise RuntimeError("something else")


def test_a_density_on_a_full_disk(tmp_path: Path) -> None:
    arguments = ("train", "--data", "digits", "--method", "moment_density", "--epsilon", "3")
    ended = command(*arguments, "--out", tmp_path / "run", before=largest_file(20_000))
    assert ended.clean, ended.text
    assert "File too large" in ended.text


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="root mounts a small disk")
def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        out = disk / "run"
        ended = command(*TRAIN, "--out", out)
        assert ended.clean, ended.text
        assert "No space left" in ended.text
        assert left_over(disk) == []
        kept = tmp_path / "kept"
        shutil.copytree(out, kept)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    then = command("resume", kept) if "evenhand resume" in ended.text else command(*TRAIN, "--out", kept)
    assert then.code == 0, then.text
    assert command("verify", kept).code == 0


def test_a_child_that_raises_is_not_taken_for_clean() -> None:
    assert not child(lambda: 1 / 0).clean
