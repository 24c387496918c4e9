"""Reading a ledger: every row's hash, order and numbers are checked; what cannot be trusted raises LedgerError."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.errors import LedgerError

BLOCK = 64
"""Largest number of steps that one reserve row may charge; a torn line is charged as this many."""
GENESIS = "0" * 64
_DAMAGED = "A row of the ledger does not match its hash: it was damaged or edited and cannot be trusted."


@dataclass(frozen=True)
class Commit:
    """What a run of equal steps used: gradient sensitivities per class and noise, then the same for each query."""

    first: int
    count: int
    sensitivity: tuple[float, ...]
    std: float
    queries: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Reading:
    """A ledger read and checked from its first byte to its last.

    ``plan`` and ``steps`` are those that hold at its end. ``replans`` are the plans before, each with the number of
    steps that were charged when it was replaced. ``told`` are the positions whose figures loggers got. ``keys`` are the
    random keys that must not be used again: those of its segments and, after a fork, those of the run it left.
    ``blocked`` are rows that say that no figure holds.
    """

    plan: str
    steps: int
    reserved: int
    replans: tuple[tuple[str, int], ...]
    segments: tuple[Mapping[str, Any], ...]
    commits: tuple[Commit, ...]
    released: tuple[str, ...]
    told: tuple[int, ...]
    foreign: tuple[int, ...]
    forks: tuple[Mapping[str, Any], ...]
    withdrawn: Mapping[str, Any] | None
    keys: tuple[str, ...]
    hashes: tuple[str, ...]
    torn: int
    blocked: tuple[Mapping[str, Any], ...] = ()

    @property
    def head(self) -> str:
        """Hash of the last row: whoever holds it can tell whether the ledger was shortened."""
        return self.hashes[-1]

    @property
    def committed(self) -> int:
        """Number of steps that are known to have run."""
        return sum(commit.count for commit in self.commits)


def read(path: Path) -> Reading:
    """Read and check a ledger. A last line that a crash cut short is charged in full; any other change raises."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(f"There is no ledger at {path}: without it nothing is known about what was spent.") from None
    return parse(data)


def parse(data: bytes) -> Reading:
    """Check the bytes of a ledger; see ``read``."""
    rows, hashes, torn = _chain(data)
    if not rows or rows[0]["type"] != "open":
        raise LedgerError("The ledger does not begin with an open row: it is damaged and cannot be trusted.")
    plan, steps, reserved = str(rows[0]["plan"]), _whole(rows[0]["steps"], 1), 0
    replans: list[tuple[str, int]] = []
    for row in rows:
        if row["type"] == "reserve":
            if row["first"] != reserved or _whole(row["count"], 1) > BLOCK:
                raise LedgerError("A reserve row does not continue the one before it: the ledger is damaged.")
            reserved += row["count"]
        elif row["type"] == "torn":
            reserved = min(steps, reserved + BLOCK * _whole(row["lines"], 1))
        elif row["type"] == "replan":
            if row["from"] != reserved or reserved > steps:
                raise LedgerError("A replan row does not start where the charges end: the ledger is damaged.")
            replans.append((plan, reserved))
            plan, steps = str(row["plan"]), _whole(row["steps"], 1)
        elif row["type"] == "fork" and (row["from"] != reserved or _whole(row["charged"], 0) < reserved):
            raise LedgerError("A fork row does not start where the charges end: the ledger is damaged.")
    if any(row["type"] == "withdrawn" for row in rows[:-1]):
        raise LedgerError("The ledger goes on after its run was withdrawn: it is damaged and cannot be trusted.")
    reserved = min(steps, reserved + BLOCK * torn) if torn else reserved
    if reserved > steps:
        raise LedgerError("The ledger charges more steps than its plan has: it is damaged.")
    commits = tuple(_commits(rows))
    ends = [0, *(commit.first + commit.count for commit in commits)]
    if any(commit.first < end for commit, end in zip(commits, ends, strict=False)) or ends[-1] > reserved:
        raise LedgerError(
            "Commit rows overlap or lie outside of what was reserved: a step was replayed, or the ledger damaged."
        )
    return Reading(
        plan=plan,
        steps=steps,
        reserved=reserved,
        replans=tuple(replans),
        segments=tuple(row for row in rows if row["type"] == "segment"),
        commits=commits,
        released=tuple(str(row["model"]) for row in rows if row["type"] == "release"),
        told=tuple(_whole(row["position"], 0) for row in rows if row["type"] == "told"),
        foreign=tuple(_whole(row["position"], 0) for row in rows if row["type"] == "foreign"),
        forks=tuple(row for row in rows if row["type"] == "fork"),
        withdrawn=rows[-1] if rows[-1]["type"] == "withdrawn" else None,
        keys=tuple(_keys(rows)),
        hashes=tuple(hashes),
        torn=torn,
        blocked=tuple(row for row in rows if row["type"] == "blocked"),
    )


def _chain(data: bytes) -> tuple[list[dict[str, Any]], list[str], int]:
    """Rows and hashes in order, and how many lines at the end were cut.

    A crash can leave one cut line at the end, and a crash while that one is sealed a second behind it; a ``torn`` row
    must follow them. A complete last line that does not match is damage, not a crash.
    """
    *complete, tail = data.split(b"\n")
    rows: list[dict[str, Any]] = []
    hashes = [GENESIS]
    cut = 0
    for line in [*complete, tail] if tail else complete:
        row = _parse(line, hashes[-1])
        if row is None and cut < 2:
            cut += 1
            continue
        if row is None or (cut and (row["type"] != "torn" or row.get("lines") != cut)):
            raise LedgerError(_DAMAGED)
        cut = 0
        rows.append(row)
        hashes.append(str(row["hash"]))
    if cut and not tail:
        raise LedgerError(_DAMAGED)
    return rows, hashes, cut


def _parse(line: bytes, previous: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or row.get("prev") != previous or not isinstance(row.get("type"), str):
        return None
    if json.dumps(row, separators=(",", ":")).encode() != line:
        return None
    return row if row.get("hash") == row_hash({key: value for key, value in row.items() if key != "hash"}) else None


def row_hash(body: Mapping[str, Any]) -> str:
    """Hash of a row without its own hash; it contains the hash of the row before."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encoded(row: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """A row as it stands in the file behind the row with hash ``previous``, and its own hash."""
    body = {**row, "prev": previous}
    digest = row_hash(body)
    return json.dumps({**body, "hash": digest}, separators=(",", ":")).encode() + b"\n", digest


def _keys(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["type"] == "segment":
            yield str(row["key"])
        elif row["type"] == "fork":
            yield from map(str, row["keys"])


def _commits(rows: Sequence[Mapping[str, Any]]) -> Iterator[Commit]:
    for row in rows:
        if row["type"] == "commit":
            queries = tuple((_real(a), _real(b)) for a, b in row.get("queries", ()))
            sensitivity = tuple(_real(value) for value in row["sensitivity"])
            yield Commit(_whole(row["first"], 0), _whole(row["count"], 1), sensitivity, _real(row["std"]), queries)


def _whole(value: Any, low: int) -> int:
    if type(value) is not int or value < low:
        raise LedgerError("A row of the ledger holds a number that cannot be: it was damaged or edited.")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise LedgerError("A row of the ledger holds a number that cannot be: it was damaged or edited.")
    return float(value)
