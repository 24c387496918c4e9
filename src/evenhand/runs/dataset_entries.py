"""Entries of the dataset ledger on disk: one file per run, and one that holds them all so that thousands read fast.

The file of an entry is what counts. The merged one only saves reading it again: an entry is taken from there as long as
its own file has the size and the times that it had then. What is damaged is named, and is never passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.accounting.plan import Plan
from evenhand.errors import EvenhandError, UsageError, VerificationError
from evenhand.runs.folder import write_durably

MERGED = "merged.cache"
_ENTRY = re.compile(r"(\d{6,9})\.json(\.damaged)?")
_OFTEN = 50
"""So many entries must have been read anew before the merged file is written again."""
_HEADS: untrusted.Shape = {"heads": [str], "seeded": bool}
_TEXT = (str, type(None))
_ABOUT: untrusted.Shape = {"plan": dict, "owners": _TEXT, "seeded": bool, "run": _TEXT}
_MERGED: untrusted.Shape = {"plans": [dict], "entries": {str: list}, "seeded": {str: list}, "sha256": str}


@dataclass(frozen=True)
class Entry:
    """One run on a dataset.

    ``owners`` is a secret name of who owned which record in it (None where that was not noted), ``seeded`` whether its
    noise seed was public, ``run`` its random name, which a run keeps when its budgets change and in forks.
    """

    plan: Plan
    owners: str | None
    seeded: bool = False
    run: str | None = None

    @cached_property
    def key(self) -> tuple[str | None, str]:
        """Return the run's name and its plan's digest."""
        return self.run, self.plan.digest

    def new(self, known: Set[tuple[str | None, str]]) -> Plan:
        """Return a plan of the steps that no other entry counts.

        Steps before a change of budgets are left out only if an entry of the SAME run has them.
        """
        before = self.plan.earlier[-1].plan if self.plan.earlier else None
        return self.plan.from_here() if self.run is not None and (self.run, before) in known else self.plan

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the entry's file."""
        return {"plan": self.plan.to_json(), "owners": self.owners, "seeded": self.seeded, "run": self.run}


@dataclass(frozen=True)
class Entries:
    """All entries of a dataset, the next free number, how many are gone, and the runs whose noise seed was public."""

    found: list[Entry]
    number: int
    lost: int
    open_to_all: frozenset[str]


def read(folder: Path) -> Entries:
    """Read and check all entries in a folder; files of other names are ignored.

    Raises:
      EvenhandError: an entry cannot be read; the message says which, and what to do.
    """
    files = {name: match for name in _names(folder) if (match := _ENTRY.fullmatch(name))}
    number = max((int(match[1]) + 1 for match in files.values()), default=0)
    there = sorted((name for name, match in files.items() if match[2] is None), key=lambda name: int(name[:-5]))
    merged = _Merged.read(folder / MERGED)
    entries = [merged.entry(folder / name) for name in there]
    heads = [folder / "heads" / name for name in _names(folder / "heads") if name.endswith(".json")]
    seeded = frozenset(file.stem for file in heads if merged.public_seed(file))
    if merged.anew >= _OFTEN:
        merged.write(folder / MERGED)
    return Entries(entries, number, number - len(there), seeded)


def heads(file: Path) -> dict[str, Any]:
    """Return how far each copy of a run was seen; nothing of a damaged file, so that the run counts once more."""
    nothing: dict[str, Any] = {"heads": [], "seeded": False}
    if not file.exists():
        return nothing
    try:
        return dict(untrusted.read_json(file, _HEADS))
    except VerificationError:
        return nothing


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _stamp(file: Path) -> str:
    """Return a text that changes whenever somebody writes the file, or puts another one in its place."""
    about = file.stat()
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


class _Merged:
    """Entries of the merged file, and those that were read from their own files since."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.anew = 0
        self._known = known
        self._places: dict[str, int] = {}
        self._plans: list[Plan] = []
        self._from_merged: dict[int, Plan] = {}
        self._entries: dict[str, list[Any]] = {}
        self._seeded: dict[str, list[Any]] = {}

    @classmethod
    def read(cls, file: Path) -> _Merged:
        """Read the merged file; start with none of it if the file is missing, damaged or of another form."""
        nothing: dict[str, Any] = {"plans": [], "entries": {}, "seeded": {}}
        if not file.exists():
            return cls(nothing)
        try:
            content = untrusted.read_json(file, _MERGED)
        except VerificationError:
            return cls(nothing)
        return cls(content if content["sha256"] == _digest(content) else nothing)

    def entry(self, file: Path) -> Entry:
        """Return the entry of a file; read the file only if it has changed since the merged file was written.

        A damaged entry raises EvenhandError: without it too little would be stated.
        """
        try:
            stamp, known = _stamp(file), self._known["entries"].get(file.name)
            if known is not None and known[0] == stamp:
                plan, about = self._merged_plan(known[1]), known[2:]
            else:
                written, about = _parts(untrusted.read_json(file))
                plan = Plan.from_json(written)
                self.anew += 1
            entry = Entry(plan, *about)
            place = self._place(plan)
        except (EvenhandError, OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
            raise EvenhandError(
                f"An entry of the dataset ledger is damaged: {file}. It counts a run on these data, and without it too "
                "little would be stated. Put it back from a backup; or, if there is none, rename it to "
                f"{file.name}.damaged: the run then counts as one whose epsilon is not known. Nothing was spent."
            ) from None
        self._entries[file.name] = [stamp, place, *about]
        return entry

    def _merged_plan(self, place: int) -> Plan:
        if place not in self._from_merged:
            self._from_merged[place] = Plan.from_json(self._known["plans"][place])
        return self._from_merged[place]

    def _place(self, plan: Plan) -> int:
        """Return the index of a plan; equal plans share one."""
        if plan.digest not in self._places:
            self._places[plan.digest] = len(self._plans)
            self._plans.append(plan)
        return self._places[plan.digest]

    def public_seed(self, file: Path) -> bool:
        """Return whether the run of a file of heads had a public noise seed."""
        try:
            stamp = _stamp(file)
        except OSError:
            return False
        known = self._known["seeded"].get(file.name)
        if known is None or known[0] != stamp:
            known = [stamp, heads(file)["seeded"]]
            self.anew += 1
        self._seeded[file.name] = known
        return known[1] is True

    def write(self, file: Path) -> None:
        """Write what is known now, durable on return, unless it is too large to be read at once."""
        body = {
            "plans": [plan.to_json() for plan in self._plans],
            "entries": self._entries,
            "seeded": self._seeded,
        }
        text = (json.dumps({**body, "sha256": _digest(body)}, separators=(",", ":")) + "\n").encode()
        if len(text) <= untrusted.PARSED:
            write_durably(file, text)


def _parts(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str | None, bool, str | None]]:
    """Return plan, owners, seed flag and run name of an entry's file; an early version's file is a plan alone."""
    if "plan" not in content:
        return content, (None, False, None)
    about = {"seeded": False, "run": None, **content}
    if not untrusted.fits(about, _ABOUT):
        raise UsageError("This is not an entry.")
    return about["plan"], (about["owners"], about["seeded"], about["run"])


def _digest(content: Mapping[str, Any]) -> str:
    body = [content[key] for key in ("plans", "entries", "seeded")]
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
