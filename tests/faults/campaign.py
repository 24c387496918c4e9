"""The campaign of faults: ``python tests/faults/campaign.py kills 500`` prints how often what was found.

Kinds: ``kills``, ``errors`` (of the operating system, at single writes), ``disks`` (sizes of full disk) and
``environment``; ``all`` is everything, ``quick`` a few that CI can wait for. The code under test is what PYTHONPATH
names.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import checker
import disks
import environment
import host
import recovery
import shim
from checker import Finding
from scenarios import BY_NAME, Scenario, Stage, make_data
from shim import Call, Fault
from tally import Outcome, Tally

PARTS = ("kills", "errors", "disks", "environment")
LEAST = 5
"""Times that every write is hit."""
_QUIET = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTHONDONTWRITEBYTECODE": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""So that the process that is forked has no threads."""


@dataclass(frozen=True)
class Campaign:
    """A stage with prepared folders, the writes of every undisturbed command, and the files that it leaves."""

    stage: Stage
    room: Path
    logs: dict[str, list[Call]]
    known: set[str]

    @classmethod
    def begun(cls, room: Path, chosen: Sequence[Scenario]) -> Campaign:
        """Run every command once without a fault and note what it writes."""
        stage = Stage(room / "data", room / "templates")
        make_data(stage.data)
        host.warm()
        logs, known = {}, set[str]()
        for scenario in chosen:
            place = stage.fresh(scenario, room / "case")
            known |= checker.names(place)
            ended = stage.run(place, scenario.command, fault=Fault())
            found = checker.privacy(place) + [
                finding for run in checker.runs(place) for finding in checker.metrics(place, run, ended.out)
            ]
            if ended.code != 0 or found:
                raise RuntimeError(f"{scenario.name} fails without a fault: {found} {ended.err}")
            if checker.unseen(place):
                raise RuntimeError(f"{scenario.name}: the witness did not see noise of {checker.unseen(place)} steps.")
            logs[scenario.name] = [call for call in shim.calls(place.side / "control") if call.number]
            known |= checker.names(place)
        return cls(stage, room, logs, known)

    def targets(self, scenario: Scenario) -> dict[str, list[Call]]:
        """Return the calls that write each file of a command, by the file's name in the end."""
        logged, place = self.logs[scenario.name], host.Place(self.room / "case")
        finals = shim.final_names(logged)
        found: dict[str, list[Call]] = defaultdict(list)
        for call in logged:
            found[_target(shim.normalised(finals[call.number], place.watched))].append(call)
        return found

    def suffer(self, scenario: Scenario, fault: Fault, target: str) -> Outcome:
        """Let one fault happen, recover as a person would, and look at everything."""
        started = time.monotonic()
        place = self.stage.fresh(scenario, self.room / "case")
        ended = self.stage.run(place, scenario.command, fault=fault)
        end, found = self.look(place, scenario, ended)
        return Outcome(scenario.name, str(fault), target, end, tuple(found), time.monotonic() - started)

    def first_look(self, place: host.Place, scenario: Scenario, ended: host.Ended) -> list[Finding]:
        """Judge a place right after a disturbed command."""
        found = recovery.judged(ended, scenario.command[0])
        found += checker.outside(place, shim.calls(place.side / "control"))
        for run in checker.runs(place):
            found += recovery.judged(self.stage.run(place, ("verify", str(run))), "verify at once")
        return found

    def look(self, place: host.Place, scenario: Scenario, ended: host.Ended) -> tuple[str, list[Finding]]:
        """Judge a place right after a disturbed command, recover, judge again; return the end and all findings."""
        found = self.first_look(place, scenario, ended) + checker.privacy(place)
        recovered = recovery.recover(self.stage, place, scenario)
        found += recovered.findings + recovery.settled(self.stage, place, recovered, self.known)
        return recovered.end, found


def _target(name: str) -> str:
    """Return a file's name without the cell of a comparison that it belongs to."""
    return re.sub(r"[^/]+-seed\d+-\w+(?=/)", "<cell>", name)


def kills(campaign: Campaign, chosen: Sequence[Scenario], count: int | None) -> Iterator[tuple[Scenario, Fault, str]]:
    """Yield kills: every write of every command once, then once more, and so on; without a count ``LEAST`` times."""
    draw = random.Random(0)
    every = [(scenario, name, calls) for scenario in chosen for name, calls in campaign.targets(scenario).items()]
    count = LEAST * len(every) if count is None else count
    rounds = -(-count // len(every))
    spread = [[(scenario, fault, name) for fault in _spread(calls, rounds, draw)] for scenario, name, calls in every]
    draw.shuffle(spread)
    yield from [chosen[turn] for turn in range(rounds) for chosen in spread][:count]


def _spread(calls: Sequence[Call], count: int, draw: random.Random) -> list[Fault]:
    """Return kills that fall before, within and after the calls of one file, each kind of call in turn."""
    kinds: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        kinds[call.kind].append(call)
    points = [("middle", kinds["write"])] if "write" in kinds else []
    points += [("before", found) for kind, found in kinds.items() if kind != "open"]
    points += [("after", found) for kind, found in kinds.items() if kind not in ("sync", "unlink")]
    points = points or [("before", list(calls)), ("after", list(calls))]
    draw.shuffle(points)
    turns = itertools.islice(itertools.cycle(points), count)
    return [Fault(action, draw.choice(found).number) for action, found in turns]


def errors(campaign: Campaign, chosen: Sequence[Scenario], count: int) -> Iterator[tuple[Scenario, Fault, str]]:
    """Yield errors of the operating system, spread over all writes and all errors."""
    draw = random.Random(1)
    every = [(scenario, name, calls) for scenario in chosen for name, calls in campaign.targets(scenario).items()]
    draw.shuffle(every)
    for place in range(count):
        scenario, name, calls = every[place % len(every)]
        error = list(shim.ERRORS)[place % len(shim.ERRORS)]
        hit = [call for call in calls if call.kind in shim.ERRORS[error]] or list(calls)
        yield scenario, Fault(draw.choice(("once", "onwards")), draw.choice(hit).number, error), name


def quick(campaign: Campaign) -> Iterator[Outcome]:
    """Yield what came of a few faults of every kind, at the writes that matter most."""
    train, density = BY_NAME["train"], BY_NAME["density"]
    of_train, of_density = (_numbers(campaign, scenario) for scenario in (train, density))
    yield from _suffered(
        campaign,
        iter(
            [
                (train, Fault("middle", of_train["ledger.jsonl"][0]), "first row of the ledger"),
                (train, Fault("middle", of_train["checkpoint.pt"][-1]), "last checkpoint"),
                (train, Fault("after", of_train["checkpoint.pt"][-1]), "last checkpoint"),
                (density, Fault("middle", of_density["metrics.jsonl"][0]), "metrics"),
                (train, Fault("onwards", of_train["metrics.jsonl"][0], errno.ENOSPC), "metrics"),
                (train, Fault("once", of_train["statement.json"][0], errno.EIO), "statement"),
            ]
        ),
    )
    yield from disks.outcomes(campaign, [train], 2)
    yield from environment.outcomes(campaign, [train], None, only=environment.QUICK)


def _numbers(campaign: Campaign, scenario: Scenario) -> dict[str, list[int]]:
    """Return the numbers of the calls that write bytes to a file, by the last part of its name in the end."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, logged in campaign.targets(scenario).items():
        found[name.rpartition("/")[2]] += [call.number for call in logged if call.kind == "write"]
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the parts that were asked for; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all", "quick"])
    parser.add_argument("count", type=int, nargs="?", default=None, help="how many; default the usual number")
    parser.add_argument("--scenarios", default="", help="names separated by commas; default all")
    parser.add_argument("--log", type=Path, help="write every outcome to this file, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, as the last line")
    asked = parser.parse_args(arguments)
    names = asked.scenarios or ("train,density" if asked.part == "quick" else ",".join(BY_NAME))
    chosen = [BY_NAME[name] for name in names.split(",")]
    with tempfile.TemporaryDirectory(prefix="evenhand-faults-", ignore_cleanup_errors=True) as folder:
        tallies = list(_parts(asked, chosen, Path(folder)))
    if asked.json:
        print(json.dumps({tally.part: {"faults": len(tally.outcomes), **tally.counts()} for tally in tallies}))
    return int(any(any(tally.counts().values()) for tally in tallies))


def _parts(asked: argparse.Namespace, chosen: Sequence[Scenario], room: Path) -> Iterator[Tally]:
    campaign = Campaign.begun(room, chosen)
    for scenario in chosen:
        targets = campaign.targets(scenario)
        print(f"{scenario.name}: {len(campaign.logs[scenario.name])} calls write {len(targets)} files", flush=True)
    parts: dict[str, Callable[[int | None], Iterator[Outcome]]] = {
        "kills": lambda count: _suffered(campaign, kills(campaign, chosen, count)),
        "errors": lambda count: _suffered(campaign, errors(campaign, chosen, count or 200)),
        "disks": lambda count: disks.outcomes(campaign, chosen, count or 100),
        "environment": lambda count: environment.outcomes(campaign, chosen, count),
        "quick": lambda _: quick(campaign),
    }
    for name, outcomes in parts.items():
        if asked.part == name or (asked.part == "all" and name in PARTS):
            tally = Tally(name, asked.log)
            for outcome in outcomes(asked.count):
                tally.add(outcome)
                if len(tally.outcomes) % 50 == 0:
                    print(f"{name}: {len(tally.outcomes)} faults so far", flush=True)
            print(tally.text(), flush=True)
            yield tally


def _suffered(campaign: Campaign, faults: Iterator[tuple[Scenario, Fault, str]]) -> Iterator[Outcome]:
    for scenario, fault, target in faults:
        yield campaign.suffer(scenario, fault, target)


def _with_shim() -> None:
    """Start this program again with the shim, where it was started without."""
    if shim.loaded():
        return
    with tempfile.TemporaryDirectory(prefix="evenhand-shim-") as folder:
        library = shim.compiled(Path(folder))
        if library is None:
            print("There is no C compiler, or no /proc: the campaign needs both.")
            sys.exit(77)
        done = os.spawnve(
            os.P_WAIT, sys.executable, [sys.executable, *sys.argv], {**os.environ, **_QUIET, "LD_PRELOAD": str(library)}
        )
    sys.exit(done)


if __name__ == "__main__":
    _with_shim()
    sys.exit(main(sys.argv[1:]))
