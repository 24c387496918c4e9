"""Read a ledger: check the hash, order and numbers of every row, and raise LedgerError for what cannot be trusted."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.errors import LedgerError, VerificationError
from evenhand.types import PRIOR_KINDS, Commit, PriorRow

BLOCK = 64
"""Largest number of steps that one reserve row may charge; a torn line is charged as this many."""
FORMAT = 2
"""Format of the run folders that this version writes. Those of format 1 bear no number; their metrics name no weights.
"""
GENESIS = "0" * 64
LARGEST = 2**30
"""Bytes of a ledger that is read, row by row."""
LONGEST = 2**20
"""Bytes of one row: the longest names the random keys of a run that went on fifteen thousand times."""
_DAMAGED = "A row of the ledger does not match its hash: it was damaged or edited and cannot be trusted."
_NUMBER = (int, float)
_as_written = json.JSONEncoder(separators=(",", ":")).encode
_sorted = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode
_OPEN, _RESERVE = b'{"type":"open",', b'{"type":"reserve",'
_FIELDS: Mapping[str, Any] = {
    "open": {"plan": str, "steps": int},
    "segment": {"segment": int, "key": str, "insecure": bool},
    "reserve": {"first": int, "count": int},
    "commit": {"first": int, "count": int, "sensitivity": [_NUMBER], "std": _NUMBER},
    "prior": {"kind": str, "sensitivity": _NUMBER, "std": _NUMBER, "counts": [[_NUMBER]]},
    "replan": {"plan": str, "steps": int, "from": int},
    "fork": {"head": str, "from": int, "charged": int, "keys": [str]},
    "withdrawn": {"from": int, "fork": str},
    "release": {"model": str},
    "told": {"position": int},
    "foreign": {"position": int},
    "lost": {"from": int, "to": int},
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
    ``blocked`` are rows that say that no figure holds. ``lost`` are stretches of charged steps, from the first to
    behind the last, that are in no weights any more. ``format`` is that of the run folder, ``block`` the largest number
    of steps that one row charges, ``torn_charge`` what the ``torn`` lines at the end are charged.
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
    torn_charge: int
    lost: tuple[tuple[int, int], ...]
    format: int
    block: int
    blocked: tuple[Mapping[str, Any], ...]
    file_rows: tuple[FileRow, ...]
    covering: bool
    charged_head: str
    """Hash of the last row that is not about a file: a statement names it, and the rows of its own files follow."""
    prior: PriorRow | None
    prior_lost: bool
    """Whether a crash cut the row of the counts short: they may have been seen, and cannot be released again."""

    def files(self, place: int | None = None) -> dict[str, str]:
        """Return the digest of every recorded file by name, the latest row counts; up to row ``place`` if given."""
        return {row.name: row.sha256 for row in self.file_rows if place is None or row.place <= place}

    @property
    def head(self) -> str:
        """Return the hash of the last row: whoever holds it can tell whether the ledger was shortened."""
        return self.hashes[-1]

    @property
    def counted(self) -> int:
        """Return the number of steps that a promise counts: all of the plan, unless an independent stop was declared.

        A stop that released values decide is a part of what the whole plan may do, so the plan's epsilon covers it;
        that of the steps so far does not.
        """
        return self.reserved if self.stopped else self.steps

    def survived(self, position: int | None = None) -> int:
        """Return how many charged steps no crash took from the weights.

        With ``position`` return those in a checkpoint after so many steps of the plan; all later ones are lost.
        """
        behind = [] if position is None else [(position, self.reserved)]
        lost, reached = 0, 0
        for first, end in sorted([*self.lost, *behind]):
            lost += max(0, end - max(first, reached))
            reached = max(reached, end)
        return self.reserved - lost

    @property
    def committed(self) -> int:
        """Return the number of steps that are known to have run."""
        return sum(commit.count for commit in self.commits)


def read(path: Path) -> Reading:
    """Read and check a ledger. A last line that a crash cut short is charged in full; any other damage raises."""
    try:
        path.stat()
    except OSError:
        raise LedgerError(f"There is no ledger at {path}: without it nothing is known about what was spent.") from None
    if lacks_first_row(path):
        raise LedgerError(
            "The ledger has no whole open row yet: the run was cut off before anything was charged. `evenhand resume` "
            "begins it, and `evenhand train` with the same --out starts over."
        )
    try:
        return _read(untrusted.lines(path, largest=LARGEST, longest=LONGEST))
    except VerificationError as error:
        raise LedgerError(str(error)) from None


def lacks_first_row(path: Path) -> bool:
    """Return whether a crash left only a part of a ledger's first row, so that nothing was charged.

    A step is charged in a later row, which is on disk only when the first one is.
    """
    if not path.is_file() or path.stat().st_size > 2**16:
        return False
    data = path.read_bytes()
    cut = b"\n" not in data and (data.startswith(_OPEN) or _OPEN.startswith(data))
    return cut and _parse(data, GENESIS) is None


def read_until(path: Path, head: str) -> Reading:
    """Read and check a ledger up to the row whose hash is ``head``: the ledger as it was when that row was its last."""
    return _read(_until(untrusted.lines(path, largest=LARGEST, longest=LONGEST), f'"hash":"{head}"'.encode()))


def _until(lines: Iterable[bytes], marked: bytes) -> Iterator[bytes]:
    for line in lines:
        yield line
        if marked in line:
            return
    raise LedgerError("The ledger does not contain the row that a file of its run names: it was shortened.")


def parse(data: bytes) -> Reading:
    """Check the bytes of a ledger and return what they say; see ``read``."""
    return _read(io.BytesIO(data))


def _read(lines: Iterable[bytes]) -> Reading:
    rows, hashes, cut, torn = _chain(lines)
    if not rows or rows[0]["type"] != "open":
        raise LedgerError("The ledger does not begin with an open row: it is damaged and cannot be trusted.")
    number, block = _format(rows[0]), _block(rows)
    if any(row["type"] not in _FIELDS for row in rows):
        raise LedgerError("A row of the ledger is of no known kind: it was edited, and what it charges cannot be told.")
    plan, steps, reserved = str(rows[0]["plan"]), _whole(rows[0]["steps"], 1), 0
    replans: list[tuple[str, int]] = []
    stopped = False
    for row in rows:
        stopped = _still_stopped(stopped, row, reserved)
        if row["type"] == "reserve":
            if row["first"] != reserved or _whole(row["count"], 1) > block:
                raise LedgerError("A reserve row does not continue the one before it: the ledger is damaged.")
            reserved += row["count"]
        elif row["type"] == "torn":
            reserved = min(steps, reserved + _whole(row.get("charged", BLOCK * _whole(row["lines"], 1)), 0))
        elif row["type"] == "lost":
            if not 0 <= row["from"] < row["to"] <= reserved:
                raise LedgerError("A lost row speaks of steps that are not charged: the ledger is damaged.")
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
    charge = torn_charge(cut, block)
    reserved = min(steps, reserved + charge) if charge else reserved
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
        stopped=stopped and not cut and reserved < steps,
        foreign=tuple(_whole(row["position"], 0) for row in rows if row["type"] == "foreign"),
        forks=tuple(row for row in rows if row["type"] == "fork"),
        withdrawn=rows[ended] if ended < len(rows) else None,
        keys=tuple(_keys(rows)),
        hashes=tuple(hashes),
        torn=len(cut),
        torn_charge=charge,
        lost=tuple((row["from"], row["to"]) for row in rows if row["type"] == "lost"),
        format=number,
        block=block,
        file_rows=_file_rows(rows),
        covering="file" in kinds and ("reserve" not in kinds or kinds.index("file") < kinds.index("reserve")),
        charged_head=next(digest for kind, digest in zip(kinds[::-1], hashes[::-1], strict=False) if kind != "file"),
        blocked=tuple(row for row in rows if row["type"] == "blocked"),
        prior=_prior(rows),
        prior_lost=any(line.startswith(b'{"type":"prior"') for line in torn),
    )


def _still_stopped(stopped: bool, row: Mapping[str, Any], reserved: int) -> bool:
    """Return whether a declared stop holds after this row: a charge or a change of the plan ends it."""
    if row["type"] == "stopped":
        if row["position"] != reserved:
            raise LedgerError("A stopped row does not stand where the charges end: the ledger is damaged.")
        return True
    return stopped and row["type"] not in ("reserve", "torn", "replan", "fork")


def _format(opened: Mapping[str, Any]) -> int:
    """Return the format of the run folder; one that a later version wrote is refused, with that version's number."""
    number = _whole(opened.get("format", 1), 1)
    if number > FORMAT:
        written = str(opened.get("evenhand", ""))
        version = f"evenhand {written}" if re.fullmatch(r"[0-9A-Za-z.+-]{1,40}", written) else "a later evenhand"
        raise LedgerError(
            f"This run folder has format {number}, and this version of evenhand reads formats up to {FORMAT}: use "
            f"{version}, which wrote it, or a later one."
        )
    return number


def _block(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of steps that one row of this ledger may charge."""
    block = _whole(rows[0].get("block", BLOCK), 1) if rows else BLOCK
    if block > BLOCK:
        raise LedgerError(_DAMAGED)
    return block


def torn_charge(lines: Sequence[bytes], block: int) -> int:
    """Return what lines that crashes cut short are charged: a block each, unless they show that they charge nothing.

    A step runs only after its row is on disk, whole. What begins like a row of another kind cannot be one that charged.

    Examples:
      >>> torn_charge([b'{"type":"reserve","fi'], 64), torn_charge([b'{"type":"commit",'], 64), torn_charge([b"?"], 64)
      (64, 0, 64)
    """
    others = [f'{{"type":"{kind}"'.encode() for kind in _FIELDS if kind != "reserve"]

    def charges(line: bytes) -> bool:
        return _RESERVE.startswith(line[: len(_RESERVE)]) or not any(
            line.startswith(other) or other.startswith(line) for other in others
        )

    return sum(block for line in lines if charges(line))


def prior_fields(row: PriorRow) -> dict[str, Any]:
    """Return the row of the ledger about released counts, without its hashes."""
    counts = [list(part) for part in row.counts]
    return {"type": "prior", "kind": row.kind, "sensitivity": row.sensitivity, "std": row.std, "counts": counts}


def _prior(rows: Sequence[Mapping[str, Any]]) -> PriorRow | None:
    """Return the one row about counts of labels; raise if there are more, or if it holds what no counts can be."""
    priors = [row for row in rows if row["type"] == "prior"]
    if not priors:
        return None
    row = priors[0]
    counts = tuple(tuple(float(count) for count in part) for part in row["counts"])
    if len(priors) > 1 or row["kind"] not in PRIOR_KINDS or not counts or len({len(part) for part in counts}) != 1:
        raise LedgerError("Rows of the ledger about counts of labels cannot be: it was damaged or edited.")
    if not all(abs(count) <= sys.float_info.max for part in counts for count in part):
        raise LedgerError(_DAMAGED)
    return PriorRow(row["kind"], _real(row["sensitivity"]), _real(row["std"]), counts)


def _chain(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], list[str], list[bytes], list[bytes]]:
    """Return rows and hashes in order, the lines at the end that a crash cut short, and all that any crash did.

    A crash can leave one cut line at the end, and a crash while that one is sealed a second behind it; a ``torn`` row
    must follow them. A complete last line that does not match is damage, not a crash.
    """
    rows: list[dict[str, Any]] = []
    hashes = [GENESIS]
    cut: list[bytes] = []
    torn: list[bytes] = []
    ended = True
    for line in lines:
        ended = line.endswith(b"\n")
        row = _parse(line.removesuffix(b"\n"), hashes[-1])
        if row is None and len(cut) < 2:
            cut.append(line.removesuffix(b"\n"))
            torn.append(cut[-1])
            continue
        if row is None or (cut and not _seals(row, cut, _block(rows))):
            raise LedgerError(_DAMAGED)
        if not untrusted.fits(row, _FIELDS.get(row["type"], {})):
            raise LedgerError("A row of the ledger lacks what it must hold: it was damaged or edited.")
        cut = []
        rows.append(row)
        hashes.append(str(row["hash"]))
    if cut and ended:
        raise LedgerError(_DAMAGED)
    return rows, hashes, cut, torn


def _seals(row: Mapping[str, Any], cut: Sequence[bytes], block: int) -> bool:
    """Return whether a row is about exactly these cut lines; one of an early version charges a full block for each."""
    charged = row.get("charged", torn_charge(cut, block))
    return row["type"] == "torn" and row.get("lines") == len(cut) and charged == torn_charge(cut, block)


def _parse(line: bytes, previous: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or row.get("prev") != previous or not isinstance(row.get("type"), str):
        return None
    if _as_written(row).encode() != line:
        return None
    return row if row.get("hash") == row_hash({key: value for key, value in row.items() if key != "hash"}) else None


def row_hash(body: Mapping[str, Any]) -> str:
    """Return the hash of a row without its own hash field; the row contains the hash of the row before."""
    return hashlib.sha256(_sorted(body).encode()).hexdigest()


def encode_row(row: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Return the line of a row that follows the row with hash ``previous``, and the row's own hash."""
    body = {**row, "prev": previous}
    digest = row_hash(body)
    return _as_written({**body, "hash": digest}).encode() + b"\n", digest


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
    """Return the rows about files of this run's own folder: those before a fork are about the folder that was left."""
    fork = max((place for place, row in enumerate(rows, 1) if row["type"] == "fork"), default=0)
    file_rows = [
        FileRow(row["name"], row["sha256"], place)
        for place, row in enumerate(rows, 1)
        if row["type"] == "file" and place > fork
    ]
    if not all(plain_name(row.name) for row in file_rows):
        raise LedgerError("A row of the ledger records a file outside of the run folder: it was damaged or edited.")
    return tuple(file_rows)


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
