"""Commands in this process under watch: time, tracebacks, data values in what is printed, code that was executed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from typer.main import get_command

from commands import evenhand
from evenhand import cli
from evenhand.errors import UsageError
from evenhand.runs.folder import Folder
from evenhand.training import fit
from evenhand.training.guards import coupling_guard

SECONDS = 2.0
"""Of processor time for one command; more is a hang. A command that waits is ended after the real time below."""
WAITING = 60.0
CODES = frozenset((0, 1, 2, 3))
REACHED = "everything was accepted: training would begin here"
MARK = "executed-by-nobody"
"""A file of this name says that code of an input was executed."""


class Hang(BaseException):
    """A command took longer than it may."""


@dataclass
class Watch:
    """What happened in a campaign: counts of ends, and one line for each that should not have happened."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def command(self, case: str, folder: Path, *arguments: object, secrets: frozenset[str] = frozenset()) -> str:
        """Run a command in a folder and look at everything that it left behind; returns what it printed."""
        printed, code = "", "hang"
        try:
            with _limited(), mock.patch.object(cli, "app", _commands()):
                done = evenhand(*arguments, cwd=folder)
            printed, code = done.stdout + done.stderr, str(done.returncode)
        except Hang as hang:
            self.faults.append(f"{case}: hang {hang}: {_short(arguments)}")
        except Exception as error:
            self.faults.append(f"{case}: traceback {type(error).__name__}: {_short(arguments)}: {str(error)[:200]}")
        self.ends[f"{arguments[0]} {'accepted' if REACHED in printed else code}"] += 1
        if code.lstrip("-").isdigit() and int(code) not in CODES:
            self.faults.append(f"{case}: exit code {code}: {_short(arguments)}")
        if "Traceback (most" in printed or "was not foreseen" in printed:
            place = printed[printed.find("not foreseen") :][:90] if "not foreseen" in printed else printed[-200:]
            self.faults.append(f"{case}: unforeseen {place!r}: {_short(arguments)}")
        self.faults += [f"{case}: printed {secret!r}: {_short(arguments)}" for secret in _found(secrets, printed)]
        if next(folder.rglob(MARK), None) is not None:
            self.faults.append(f"{case}: code was executed: {_short(arguments)}")
            for mark in folder.rglob(MARK):
                mark.unlink()
        return printed

    def unspent(self, case: str, run: Path) -> None:
        """Note it if a run that was refused has charged a step."""
        found = Folder(run)
        if found.ledger_file.exists() and found.ledger().reserved:
            self.faults.append(f"{case}: spent before it was refused")

    def shareable(self, case: str, run: Path, secrets: frozenset[str]) -> None:
        """Note it if a file of a run that may be shared holds a data value."""
        for file in run.glob("*"):
            if file.is_file() and file.name not in ("config.toml", "env.json"):
                inside = file.read_bytes().decode("latin-1")
                self.faults += [f"{case}: {file.name} holds {secret!r}" for secret in _found(secrets, inside)]


@cache
def _commands() -> Any:
    """The parser of the command line, made once: making it takes longer than most commands."""
    return get_command(cli.app)


@contextmanager
def before_training() -> Iterator[None]:
    """Everything is done except for the training itself: what is accepted ends with a sentence."""
    with (
        mock.patch.object(fit, "run", _reached),
        mock.patch.object(coupling_guard, "DRAWS", 4),
        mock.patch.object(coupling_guard, "LOOKS", 2),
    ):
        yield


def _reached(private: Any, *_: Any, **__: Any) -> None:
    private.close()
    raise UsageError(REACHED)


@contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, _: object) -> None:
        raise Hang("on the processor" if number == signal.SIGPROF else "waiting")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _found(secrets: frozenset[str], text: str) -> list[str]:
    return [secret for secret in secrets if secret in text][:3]


def _short(arguments: tuple[object, ...]) -> str:
    return " ".join(str(argument)[:60] for argument in arguments)


def told(watch: Watch, cases: int) -> str:
    """Return the counts of a campaign in words."""
    ends = ", ".join(f"{name}: {count}" for name, count in sorted(watch.ends.items()))
    commands = sum(watch.ends.values())
    head = f"up to {cases} cases, {commands} commands; {ends}; {len(watch.faults)} faults"
    return "\n".join([head, *watch.faults[:60]])


def evil(place: Path) -> Path:
    """Write a file of code that leaves a mark when it is executed."""
    text = (
        f"from pathlib import Path\nPath({str(place.parent)!r}, {MARK!r}).touch()\nimport torch\n\n"
        "def net(facts=None):\n    return torch.nn.Flatten()\n"
    )
    place.write_text(text)
    return place


def main(campaign: Callable[[int, random.Random, Path], Watch], default: int) -> None:
    """Run a campaign from the command line: program COUNT SEED."""
    import sys
    import tempfile

    count, seed = int((sys.argv[1:] or [default])[0]), int((sys.argv[2:] or [0])[0])
    os.environ["EVENHAND_STATE"] = tempfile.mkdtemp()
    with tempfile.TemporaryDirectory() as folder:
        watch = campaign(count, random.Random(seed), Path(folder))
    print(told(watch, count))
    sys.exit(bool(watch.faults))


def finished(done: subprocess.CompletedProcess[str]) -> None:
    """Assert that a command went well."""
    assert done.returncode == 0, done.stderr
