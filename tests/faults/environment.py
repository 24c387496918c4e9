"""Faults of the surroundings: signals, folders that go away, descriptors, streams, locales, clocks, links."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import resource
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checker
from checker import Finding
from host import Place, command
from scenarios import BY_NAME, Command, Scenario
from shim import Fault
from tally import Outcome

if TYPE_CHECKING:
    from campaign import Campaign

Act = Callable[[Place], Any]
VICTIM = "not to be touched"
_SMALL = ("report", "statement", "sign", "keys", "init", "predict")
"""Commands that do not train."""


@dataclass
class Trouble:
    """One fault: what is done before the command, in its process, at one of its steps, and to make things good again.

    ``real``: a fresh interpreter, since a fork has its streams and its locale already. ``destroys``: the person's own
    deed took the ledger away, so that nothing can be asked of it. ``mute``: nothing that is said can be heard.
    """

    name: str
    scenario: str = "train"
    before: Act | None = None
    setup: Act | None = None
    at_step: tuple[int, Callable[[Place, int], Any]] | None = None
    after: Act | None = None
    fault: Fault = field(default_factory=Fault)
    watched: Callable[[Place], Sequence[Path]] = lambda place: place.watched
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    real: bool = False
    destroys: bool = False
    mute: bool = False
    command: Command | None = None


QUICK = ("SIGHUP at step 9", "link in the place of run/private", "link in the place of run/plan.json")


def outcomes(
    campaign: Campaign, chosen: Sequence[Scenario], count: int | None, only: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Yield what came of every trouble, or of some spread over all of them, or of those with a name in ``only``."""
    names = {scenario.name for scenario in chosen}
    every = [trouble for trouble in [*troubles(), *links(campaign)] if trouble.scenario in names]
    every = [trouble for trouble in every if not only or trouble.name in only]
    picked = every if count is None else [every[place * len(every) // count] for place in range(min(count, len(every)))]
    for trouble in picked:
        started = time.monotonic()
        end, found = _met(campaign, trouble)
        yield Outcome(trouble.scenario, trouble.name, "environment", end, tuple(found), time.monotonic() - started)


def _met(campaign: Campaign, trouble: Trouble) -> tuple[str, list[Finding]]:
    scenario = BY_NAME[trouble.scenario]
    place = campaign.stage.fresh(scenario, campaign.room / "case")
    held = trouble.before(place) if trouble.before is not None else None
    typed = campaign.stage.typed(place, trouble.command or scenario.command)
    work = partial(_executed, typed) if trouble.real and isinstance(typed, list) else typed
    ended = command(place, work, **_options(place, trouble))
    if held is not None:
        os.close(held)
    if trouble.after is not None:
        trouble.after(place)
    found = _victims(place)
    place.made()
    if trouble.destroys:
        return "destroyed", [*found, *campaign.first_look(place, scenario, ended)]
    if trouble.mute:
        ended = replace(ended, err=ended.err or "evenhand: (not heard)")
    end, more = campaign.look(place, scenario, ended)
    return end, [*found, *more, *([] if found else _victims(place))]


def _options(place: Place, trouble: Trouble) -> dict[str, Any]:
    def setup() -> None:
        for name in trouble.unset:
            os.environ.pop(name, None)
        if trouble.setup is not None:
            trouble.setup(place)

    options: dict[str, Any] = {"setup": setup, "environment": trouble.environment}
    if not trouble.real:
        options |= {"fault": trouble.fault, "watched": trouble.watched(place)}
    if trouble.at_step is not None:
        options["during"] = _Once(place, *trouble.at_step)
    return options


class _Once:
    """Does something to a process when the witness has seen so many steps."""

    def __init__(self, place: Place, step: int, act: Callable[[Place, int], Any]) -> None:
        self._place, self._act, self._done = place, act, False
        file = place.side / "witness"
        self._from = step + (file.read_bytes().count(b"\n") if file.exists() else 0)

    def __call__(self, process: int) -> None:
        file = self._place.side / "witness"
        if not self._done and file.exists() and file.read_bytes().count(b"\n") >= self._from:
            self._done = True
            self._act(self._place, process)


def _executed(words: Sequence[str]) -> int:
    os.execv(sys.executable, [sys.executable, "-m", "evenhand", *words])


def _victims(place: Place) -> list[Finding]:
    """Return a finding for every file outside that was changed or made."""
    victims = [file for file in (place.root / "victims").rglob("*") if not file.is_dir()]
    found = [file for file in victims if file.read_bytes() != VICTIM.encode()]
    found += list(place.cwd.iterdir()) if place.cwd.exists() else []
    return [Finding(checker.OUTSIDE, f"{file.parent.name}/{file.name} was written") for file in found]


def troubles() -> list[Trouble]:
    """Return the faults that do not depend on which files there are."""
    parts = (_signals, _folders, _limits, _refusals, _states, _streams, _words, _clocks, _locks)
    return [trouble for part in parts for trouble in part()]


def _signals() -> Iterator[Trouble]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for scenario, step in (("train", 1), ("train", 9), ("resume", 3), ("density", 1), ("compare", 4)):
            yield Trouble(f"{number.name} at step {step}", scenario, at_step=(step, partial(_send, [number])))
    yield Trouble("SIGINT twice", at_step=(3, partial(_send, [signal.SIGINT] * 2)))
    yield Trouble("terminal closed", before=_terminal, setup=_controlled, at_step=(3, _hang_up))


def _send(numbers: Sequence[int], _: Place, process: int) -> None:
    for number in numbers:
        os.kill(process, number)
        time.sleep(0.05)


_OPENED: list[int] = []


def _terminal(_: Place) -> None:
    _OPENED[:] = pty.openpty()


def _controlled(place: Place) -> None:
    master, slave = _OPENED
    os.close(master)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for number in (0, 1):
        os.dup2(slave, number)
    os.environ["TERM"] = "xterm"


def _hang_up(_: Place, __: int) -> None:
    for number in _OPENED:
        os.close(number)


def _deleted(folder: Path) -> None:
    """Remove a folder into which a running process may still be writing."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def _folders() -> Iterator[Trouble]:
    moved = partial(_rename, "run", "moved")
    yield Trouble("folder moved", at_step=(3, lambda place, _: moved(place)), after=_moved_back)
    yield Trouble("folder moved", "resume", at_step=(3, lambda place, _: moved(place)), after=_moved_back)
    yield Trouble("folder deleted", at_step=(3, lambda place, _: _deleted(place.run)), destroys=True)
    for name in ("private", "ledger.jsonl", "plan.json"):
        act = partial(_removed, name)
        yield Trouble(f"{name} deleted", at_step=(3, lambda place, _, act=act: act(place)), destroys=True)  # type: ignore[misc]
    yield Trouble("state deleted", at_step=(3, lambda place, _: _deleted(place.state)))
    yield Trouble("working directory deleted", setup=_without_cwd)
    relative = (*BY_NAME["train"].command[:-1], "run")
    yield Trouble("working directory deleted, folder relative", setup=_without_cwd, command=relative)


def _rename(old: str, new: str, place: Place) -> None:
    (place.top / old).rename(place.top / new)


def _moved_back(place: Place) -> None:
    if (place.top / "moved").exists():
        shutil.rmtree(place.run, ignore_errors=True)
        _rename("moved", "run", place)


def _removed(name: str, place: Place) -> None:
    file = place.run / name
    _deleted(file) if file.is_dir() else file.unlink(missing_ok=True)


def _without_cwd(place: Place) -> None:
    place.cwd.rmdir()


def _limits() -> Iterator[Trouble]:
    for number in (6, 7, 8, 9, 10, 12):
        limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (number, number))
        yield Trouble(f"at most {number} descriptors", setup=lambda _, limit=limit: limit())  # type: ignore[misc]


def _refusals() -> Iterator[Trouble]:
    for error in (errno.EACCES, errno.EROFS):
        fault = Fault("onwards", 1, error)
        for scenario in ("train", "resume", "compare", "density", *_SMALL):
            yield Trouble(f"no writing: {errno.errorcode[error]}", scenario, fault=fault)
        yield Trouble(f"state not writable: {errno.errorcode[error]}", fault=fault, watched=lambda place: [place.state])


def _states() -> Iterator[Trouble]:
    yield Trouble("state is a file", before=lambda place: _file(place.state), after=lambda place: place.state.unlink())
    yield Trouble(
        "state is a dangling link",
        before=lambda place: place.state.symlink_to(place.root / "nowhere" / "deep"),
        after=lambda place: place.state.unlink(missing_ok=True),
    )
    yield Trouble("state below a file", environment={"EVENHAND_STATE": "/dev/null/state"})
    yield Trouble("state relative", environment={"EVENHAND_STATE": "state"})
    unset = ("EVENHAND_STATE", "XDG_STATE_HOME")
    yield Trouble("home below a file", environment={"HOME": "/dev/null/home"}, unset=unset)
    yield Trouble("TMPDIR missing", environment={"TMPDIR": "/dev/null/tmp"}, real=True)
    yield Trouble("stray file in state", before=lambda place: _stray(place), after=lambda place: _no_stray(place))


def _file(path: Path) -> None:
    path.write_text("a file")


def _stray(place: Place) -> None:
    folder = place.state / "datasets" / ("0" * 32)
    folder.mkdir(parents=True)
    _file(folder / "notes.json")


def _no_stray(place: Place) -> None:
    shutil.rmtree(place.state / "datasets" / ("0" * 32), ignore_errors=True)


def _streams() -> Iterator[Trouble]:
    for name, numbers in (("stdin", [0]), ("stdout", [1]), ("stderr", [2]), ("all streams", [0, 1, 2])):
        yield Trouble(f"{name} closed", setup=partial(_closed, numbers), real=True, mute=2 in numbers)
    for number, name in ((1, "stdout"), (2, "stderr")):
        yield Trouble(f"{name} full", setup=partial(_opened, "/dev/full", number), real=True, mute=number == 2)
        yield Trouble(f"{name} a broken pipe", setup=partial(_broken, number), real=True, mute=number == 2)


def _closed(numbers: Sequence[int], _: Place) -> None:
    for number in numbers:
        os.close(number)


def _opened(file: str, number: int, _: Place) -> None:
    os.dup2(os.open(file, os.O_WRONLY), number)


def _broken(number: int, _: Place) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, number)


def _words() -> Iterator[Trouble]:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name, environment in (
        ("TERM=dumb", {"TERM": "dumb"}),
        ("COLUMNS=1", {"COLUMNS": "1"}),
        ("COLUMNS no number", {"COLUMNS": "many", "LINES": "-1"}),
        ("ASCII locale", ascii_only),
        ("ASCII streams", {"PYTHONIOENCODING": "ascii"}),
        ("unknown locale", {"LC_ALL": "xx_YY.UTF-8", "LANG": "xx"}),
    ):
        yield Trouble(name, environment=environment, real=True)
    yield Trouble("ASCII locale", "owners", environment=ascii_only, real=True)
    yield Trouble("ASCII locale", "report", environment=ascii_only, real=True)


def _clocks() -> Iterator[Trouble]:
    for name, clock in (("1970", lambda: 0.0), ("3000", lambda: 32503680000.0), ("before 1970", lambda: -1e9)):
        yield Trouble(f"clock says {name}", setup=lambda _, clock=clock: setattr(time, "time", clock))  # type: ignore[misc]
    yield Trouble("clock runs backwards", setup=lambda _: setattr(time, "time", iter(range(10**9, 0, -60)).__next__))


def _locks() -> Iterator[Trouble]:
    for scenario in ("resume", "report", "sign", "rebudget"):
        yield Trouble("ledger locked by another", scenario, before=lambda place: _held(place.run / "ledger.jsonl.lock"))
    yield Trouble(
        "dataset ledger locked by another",
        "resume",
        before=lambda place: _held(next(place.state.rglob(".lock"), place.state / "lock")),
    )


def _held(file: Path) -> int:
    opened = os.open(file, os.O_RDWR | os.O_CREAT)
    fcntl.flock(opened, fcntl.LOCK_EX)
    return opened


def links(campaign: Campaign) -> Iterator[Trouble]:
    """Yield a planted link for every name that an undisturbed command gives, final or temporary, file or folder."""
    for scenario in ("train", "density", *_SMALL):
        for name, kind in sorted(_created(campaign, scenario).items()):
            plant = partial(_planted, name, kind)
            yield Trouble(f"link in the place of {name}", scenario, before=plant, after=partial(_unplanted, name))


def _created(campaign: Campaign, scenario: str) -> dict[str, str]:
    """Return the names that a command creates, with the kind of call that does; not what a person names or has."""
    place = Place(campaign.room / "case")
    logged = campaign.logs.get(scenario, [])
    found = {call.path: call.kind for call in logged if call.kind in ("open", "rename", "mkdir")}
    names = {os.path.relpath(path, place.top): kind for path, kind in found.items() if Path(path) not in place.watched}
    before = campaign.stage.templates / scenario
    return {name: kind for name, kind in names.items() if not (before / name).exists()}


def _planted(name: str, kind: str, place: Place) -> None:
    victim, path = place.root / "victims" / "victim", place.top / name
    if kind == "mkdir":
        victim.mkdir(parents=True)
    else:
        victim.parent.mkdir()
        victim.write_text(VICTIM)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim)


def _unplanted(name: str, place: Place) -> None:
    if (place.top / name).is_symlink():
        (place.top / name).unlink()
