"""The ledger: an append-only, hash-chained file that says what was spent, written ahead of the weights.

Rows (one JSON object a line; each carries the hash of the row before it and its own):

* ``open``     the plan's digest and number of steps;
* ``segment``  a process starts: segment number, fingerprint of its random key, whether the key was a public seed;
* ``reserve``  steps ``first .. first + count - 1`` of the plan are charged. On disk (fsync) before any of them runs;
* ``commit``   what those steps used: sensitivity per owner class and the noise's absolute standard deviation;
* ``release``  a model left the run: hash of its file;
* ``torn``     a line that a crash cut short was found and charged as a full block.

Spent = every plan position that was ever reserved. It never falls: after a crash at any point, recorded >= spent.
A meaning never changes; a new meaning gets a new row type.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from evenhand.errors import BudgetExhausted, LedgerError, PlanMismatchError

BLOCK = 64
"""Largest number of steps that one reserve row may charge; a torn line is charged as this many."""
_GENESIS = "0" * 64


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
    """A ledger read and checked from its first byte to its last."""

    plan: str
    steps: int
    reserved: int
    segments: tuple[Mapping[str, Any], ...]
    commits: tuple[Commit, ...]
    released: tuple[str, ...]
    hashes: tuple[str, ...]
    torn: bool

    @property
    def head(self) -> str:
        """Hash of the last row: whoever holds it can tell whether the ledger was shortened."""
        return self.hashes[-1]

    @property
    def committed(self) -> int:
        """Number of steps that are known to have run."""
        return sum(commit.count for commit in self.commits)


def read(path: Path) -> Reading:
    """Read and check a ledger. Any change but a cut last line raises LedgerError; a cut line is charged in full."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(f"There is no ledger at {path}: without it nothing is known about what was spent.") from None
    rows, hashes, torn = _chain(data)
    if not rows or rows[0]["type"] != "open":
        raise LedgerError("The ledger does not begin with an open row: it is damaged and cannot be trusted.")
    steps, reserved = int(rows[0]["steps"]), 0
    for row in rows:
        if row["type"] == "reserve":
            if row["first"] != reserved or not 1 <= row["count"] <= BLOCK:
                raise LedgerError("A reserve row does not continue the one before it: the ledger is damaged.")
            reserved += row["count"]
        elif row["type"] == "torn":
            reserved = min(steps, reserved + BLOCK)
    if torn:
        reserved = min(steps, reserved + BLOCK)
    if reserved > steps:
        raise LedgerError("The ledger charges more steps than its plan has: it is damaged.")
    return Reading(
        plan=str(rows[0]["plan"]),
        steps=steps,
        reserved=reserved,
        segments=tuple(row for row in rows if row["type"] == "segment"),
        commits=tuple(_commits(rows)),
        released=tuple(row["model"] for row in rows if row["type"] == "release"),
        hashes=tuple(hashes),
        torn=torn,
    )


class Ledger:
    """An open ledger: one writer at a time, held by a file lock until ``close``.

    Examples:
      >>> import tempfile; folder = Path(tempfile.mkdtemp())
      >>> with Ledger.open(folder / "ledger.jsonl", plan="d1", steps=10, key="k1", insecure=False) as ledger:
      ...     ledger.reserve(4)
      ...     ledger.commit([Commit(0, 4, (1.0,), 1.1)])
      >>> read(folder / "ledger.jsonl").reserved
      4
    """

    def __init__(self, path: Path, lock: FileLock, reading: Reading | None) -> None:
        self._path, self._lock = path, lock
        self._file = path.open("ab")
        self._head = reading.head if reading else _GENESIS
        self.reserved = reading.reserved if reading else 0
        self.steps = reading.steps if reading else 0
        self.segment = len(reading.segments) if reading else 0

    @classmethod
    def open(cls, path: Path, *, plan: str, steps: int, key: str, insecure: bool) -> Ledger:
        """Start a ledger, or continue one that belongs to the same plan, with a new segment and a new key."""
        lock = FileLock(str(path) + ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise LedgerError(
                f"Another process is training into {path.parent}: wait for it, or choose another --out."
            ) from None
        try:
            reading = read(path) if path.exists() and path.stat().st_size else None
            if reading and reading.plan != plan:
                raise PlanMismatchError(
                    "This run was started with another plan, so its ledger cannot be continued: resume "
                    "it with the plan it has, or start a new run in another folder."
                )
            if reading and any(row["key"] == key for row in reading.segments):
                raise LedgerError(
                    "This random key was used in an earlier segment: its noise would repeat and cancel out."
                )
            ledger = cls(path, lock, reading)
            if reading is None:
                ledger.steps = steps
                ledger._append({"type": "open", "plan": plan, "steps": steps})
            else:
                ledger._seal(reading.torn)
            ledger._append({"type": "segment", "segment": ledger.segment, "key": key, "insecure": insecure})
            ledger.sync()
        except BaseException:
            lock.release()
            raise
        return ledger

    @property
    def head(self) -> str:
        """Hash of the last row written."""
        return self._head

    def reserve(self, count: int) -> None:
        """Charge the next ``count`` steps of the plan; returns only when the row is on disk."""
        if self.reserved + count > self.steps:
            raise BudgetExhausted(
                f"All {self.steps} steps of the plan are charged: one more would spend more than was "
                "promised. Nothing was released. Start a new plan, and add up both."
            )
        if not 1 <= count <= BLOCK:
            raise LedgerError(f"A reserve row charges 1 to {BLOCK} steps, not {count}.")
        self._append({"type": "reserve", "first": self.reserved, "count": count})
        self.sync()
        self.reserved += count

    def commit(self, commits: Sequence[Commit]) -> None:
        """Record what reserved steps used. Not synced: losing it loses detail, never a charge."""
        for entry in commits:
            row: dict[str, Any] = {"type": "commit", "first": entry.first, "count": entry.count}
            row |= {"sensitivity": list(entry.sensitivity), "std": entry.std}
            if entry.queries:
                row["queries"] = [list(pair) for pair in entry.queries]
            self._append(row)
        self._file.flush()

    def release(self, model: str) -> None:
        """Record that a model file with this hash was released; later rows show what was spent after it."""
        self._append({"type": "release", "model": model})
        self.sync()

    def close(self) -> None:
        """Put everything on disk and let go of the lock."""
        if not self._file.closed:
            self.sync()
            self._file.close()
        self._lock.release()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _seal(self, torn: bool) -> None:
        """End a last line that a crash left open, so that the next row starts on its own line."""
        if not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")
        if torn:
            self._append({"type": "torn", "charged": BLOCK})

    def _append(self, row: Mapping[str, Any]) -> None:
        body = {**row, "prev": self._head}
        digest = _hash(body)
        self._file.write(json.dumps({**body, "hash": digest}, separators=(",", ":")).encode() + b"\n")
        self._head = digest

    def sync(self) -> None:
        """Return when every row written so far is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())


def _chain(data: bytes) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Rows and hashes in order, and whether the last line was cut. A sealed cut line must be followed by a torn row."""
    lines = data.split(b"\n")
    complete, tail = lines[:-1], lines[-1]
    rows: list[dict[str, Any]] = []
    hashes = [_GENESIS]
    cut = False
    for line in [*complete, tail] if tail else complete:
        row = _parse(line, hashes[-1])
        if row is None and not cut:
            cut = True
            continue
        if row is None or (cut and row["type"] != "torn"):
            raise LedgerError(
                "A row of the ledger does not match its hash: it was damaged or edited and cannot be trusted."
            )
        cut = False
        rows.append(row)
        hashes.append(str(row["hash"]))
    if cut and not tail:
        raise LedgerError("The last row of the ledger does not match its hash: it was damaged or edited.")
    return rows, hashes, cut


def _parse(line: bytes, previous: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or row.get("prev") != previous:
        return None
    return row if row.get("hash") == _hash({key: value for key, value in row.items() if key != "hash"}) else None


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _commits(rows: Sequence[Mapping[str, Any]]) -> Iterator[Commit]:
    for row in rows:
        if row["type"] == "commit":
            queries = tuple((float(a), float(b)) for a, b in row.get("queries", ()))
            sensitivity = tuple(float(value) for value in row["sensitivity"])
            yield Commit(row["first"], row["count"], sensitivity, float(row["std"]), queries)
