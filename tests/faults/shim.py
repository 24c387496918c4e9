"""Compile the shim, say what is to happen at which write, and read which writes there were."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
KINDS = {"open": 1, "write": 2, "sync": 4, "rename": 8, "unlink": 16, "mkdir": 32, "truncate": 64, "link": 128}
ACTIONS = ("count", "before", "after", "middle", "once", "onwards", "full")
_LAYOUT = struct.Struct("=IIIiIIQQ4096s1024s")
_BY_NAME = ("open", "rename", "unlink", "mkdir", "link")
_GROWING = ("open", "write", "sync", "mkdir", "link", "truncate")
ERRORS: dict[int, Sequence[str]] = {
    errno.ENOSPC: _GROWING,
    errno.EDQUOT: _GROWING,
    errno.EIO: tuple(KINDS),
    errno.EROFS: _BY_NAME,
    errno.EACCES: _BY_NAME,
    errno.EMFILE: ("open",),
}
"""Kinds of call that can fail with an error of the operating system."""


@dataclass(frozen=True)
class Fault:
    """One fault: at the write with the number ``at`` an action of ``ACTIONS``, with an error or room for some bytes."""

    action: str = "count"
    at: int = 0
    error: int = 0
    room: int = 0

    def __str__(self) -> str:
        """Return the fault in a few words."""
        if self.action == "full":
            return f"disk full after {self.room} bytes"
        if self.action in ("once", "onwards"):
            return f"{errno.errorcode[self.error]} {self.action} at write {self.at}"
        return f"kill -9 {self.action} write {self.at}"

    @property
    def kills(self) -> bool:
        """Return whether the process dies of it."""
        return self.action in ("before", "after", "middle")


@dataclass(frozen=True)
class Call:
    """One write that was seen; ``number`` 0: outside of the folders that are watched."""

    number: int
    kind: str
    path: str
    source: str = ""


def compiled(folder: Path) -> Path | None:
    """Return the shim as a library in this folder, None where there is no C compiler or no LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not os.path.isdir("/proc/self/fd"):
        return None
    library = folder / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return library if done.returncode == 0 else None


def loaded() -> bool:
    """Return whether this process was started with the shim."""
    return hasattr(ctypes.CDLL(None), "faults_arm")


def arm(control: Path, folders: Sequence[Path], fault: Fault) -> None:
    """Let the fault happen in this process and those that it starts; the log is written beside the control file."""
    kinds = sum(KINDS[kind] for kind in ERRORS.get(fault.error, ()))
    names = "\n".join(map(str, folders)).encode()
    fields = (0, fault.at, ACTIONS.index(fault.action), fault.error, kinds, 0, fault.room, 0)
    control.write_bytes(_LAYOUT.pack(*fields, names, str(log_of(control)).encode()))
    if ctypes.CDLL(None).faults_arm(str(control).encode()) != 0:
        raise RuntimeError("The shim could not be armed.")


def log_of(control: Path) -> Path:
    """Return where the calls are logged."""
    return control.with_suffix(".log")


def calls(control: Path) -> list[Call]:
    """Return what was logged so far, in order."""
    try:
        lines = log_of(control).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = (line.split("\t") for line in lines)
    return [Call(int(number), kind, path, source) for number, kind, path, source in rows]


def final_names(logged: Sequence[Call]) -> dict[int, str]:
    """Return, by the number of a call, the name that its file has in the end: what is renamed later counts there."""
    found: dict[int, str] = {}
    later: dict[str, str] = {}
    for call in reversed(logged):
        if call.kind == "rename":
            later[call.source] = later.get(call.path, call.path)
        found[call.number] = later.get(call.path, call.path)
        if call.kind == "open":
            later.pop(call.path, None)
    return found


_CHANGING = (
    (re.compile(r"(?<=/\.tmp)\w{6}$"), "<random>"),
    (re.compile(r"[0-9a-f]{32,64}"), "<digest>"),
    (re.compile(r"\d{4,}"), "<number>"),
    (re.compile(r"(?<=[._-])(?=[^./]*\d)[A-Za-z0-9_]{6,}(?=\.part|\.tmp|$)"), "<random>"),
)


def normalised(path: str, folders: Sequence[Path]) -> str:
    """Return a path with what differs from run to run taken out.

    >>> normalised("/a/run/private/kept/000000031.pt", [Path("/a/run")])
    'run/private/kept/<number>.pt'
    """
    for folder in folders:
        if path == str(folder) or path.startswith(f"{folder}/"):
            path = os.path.relpath(path, folder.parent)
            break
    for pattern, name in _CHANGING:
        path = pattern.sub(name, path)
    return path
