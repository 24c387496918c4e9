"""Reading a ledger: every row's hash, order and numbers are checked; what cannot be trusted raises LedgerError."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.errors import LedgerError, VerificationError
from evenhand.types import Commit

BLOCK = 64
"""Largest number of steps that one reserve row may charge; a torn line is charged as this many."""
GENESIS = "0" * 64
LARGEST = 2**30
"""Bytes of a ledger that is read."""
_DAMAGED = "A row of the ledger does not match its hash: it was damaged or edited and cannot be trusted."
_NUMBER = (int, float)
_FIELDS: Mapping[str, Any] = {
    "open": {"plan": str, "steps": int},
    "segment": {"segment": int, "key": str, "insecure": bool},
    "reserve": {"first": int, "count": int},
    "commit": {"first": int, "count": int, "sensitivity": [_NUMBER], "std": _NUMBER},
    "replan": {"plan": str, "steps": int, "from": int},
    "fork": {"head": str, "from": int, "charged": int, "keys": [str]},
    "withdrawn": {"from": int, "fork": str},
    "release": {"model": str},
    "told": {"position": int},
    "foreign": {"position": int},
    "torn": {"lines": int},
    "stopped": {"position": int},
    "blocked": {"position": int, "cause": str},
    "file": {"name": str, "sha256": str},
}
"""What a row of each type must hold; see ``untrusted.fits``."""


@dataclass(frozen=True)
class FileRow:
    """A file of the run folder as the ledger records it, in the row with the number ``place`` (from 1)."""

    name: str
    sha256: str
    place: int


@dataclass(frozen=True)
class Reading:
    """A ledger read and checked from its first byte to its last.

    ``plan`` and ``steps`` are those that hold at its end. ``replans`` are the plans before, each with the number of
    steps that were charged when it was replaced. ``told`` are the positions whose figures loggers got. ``stopped``: the
    trainer declared that the run ended here independently of the data, and nothing was charged since. ``keys`` are the
    random keys that must not be used again: those of its segments and, after a fork, those of the run it left.
    ``file_rows`` are those of this run's own folder: after a fork, those behind it. ``covering`` says that files have
    been recorded from the ledger's start on, so that a shareable file without a row is a foreign one.
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
    stopped: bool
    foreign: tuple[int, ...]
    forks: tuple[Mapping[str, Any], ...]
    withdrawn: Mapping[str, Any] | None
    keys: tuple[str, ...]
    hashes: tuple[str, ...]
    torn: int
    blocked: tuple[Mapping[str, Any], ...]
    file_rows: tuple[FileRow, ...]
    covering: bool
    charged_head: str
    """Hash of the last row that is not about a file: a statement names it, and the rows of its own files follow."""

    def files(self, place: int | None = None) -> dict[str, str]:
        """Return the digest of every recorded file by name, the latest row counts; up to row ``place`` if given."""
        return {row.name: row.sha256 for row in self.file_rows if place is None or row.place <= place}

    @property
    def head(self) -> str:
        """Hash of the last row: whoever holds it can tell whether the ledger was shortened."""
        return self.hashes[-1]

    @property
    def counted(self) -> int:
        """Number of steps that a promise counts: all of the plan, unless the stop was declared independent of the data.

        A stop that released values decide is a part of what the whole plan may do, so the plan's epsilon covers it;
        that of the steps so far does not.
        """
        return self.reserved if self.stopped else self.steps

    @property
    def committed(self) -> int:
        """Number of steps that are known to have run."""
        return sum(commit.count for commit in self.commits)


def read(path: Path) -> Reading:
    """Read and check a ledger. A last line that a crash cut short is charged in full; any other change raises."""
    try:
        path.stat()
    except OSError:
        raise LedgerError(f"There is no ledger at {path}: without it nothing is known about what was spent.") from None
    try:
        return parse(untrusted.read_bytes(path, largest=LARGEST))
    except VerificationError as error:
        raise LedgerError(str(error)) from None


def read_until(path: Path, head: str) -> Reading:
    """Read a ledger up to the row whose hash is ``head``, as it was when that was its last one."""
    lines = untrusted.read_bytes(path, largest=LARGEST).splitlines(keepends=True)
    marked = f'"hash":"{head}"'.encode()
    last = next((place for place, line in enumerate(lines) if marked in line), None)
    if last is None:
        raise LedgerError("The ledger does not contain the row that a file of its run names: it was shortened.")
    return parse(b"".join(lines[: last + 1]))


def parse(data: bytes) -> Reading:
    """Check the bytes of a ledger; see ``read``."""
    rows, hashes, torn = _chain(data)
    if not rows or rows[0]["type"] != "open":
        raise LedgerError("The ledger does not begin with an open row: it is damaged and cannot be trusted.")
    plan, steps, reserved = str(rows[0]["plan"]), _whole(rows[0]["steps"], 1), 0
    replans: list[tuple[str, int]] = []
    stopped = False
    for row in rows:
        stopped = _still_stopped(stopped, row, reserved)
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
    ended = next((place for place, row in enumerate(rows) if row["type"] == "withdrawn"), len(rows))
    if any(row["type"] not in ("file", "torn") for row in rows[ended + 1 :]):
        raise LedgerError("The ledger goes on after its run was withdrawn: it is damaged and cannot be trusted.")
    reserved = min(steps, reserved + BLOCK * torn) if torn else reserved
    if reserved > steps:
        raise LedgerError("The ledger charges more steps than its plan has: it is damaged.")
    commits, kinds = tuple(_commits(rows)), [row["type"] for row in rows]
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
        stopped=stopped and not torn and reserved < steps,
        foreign=tuple(_whole(row["position"], 0) for row in rows if row["type"] == "foreign"),
        forks=tuple(row for row in rows if row["type"] == "fork"),
        withdrawn=rows[ended] if ended < len(rows) else None,
        keys=tuple(_keys(rows)),
        hashes=tuple(hashes),
        torn=torn,
        file_rows=_file_rows(rows),
        covering="file" in kinds and ("reserve" not in kinds or kinds.index("file") < kinds.index("reserve")),
        charged_head=next(digest for kind, digest in zip(kinds[::-1], hashes[::-1], strict=False) if kind != "file"),
        blocked=tuple(row for row in rows if row["type"] == "blocked"),
    )


def _still_stopped(stopped: bool, row: Mapping[str, Any], reserved: int) -> bool:
    """Whether a declared stop holds after this row: whatever charges steps, or changes the plan, goes on instead."""
    if row["type"] == "stopped":
        if row["position"] != reserved:
            raise LedgerError("A stopped row does not stand where the charges end: the ledger is damaged.")
        return True
    return stopped and row["type"] not in ("reserve", "torn", "replan", "fork")


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
        if not untrusted.fits(row, _FIELDS.get(row["type"], {})):
            raise LedgerError("A row of the ledger lacks what it must hold: it was damaged or edited.")
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


def plain_name(name: str) -> bool:
    """Return whether a name can stand in a ``file`` row: of a file directly in the folder, and printable.

    Examples:
      >>> plain_name("report.html"), plain_name("../report.html"), plain_name("")
      (True, False, False)
    """
    return bool(name) and name.isprintable() and not set(name) & set("/\\") and name not in (".", "..")


def _file_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[FileRow, ...]:
    """The rows of this run's own folder: those before a fork speak of the folder that was left."""
    fork = max((place for place, row in enumerate(rows, 1) if row["type"] == "fork"), default=0)
    found = [
        FileRow(row["name"], row["sha256"], place)
        for place, row in enumerate(rows, 1)
        if row["type"] == "file" and place > fork
    ]
    if not all(plain_name(row.name) for row in found):
        raise LedgerError("A row of the ledger records a file outside of the run folder: it was damaged or edited.")
    return tuple(found)


def _commits(rows: Sequence[Mapping[str, Any]]) -> Iterator[Commit]:
    for row in rows:
        if row["type"] == "commit":
            queries = tuple((_real(a), _real(b)) for a, b in _pairs(row.get("queries", [])))
            sensitivity = tuple(_real(value) for value in row["sensitivity"])
            yield Commit(_whole(row["first"], 0), _whole(row["count"], 1), sensitivity, _real(row["std"]), queries)


def _pairs(value: Any) -> list[list[Any]]:
    if not untrusted.fits(value, [list]) or any(len(pair) != 2 for pair in value):
        raise LedgerError("A row of the ledger lacks what it must hold: it was damaged or edited.")
    return list(value)


def _whole(value: Any, low: int) -> int:
    if type(value) is not int or value < low:
        raise LedgerError("A row of the ledger holds a number that cannot be: it was damaged or edited.")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise LedgerError("A row of the ledger holds a number that cannot be: it was damaged or edited.")
    return float(value)
