"""The one writer: a file gets its name only when all of it is on disk, and nothing that lies in the way redirects it.

Bytes go into a new file with a random name beside the target (``evenhand-<32 hex digits>.part``), which is opened so
that a name that exists already, a symbolic link included, is an error. Then it is synced and renamed. On failure it is
removed; what a crash left is removed by ``clean``. Every ``OSError`` from here names the file that was to be written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from evenhand.errors import VerificationError

try:
    import fcntl
except ImportError:  # Windows does not remove files that are open, so that they need no lock there
    fcntl = None  # type: ignore[assignment]

SHARED, PRIVATE = 0o666, 0o600
"""Who may read a new file: whom the user's mask allows, or its owner alone."""
_PART = re.compile(r"evenhand-[0-9a-f]{32}\.part")
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def write(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Write a file so that a crash at any point leaves either the old one or the new one."""
    with writing(path, mode) as file:
        file.write(data)


@contextmanager
def writing(path: Path, mode: int = SHARED) -> Iterator[BinaryIO]:
    """Yield an open file that takes the place of ``path`` when the block ends well; else nothing is left of it."""
    with named(path):
        _refuse_special(path)
    with waiting(path, path.parent, mode) as (part, file):
        yield file
    _rename_or_remove(part, path)


@contextmanager
def waiting(path: Path, folder: Path, mode: int = SHARED) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file in ``folder`` and its random name; after the block it is on disk and can become ``path``."""
    part = folder / f"evenhand-{secrets.token_hex(16)}.part"
    with named(path):
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                _lock(handle)
                yield part, file
                file.flush()
                sync(handle)
        except BaseException:
            _remove(part)
            raise


def rename(part: Path, path: Path) -> None:
    """Give a waiting file its final name; if that fails it goes on waiting."""
    with named(path):
        os.replace(part, path)
        sync_folder(path.parent)


def create(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Write a new file; one that is there already, or a link of that name, is an error and stays as it is."""
    with named(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                sync(handle)
        except BaseException:
            _remove(path)
            raise
        sync_folder(path.parent)


def link(file: Path, path: Path) -> None:
    """Give bytes that are never written again a second name; make a copy where the disk has no second names."""
    part = path.with_name(f"evenhand-{secrets.token_hex(16)}.part")
    try:
        os.link(file, part)
    except OSError:
        with writing(path, PRIVATE) as copy, file.open("rb") as source:
            shutil.copyfileobj(source, copy)
        return
    try:
        rename(part, path)
    finally:
        _remove(part)  # it is still there after an error, and where both names were of one file before


def open_to_append(path: Path, mode: int = SHARED) -> BinaryIO:
    """Open a file, made if need be, to add bytes at its end.

    Raises:
      VerificationError: it is a link, has a second name, or is no regular file: what is added would land elsewhere.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _SAFE
    with named(path):
        try:
            handle = os.open(path, flags, mode)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _planted(path) from None
            raise
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(handle)
            raise _planted(path)
        return os.fdopen(handle, "ab")


def append(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Add bytes at the end of a file, made if need be."""
    with named(path), open_to_append(path, mode) as file:
        file.write(data)


def make_folder(path: Path, *, private: bool = False, parents: bool = False) -> None:
    """Make a folder if there is none; a private one is for its owner alone.

    Raises:
      VerificationError: a private folder is a link, so that what is written into it would land elsewhere.
    """
    path.mkdir(mode=0o700 if private else 0o777, parents=parents, exist_ok=True)
    if private:
        refuse_link(path)
        path.chmod(0o700)


def refuse_link(path: Path) -> None:
    """Raise if a folder that evenhand makes itself is a link to another place."""
    if path.is_symlink():
        raise _planted(path)


def lock(path: Path) -> FileLock:
    """Return the lock on this file, not acquired yet; refuse a link planted under its name."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise _planted(path)
    return FileLock(str(path))


def parts(folder: Path, others: Collection[str] = ()) -> list[Path]:
    """Return the files in a folder that wait for their name, or that a crash left; [] if there is no such folder.

    Those called one of ``others`` are returned too.
    """
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".part")]
        return [folder / name for name in sorted(names) if _PART.fullmatch(name) or name in others]
    except (FileNotFoundError, NotADirectoryError):
        return []


def clean(*folders: Path) -> None:
    """Remove what crashes left of files that were being written; those that a process is writing now stay."""
    for folder in folders:
        for part in parts(folder):
            with contextlib.suppress(OSError):
                if part.is_symlink() or _left(part):
                    part.unlink()


def sync_folder(path: Path) -> None:
    """Put a new name in a folder on disk; file systems that cannot are left alone."""
    waiting_for: dict[int, int] | None = getattr(_LATER, "disks", None)
    if waiting_for is not None and path.stat().st_dev in waiting_for:
        return
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            sync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync(handle: int) -> None:
    """Put an open file or folder on disk (fsync) before returning; inside ``together`` before that block ends."""
    waiting_for: dict[int, int] | None = getattr(_LATER, "disks", None)
    if waiting_for is None:
        os.fsync(handle)
    elif (disk := os.fstat(handle).st_dev) not in waiting_for:
        waiting_for[disk] = os.dup(handle)


@contextmanager
def together() -> Iterator[None]:
    """Put everything that this thread writes inside the block on disk at once, when the block ends.

    Hundreds of small files are then one wait for the disk instead of one each. Until the block ends nothing in it may
    be relied on to survive a crash: what must not exist before these files do is made after the block. Where the
    operating system cannot sync a whole disk and say whether that worked, every file is synced by itself.

    Examples:
      >>> import tempfile; folder = Path(tempfile.mkdtemp())
      >>> with together():
      ...     for name in "ab": write(folder / name, b"1")
      >>> sorted(file.name for file in folder.iterdir())
      ['a', 'b']
    """
    if _sync_disk is None or getattr(_LATER, "disks", None) is not None:
        yield
        return
    disks: dict[int, int] = {}
    _LATER.disks = disks
    try:
        yield
    finally:
        _LATER.disks = None
        try:
            for handle in disks.values():
                _sync_disk(handle)
        finally:
            for handle in disks.values():
                os.close(handle)


def _disk_sync() -> Callable[[int], None] | None:
    """Return a function that writes everything of a file's disk (syncfs of Linux) or raises; None if there is none."""
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(None, use_errno=True)
        function = library.syncfs
    except (OSError, AttributeError):
        return None

    def run(handle: int) -> None:
        if function(handle) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return run


_LATER = threading.local()
_sync_disk = _disk_sync()


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let an operating-system error say which file it is about."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


class Deferred:
    """A file for libraries that write by callback: an error is kept until ``settle``, since some end the process.

    After an error nothing more is written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Take the bytes, return how many there were."""
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: the file is flushed and synced when it is complete."""

    def settle(self) -> None:
        """Raise the error that was kept, if there is one."""
        if self._error is not None:
            raise self._error


def _left(part: Path) -> bool:
    """Return whether nobody is writing the file any more."""
    handle = os.open(part, os.O_RDONLY | _SAFE)
    try:
        return stat.S_ISREG(os.fstat(handle).st_mode) and _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Mark an open file as in use until it is closed; return False if another process has done so."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
    return True


def _rename_or_remove(part: Path, path: Path) -> None:
    try:
        rename(part, path)
    except BaseException:
        _remove(part)
        raise


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()


def _refuse_special(path: Path) -> None:
    """Raise if a device or pipe is in the place of a file: it would be replaced by a file, for everybody."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "it is a folder" if stat.S_ISDIR(mode) else "it is a device or a pipe, not a file")


def _planted(path: Path) -> VerificationError:
    return VerificationError(
        f"{path} is a link, has a second name (a hard link), or is not a file of its own: what is written there would "
        "land elsewhere, so nothing is. Find out who put it there, then remove the link, or copy what it points to "
        "in its place."
    )
