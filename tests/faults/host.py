"""A warm process that has imported everything and started no threads: each command runs in a fork of it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import shim
from lookup import home
from witness import Witness

LIMIT = 45.0
"""Seconds after which a command hangs. Undisturbed ones take about one."""
_WITNESS = Witness()
_SUBREAPER = 36


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (negative: the signal), what it printed, how long it took."""

    code: int
    out: str
    err: str
    seconds: float
    hung: bool = False

    @property
    def traceback(self) -> bool:
        """Return whether a raw traceback reached the person."""
        return "Traceback (most recent call last)" in self.out + self.err

    @property
    def said(self) -> str:
        """Return the line that says what happened, for a report."""
        lines = [line for line in (self.err or self.out).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith(("evenhand:", "NOT verified"))]
        return (told or lines or [""])[-1]


@dataclass(frozen=True)
class Place:
    """Folders of one case: what evenhand may write to, a working directory it has no business in, and our own.

    With ``disk`` what evenhand may write to lies there.
    """

    root: Path
    disk: Path | None = None

    @property
    def top(self) -> Path:
        """Return where the folders lie that evenhand may write to."""
        return self.disk or self.root

    @property
    def run(self) -> Path:
        """Return the run folder."""
        return self.top / "run"

    @property
    def other(self) -> Path:
        """Return a second run folder, for commands that are told to take another."""
        return self.top / "other"

    @property
    def files(self) -> Path:
        """Return the folder for single files: keys, pages, predictions."""
        return self.top / "files"

    @property
    def state(self) -> Path:
        """Return what EVENHAND_STATE is set to."""
        return self.top / "state"

    @property
    def side(self) -> Path:
        """Return our own folder: witness, control, output."""
        return self.root / "side"

    @property
    def cwd(self) -> Path:
        """Return the working directory."""
        return self.root / "cwd"

    @property
    def watched(self) -> list[Path]:
        """Return the folders that evenhand may write to."""
        return [self.run, self.other, self.files, self.state]

    def made(self) -> Place:
        """Create what a person would have before the first command, and return this place."""
        for folder in (self.files, self.side, self.cwd):
            folder.mkdir(parents=True, exist_ok=True)
        return self


def warm() -> None:
    """Import all of evenhand, put the witness in and let pools fork, so that a command costs its own work only."""
    import evenhand
    import evenhand.cli

    for found in pkgutil.walk_packages(evenhand.__path__, "evenhand."):
        spec = importlib.util.find_spec(found.name)
        is_python = spec is not None and (spec.origin or "").endswith(".py")
        if is_python and not found.name.startswith(("evenhand.testing", "evenhand.__main__")):
            importlib.import_module(found.name)
    import torch

    torch.set_num_threads(1)
    vars(home("DRAWS", "LOOKS")).update(DRAWS=4, LOOKS=2)
    _import_late()
    fork = multiprocessing.get_context("fork")
    processes = SimpleNamespace(get_context=lambda _: fork, parent_process=multiprocessing.parent_process)
    vars(home("run_in_processes", "multiprocessing"))["multiprocessing"] = processes
    _WITNESS.install()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("The warm process has threads: a fork of it would not be the command alone.")


def _import_late() -> None:
    """Import what torch imports at the first step and the first save, as a fork that trains a little tells."""
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "modules")
        process = os.fork()
        if process == 0:
            try:
                _train_once(Path(folder))
                listed.write_text("\n".join(name for name in sys.modules if name not in before))
            finally:
                os._exit(0)
        os.waitpid(process, 0)
        for name in listed.read_text().splitlines():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _train_once(folder: Path) -> None:
    import torch

    import evenhand as eh

    os.environ["EVENHAND_STATE"] = str(folder)
    train, test = eh.data.digits()
    eh.fit(torch.nn.Linear(64, 10), train, epsilon=3, epochs=1, test=test, out=folder / "run", average=0.9)


def command(
    place: Place,
    work: Callable[[], int] | Sequence[str],
    *,
    fault: shim.Fault | None = None,
    watched: Sequence[Path] | None = None,
    stop_after: int | None = None,
    environment: Mapping[str, str] | None = None,
    setup: Callable[[], None] | None = None,
    during: Callable[[int], None] | None = None,
    limit: float = LIMIT,
) -> Ended:
    """Run a command line, or a function, in a fork and return how it ended.

    ``setup`` runs in the fork before it; ``during`` is called here with the process id, again and again.
    """
    out, err = place.side / "stdout", place.side / "stderr"
    started = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        code = 120
        try:
            os.setsid()
            for number, file in ((0, Path(os.devnull)), (1, out), (2, err)):
                opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(opened, number)
                os.close(opened)
            os.chdir(place.cwd)
            os.environ.update({"EVENHAND_STATE": str(place.state), **(environment or {})})
            _WITNESS.begin(place.side / "witness", stop_after)
            if setup is not None:
                setup()
            if fault is not None:
                shim.arm(place.side / "control", watched or place.watched, fault)
            code = _finish(work if callable(work) else _typed(work))
        finally:
            os._exit(code)
    hung = not _wait(process, started + limit, during)
    code = _reap(process)
    return Ended(code, _text(out), _text(err), time.monotonic() - started, hung)


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _typed(arguments: Sequence[str]) -> Callable[[], int]:
    def main() -> int:
        from evenhand.cli import main as run

        sys.argv = ["evenhand", *arguments]
        run()
        return 0

    return main


def _finish(work: Callable[[], int]) -> int:
    """Run to the end as the interpreter would: an exit code, or a traceback and 1."""
    try:
        code = work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code


_ENDED: dict[int, int] = {}


def _wait(process: int, deadline: float, during: Callable[[int], None] | None) -> bool:
    """Return whether the process ended in time."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            _ENDED[process] = os.waitstatus_to_exitcode(status)
            return True
        if during is not None:
            during(process)
        time.sleep(0.003)
    return False


def _reap(process: int) -> int:
    """End what is left of a command and its workers, which are children of ours by now; return its exit code."""
    deadline = time.monotonic() + 3
    if process not in _ENDED:
        os.kill(process, signal.SIGKILL)
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            code = _ENDED[process]
            _ENDED.clear()
            return code
        if found:
            _ENDED[found] = os.waitstatus_to_exitcode(status)
            continue
        if time.monotonic() > deadline:
            for child in _children():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.003)


def _children() -> list[int]:
    return [int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
