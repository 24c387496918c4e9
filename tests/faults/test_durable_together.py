"""Files written together: one sync after the last name, and errors that lose nothing else and are always told."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evenhand import durable

Events = list[str]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Record what reaches the disk, in order: each rename, each fsync, each sync of a whole disk."""
    noted: Events = []

    def watched(action: Callable[..., object], name: Callable[..., str]) -> Callable[..., object]:
        def run(*given: object) -> object:
            result = action(*given)
            noted.append(name(*given))
            return result

        return run

    monkeypatch.setattr(os, "replace", watched(os.replace, lambda part, path: Path(path).name))
    monkeypatch.setattr(os, "fsync", watched(os.fsync, lambda handle: "fsync"))
    monkeypatch.setattr(durable, "_sync_disk", watched(_nothing, lambda _: "disk"))
    return noted


def _nothing(handle: int) -> None:
    os.fstat(handle)  # it must be open


def full(handle: int) -> None:
    raise OSError(errno.EIO, "the disk failed")


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_file_alone_is_synced_before_and_after_its_name(tmp_path: Path, events: Events) -> None:
    durable.write(tmp_path / "a", b"1")
    assert events == ["fsync", "a", "fsync"]


def test_the_disk_is_synced_once_after_the_last_name(tmp_path: Path, events: Events) -> None:
    before = open_files()
    with durable.together():
        for name in "abc":
            durable.write(tmp_path / name, name.encode())
        durable.create(tmp_path / "d", b"d")
        assert events == ["a", "b", "c"], "nothing waits for the disk inside the block"
    assert events == ["a", "b", "c", "disk"]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {name: name for name in "abcd"}
    assert open_files() == before
    durable.write(tmp_path / "e", b"e")
    assert events[4:] == ["fsync", "e", "fsync"], "after the block every file waits for itself again"


def test_a_file_that_fails_leaves_the_old_one_and_the_others_are_synced(tmp_path: Path, events: Events) -> None:
    durable.write(tmp_path / "b", b"old")
    events.clear()
    before = open_files()
    with pytest.raises(OSError, match="No space") as raised, durable.together():  # noqa: PT012
        durable.write(tmp_path / "a", b"1")
        with durable.writing(tmp_path / "b") as file:
            file.write(b"half of the new")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(tmp_path / "b"), "the error names its file"
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a": b"1", "b": b"old"}
    assert events == ["a", "disk"], "what was written before the error is put on disk all the same"
    assert open_files() == before
    durable.write(tmp_path / "c", b"3")
    assert events[2:] == ["fsync", "c", "fsync"]


def test_a_disk_that_cannot_be_synced_is_an_error_and_not_a_return(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_sync_disk", full)
    before, after = open_files(), False
    with pytest.raises(OSError, match="the disk failed"):  # noqa: PT012
        with durable.together():
            durable.write(tmp_path / "a", b"1")
        after = True
    assert not after, "what must come after these files, such as a step that they charge, does not run"
    assert open_files() == before
    durable.write(tmp_path / "b", b"2")
    assert events[1:] == ["fsync", "b", "fsync"]


def test_a_block_within_a_block_waits_for_the_outer_one(tmp_path: Path, events: Events) -> None:
    with durable.together():
        with durable.together():
            durable.write(tmp_path / "a", b"1")
        assert events == ["a"]
        durable.write(tmp_path / "b", b"2")
    assert events == ["a", "b", "disk"]


def test_another_thread_waits_for_its_own_files(tmp_path: Path, events: Events) -> None:
    with durable.together():
        other = threading.Thread(target=durable.write, args=(tmp_path / "a", b"1"))
        other.start()
        other.join()
        assert events == ["fsync", "a", "fsync"]
    assert events == ["fsync", "a", "fsync"], "this thread wrote nothing"


def test_every_disk_is_synced(tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    disks = iter([1, 1, 2, 1])

    class About:
        def __init__(self) -> None:
            self.st_dev = next(disks)

    with (tmp_path / "a").open("wb") as file, durable.together(), monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda handle: About())
        for _ in range(4):
            durable.sync(file.fileno())
    assert events == ["disk", "disk"]


def test_without_a_sync_of_disks_every_file_waits(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_sync_disk", None)
    with durable.together():
        durable.write(tmp_path / "a", b"1")
        assert events == ["fsync", "a", "fsync"]


@pytest.mark.skipif(durable._disk_sync() is None, reason="this system cannot sync a whole disk")
def test_the_sync_of_a_disk_tells_its_errors(tmp_path: Path) -> None:
    sync = durable._disk_sync()
    assert sync is not None
    with (tmp_path / "a").open("wb") as file:
        sync(file.fileno())
        closed = os.dup(file.fileno())
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        sync(closed)
