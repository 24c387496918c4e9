"""Turn errors of the operating system into errors that say what failed, what is charged and what to type.

A disk that is full or read-only, a folder that was moved, too many open files, no memory: each becomes one
``StorageError`` or ``OutOfMemory``. A run can always be continued after it, since charges are on disk before steps run.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenhand.errors import EvenhandError, OutOfMemory, StorageError
from evenhand.runs.folder import Folder

_HELP = {
    errno.ENOSPC: "Make room on that disk first.",
    errno.EDQUOT: "Make room within your quota first.",
    errno.EFBIG: "Raise the limit on the size of files first (ulimit -f).",
    errno.EROFS: "Make it writable first, or copy the folder to a disk that is.",
    errno.EACCES: "See to it first that you may write there.",
    errno.EPERM: "See to it first that you may write there.",
    errno.EMFILE: "Raise the limit on open files first (ulimit -n).",
    errno.ENFILE: "Close other programs first: the machine has too many files open.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EIO: "The disk or the connection to it may be failing: look at it first.",
}


@contextmanager
def boundary(path: Path | None = None) -> Iterator[None]:
    """Turn errors of the operating system inside the block into errors that say how to go on.

    Args:
      path: the run folder, if it is known; else it is found by the file that could not be read or written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) and error.advice is not None:
            raise
        raise storage_error(error, path) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, EvenhandError) or not _out_of_memory(error):
            raise
        raise OutOfMemory(
            f"The memory of this machine is full. {after(path)}".strip()
            + " Give it less to do at once: --micro-batch, or fewer other programs."
        ) from error


def storage_error(error: OSError, path: Path | None = None) -> StorageError:
    """Return the error that says which file it is about, why, what is charged, and what to type."""
    file = None if error.filename is None else Path(os.fsdecode(error.filename))
    if isinstance(error, StorageError):
        what = str(error)
    else:
        reason = error.strerror or type(error).__name__
        what = f"{'A file' if file is None else file} cannot be read or written ({reason})."
    known = _run_of(file) if path is None and file is not None else path
    advice = " ".join(part for part in (_HELP.get(error.errno or 0, ""), after(known)) if part)
    return StorageError(f"{what} {advice}".strip(), code=error.errno, file=file, advice=advice)


def after(path: Path | None) -> str:
    """Return a sentence on what is charged in a run folder and what to type to go on; empty where there is no run."""
    if path is None:
        return ""
    folder = Folder(path)
    try:
        if not path.is_dir():
            return (
                f"The run folder {path} is not there any more. What is charged stands in its ledger; if the folder was "
                "moved, go on where it is now: evenhand resume FOLDER"
            )
        if not folder.ledger_file.exists() or not folder.ledger_file.stat().st_size:
            return "Nothing is charged: give the same command again then."
        reading = folder.ledger()
        if not reading.reserved:
            return "Nothing is charged: give the same command again then."
        if folder.finished():
            return (
                f"All {reading.reserved} steps are charged, and the model and its statement are in place; the report "
                f"and the model card are written by: evenhand report {path}"
            )
        return (
            f"{reading.reserved} of {reading.steps} steps are charged and stay charged; nothing more is spent until "
            f"you go on: evenhand resume {path}"
        )
    except (EvenhandError, OSError, MemoryError):
        return (
            "What is charged cannot be read now; it stands in the ledger, and nothing more is spent until you go on: "
            f"evenhand resume {path}"
        )


def _run_of(file: Path) -> Path | None:
    """Return the run folder that a file lies in, or is."""
    try:
        near = (file, *list(file.absolute().parents)[:3])
        return next((folder for folder in near if (folder / "plan.json").exists()), None)
    except OSError:
        return None


def _out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, in Python or in torch, which has errors of its own for it."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError, *((torch.OutOfMemoryError,) if torch is not None else ()))
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
