"""Do after a fault what a person would: type the next command, or the one that the message names, and look again."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import checker
from checker import Finding
from host import Ended, Place
from scenarios import Command, Scenario, Stage

_COMMANDS = "resume|train|report|statement|compare|keys|init"
_NAMED = re.compile(rf"`evenhand ([^`]+)`|(?:^|[\s(])evenhand ((?:{_COMMANDS}) [^\n`]+)")
_ELSEWHERE = re.compile(r"another (--out|folder|file)|new (folder|run)", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\b(RUN|KEY|FILE|FOLDER|NAME)\b|\.\.\.")
_SENTENCE = re.compile(r"^(evenhand: .|NOT verified: .|Usage: |- failed: (?!.*Error in the run))", re.MULTILINE)
_HOPS = 6


@dataclass
class Recovery:
    """How a place was brought to an end: the end's name, what was typed, what was found on the way."""

    end: str = checker.DEAD_END
    typed: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    said: str = ""
    last: str = ""


def advised(message: str) -> Iterator[Command]:
    """Yield the commands that a message names.

    >>> list(advised("Continue it with `evenhand resume a/run`, or choose another --out."))
    [('resume', 'a/run')]
    >>> list(advised("Continue with: evenhand resume a/run --yes."))
    [('resume', 'a/run', '--yes')]
    """
    for quoted, plain in _NAMED.findall(message):
        words = quoted or re.split(r"[;,] |\. |\.$|\)$", plain)[0]
        if not _PLACEHOLDER.search(words):
            try:
                yield tuple(shlex.split(words))
            except ValueError:
                continue


def judged(ended: Ended, words: str) -> list[Finding]:
    """Return what is wrong with how a command ended, whatever it was asked to do."""
    found = []
    if ended.traceback:
        found.append(Finding(checker.TRACEBACK, f"{words}: {ended.said[:160]}"))
    if ended.hung:
        found.append(Finding(checker.HANG, f"{words}: ended after {ended.seconds:.0f} s"))
    if ended.code not in (0, -signal.SIGKILL) and not found and not _SENTENCE.search(ended.err + ended.out):
        found.append(Finding(checker.WORDLESS, f"{words}: exit code {ended.code}, {ended.said[:80] or 'nothing said'}"))
    return found


def recover(stage: Stage, place: Place, scenario: Scenario) -> Recovery:
    """Type what a person would, until the command's work is done or nothing is left to try.

    A run whose model is released and verified is done, although no command goes on with it.
    """
    found, elsewhere = Recovery(), False
    waiting = list(scenario.again)
    while waiting and len(found.typed) < _HOPS:
        command = waiting.pop(0)
        ended = _try(stage, place, command, found)
        if ended.code == 0 or (ended.code == 3 and "finished" in ended.err):
            found.end = "resumed" if command[0] in ("resume", "attach") else "repeated"
            return found
        elsewhere = elsewhere or bool(_ELSEWHERE.search(ended.err))
        named = [other for other in advised(ended.err) if shlex.join(other) not in found.typed and other[0] != "verify"]
        waiting = [*named[:1], *waiting]
    released = scenario.command[0] == "train" and (place.run / "model.safetensors").exists()
    if released and _verified(stage, place, place.run).code == 0:
        found.end = "released before"
    elif elsewhere and scenario.anew is not None and _try(stage, place, scenario.anew, found).code == 0:
        found.end = "begun anew"
    return found


def _try(stage: Stage, place: Place, command: Command, found: Recovery) -> Ended:
    typed = stage.typed(place, command)
    words = shlex.join(typed if isinstance(typed, list) else command)
    ended = stage.run(place, command)
    found.typed.append(words)
    found.findings += judged(ended, command[0])
    found.said, found.last = ended.out, ended.said if ended.code else found.last
    return ended


def settled(stage: Stage, place: Place, recovery: Recovery, known: set[str]) -> list[Finding]:
    """Look at everything once more when a person is done: verified, true, complete, clean."""
    found = checker.privacy(place)
    for run in checker.runs(place):
        ended = _verified(stage, place, run)
        found += judged(ended, "verify")
        charged = sum(map(len, checker.charges(run).values()))
        left = recovery.end == "begun anew" and run == place.run
        if ended.code != 0 and (charged or not left):
            found.append(Finding(checker.UNVERIFIED, ended.said[:160] or "no word"))
        elif left and charged:
            lost = f"{charged} steps are charged, the work begins anew: {recovery.last[:99]}"
            found.append(Finding(checker.LOST, lost))
        if not left:
            found += _complete(stage, place, run, known)
            found += checker.metrics(place, run, recovery.said if run == place.run else "")
    if recovery.end == checker.DEAD_END:
        found.append(Finding(checker.DEAD_END, f"{recovery.last[:200]}"))
    elif recovery.end != "begun anew":
        found += checker.leftovers(place, known)
    return found


def _verified(stage: Stage, place: Place, run: Path) -> Ended:
    """Verify a run; where that says that a report puts things right, write one and verify again."""
    ended = stage.run(place, ("verify", str(run)))
    if ended.code != 0 and "`evenhand report`" in ended.out and stage.run(place, ("report", str(run))).code == 0:
        return stage.run(place, ("verify", str(run)))
    return ended


def _complete(stage: Stage, place: Place, run: Path, known: set[str]) -> list[Finding]:
    """Write the report of a released model again where it is missing, then ask for what an undisturbed run has."""
    if not (run / "model.safetensors").exists() or f"{run.name}/report.html" not in known:
        return []
    found = []
    if not (run / "report.html").exists() or not (run / "model-card.md").exists():
        ended = stage.run(place, ("report", str(run), "--card", str(run / "model-card.md")))
        found += judged(ended, "report")
    wanted = ("report.html", "model-card.md", "statement.json", "statement.md")
    return [*found, *(Finding(checker.MISSING, name) for name in wanted if not (run / name).exists())]
