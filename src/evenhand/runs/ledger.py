"""The ledger: an append-only, hash-chained file that says what was spent, written ahead of the weights.

Rows (one JSON object a line; each carries the hash of the row before it and its own):

* ``open``     the plan's digest and number of steps; the ``format`` of the run folder and the version of evenhand that
  wrote it (a folder without them has format 1); ``block``, the largest number of steps that one row charges, if it is
  not the usual one;
* ``segment``  a process starts: segment number, fingerprint of its random key, whether the key was a public seed;
* ``reserve``  steps ``first .. first + count - 1`` of the plan are charged. On disk (fsync) before any of them runs;
* ``commit``   what those steps used: sensitivity per owner class (with many classes one number, to be multiplied by
  the class's scale in the plan) and the noise's absolute standard deviation;
* ``prior``    the counts of labels that the plan names, with noise: what was counted, sensitivity, standard deviation
  and the noisy ``counts``. On disk before they are used. One row at most: a second would be a second release;
* ``replan``   budgets changed: another plan holds from step ``from`` on, up to ``steps`` in all;
* ``fork``     budgets were lowered: the rows before are those of another run, which is left here, after its first
  ``from`` steps; its ``head`` by then, how many steps it had ``charged``, and the ``keys`` it used after that;
* ``withdrawn`` the last row of the run that was left: its first ``from`` steps live on where the row ``fork`` is; only
  rows about files may follow;
* ``file``     a shareable file of the run folder is about to be put in place: its ``name`` and ``sha256``. The latest
  row of a name counts; rows may follow after the run is over (a report that is written later);
* ``release``  a model left the run: hash of its file;
* ``told``     loggers are about to be given figures of the weights after ``position`` steps. On disk before they are;
* ``stopped``  the trainer declares that the run ends after ``position`` charged steps for reasons that did not depend
  on the data; void once a later row charges steps or changes the plan;
* ``foreign``  the weights were changed between two steps, by something that is not accounted here;
* ``blocked``  before step ``position`` records were found to touch each other (``cause`` "records"), or state to have
  been changed that no private step wrote ("state"), or an audit certified more than was promised ("audit"): no
  figure holds, and nothing more is trained or released;
* ``lost``     a process took up weights that hold nothing of the charged steps ``from`` up to, without, ``to``: they
  ran after the last checkpoint, or not at all;
* ``torn``     ``lines`` lines that crashes cut short were found before this row, and are ``charged`` as so many steps:
  a full block each, but nothing for one that began as a row of another kind than ``reserve``. Without that number:
  a full block for each.

Spent = every plan position that was ever reserved. It never falls: after a crash at any point, recorded >= spent.
A meaning never changes; a new meaning gets a new row type.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from filelock import FileLock, Timeout

from evenhand import durable, untrusted
from evenhand._versions import software
from evenhand.errors import BudgetExhausted, LedgerError, PlanMismatchError
from evenhand.runs.ledger_rows import (
    BLOCK,
    FORMAT,
    GENESIS,
    Reading,
    encode_row,
    lacks_first_row,
    parse,
    prior_fields,
    read,
)
from evenhand.types import Commit, PriorRow

__all__ = [
    "BLOCK",
    "Commit",
    "Ledger",
    "Reading",
    "acquire_lock",
    "lacks_first_row",
    "parse",
    "read",
    "refuse_blocked",
    "refuse_shortened",
    "refuse_withdrawn",
]

_WRITERS: WeakValueDictionary[tuple[int, str], Ledger] = WeakValueDictionary()
"""Ledgers that are open in a process, by its id and their path: a file that is written meanwhile gets its row there."""


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
        self._file = durable.open_to_append(path)
        self._usable = True
        self._head = reading.head if reading else GENESIS
        self.reserved = reading.reserved if reading else 0
        self.steps = reading.steps if reading else 0
        self._blocked = False
        self.block = reading.block if reading else BLOCK
        self.segment = len(reading.keys) if reading else 0
        self.files = reading.files() if reading else {}
        self.counts, self.counts_lost = (reading.prior, reading.prior_lost) if reading else (None, False)
        self._name = (os.getpid(), str(path.resolve()))
        _WRITERS[self._name] = self

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        plan: str,
        steps: int,
        key: str,
        insecure: bool,
        anchors: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        block: int = BLOCK,
    ) -> Ledger:
        """Start a ledger, anew if a crash cut its first row, or continue one of the same plan, with a new segment.

        On return its rows are on disk, and the lock is held until ``close``. A ledger without one of the ``anchors``,
        heads that a checkpoint or statement was written after, was shortened. ``files`` are digests of shareable files
        that are there before the ledger; ``block`` is the largest number of steps that a row of a new ledger charges.
        """
        lock, ledger = acquire_lock(path), None
        try:
            reading = read(path) if path.exists() and not lacks_first_row(path) else None
            refuse_shortened(reading, anchors)
            if reading and reading.plan != plan:
                raise PlanMismatchError(
                    "This run was started with another plan, so its ledger cannot be continued: resume "
                    "it with the plan it has, or start a new run in another folder."
                )
            if reading and key in reading.keys:
                raise LedgerError(
                    "This random key was used in an earlier segment: its noise would repeat and cancel out."
                )
            refuse_withdrawn(reading)
            refuse_blocked(reading)
            if reading is None and path.exists():
                os.truncate(path, 0)
            ledger = cls(path, lock, reading)
            if reading is None:
                ledger.steps, ledger.block = steps, block
                fields: dict[str, Any] = {"format": FORMAT, "evenhand": software()["evenhand"]}
                fields |= {} if block == BLOCK else {"block": block}
                ledger._append({"type": "open", "plan": plan, "steps": steps, **fields})
            else:
                ledger._seal(reading)
            if reading is None or not reading.segments:
                for name, digest in (files or {}).items():
                    ledger.file(name, digest)
            ledger._append({"type": "segment", "segment": ledger.segment, "key": key, "insecure": insecure})
            ledger.sync()
            durable.sync_folder(path.parent)
        except BaseException:
            if ledger is not None:
                ledger._abandon()
            lock.release()
            raise
        return ledger

    @classmethod
    @contextmanager
    def writing(cls, path: Path) -> Iterator[Ledger]:
        """Yield the ledger that this process has open, or open it to add rows about files; no other may write."""
        writer = _WRITERS.get((os.getpid(), str(path.resolve())))
        if writer is not None:
            yield writer
            return
        lock = acquire_lock(path)
        try:
            reading = read(path)
            with cls(path, lock, reading) as ledger:
                ledger._seal(reading)
                yield ledger
        finally:
            lock.release()

    @classmethod
    def replan(cls, path: Path, *, before: str, plan: str, steps: int, reserved: int) -> None:
        """Replace the plan ``before`` for the steps not charged yet, while nobody writes; durable on return.

        ``reserved`` is what the new plan takes as charged. Refused if the ledger says otherwise by now.
        """
        row = {"type": "replan", "plan": plan, "steps": steps, "from": reserved}
        cls._add(path, row, lambda now: now.plan == before and now.reserved == reserved <= steps)

    @classmethod
    def withdraw(cls, path: Path, *, head: str, first: int, fork: str) -> None:
        """End a ledger that nobody writes, as its run goes on elsewhere after ``first`` steps; durable on return.

        ``head`` is its last row as the fork knows it, ``fork`` the hash of the first row that only the fork has.
        """
        cls._add(path, {"type": "withdrawn", "from": first, "fork": fork}, lambda now: now.head == head)

    @classmethod
    def _add(cls, path: Path, row: Mapping[str, Any], fits: Callable[[Reading], bool]) -> None:
        lock = acquire_lock(path)
        try:
            reading = read(path)
            refuse_withdrawn(reading)
            refuse_blocked(reading)
            if not fits(reading):
                raise PlanMismatchError("The run went on meanwhile, so this does not fit it any more: ask again.")
            with cls(path, lock, reading) as ledger:
                ledger._seal(reading)
                ledger._append(row)
        finally:
            lock.release()

    @property
    def head(self) -> str:
        """Return the hash of the last row written."""
        return self._head

    def reserve(self, count: int) -> None:
        """Charge the next ``count`` steps of the plan. On return the row is on disk."""
        if self.reserved + count > self.steps:
            raise BudgetExhausted(
                f"All {self.steps} steps of the plan are charged: one more would spend more than was "
                "promised. Nothing was released. Start a new plan, and add up both."
            )
        if not 1 <= count <= self.block:
            raise LedgerError(f"A reserve row charges 1 to {self.block} steps, not {count}.")
        if not self._path.exists() or os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino:
            raise LedgerError(
                "The ledger file was moved, removed or replaced while the run was going on: nothing was released, and "
                f"{self.reserved} of {self.steps} steps are charged. If the folder was moved, go on where it is now: "
                "evenhand resume FOLDER"
            )
        self._append({"type": "reserve", "first": self.reserved, "count": count})
        self.sync()
        self.reserved += count

    def commit(self, commits: Sequence[Commit]) -> None:
        """Record what charged steps used. Not synced: a crash may lose this detail, never a charge."""
        for entry in commits:
            row: dict[str, Any] = {"type": "commit", "first": entry.first, "count": entry.count}
            row |= {"sensitivity": list(entry.sensitivity), "std": entry.std}
            if entry.queries:
                row["queries"] = [list(pair) for pair in entry.queries]
            self._append(row)
        self._file.flush()

    def prior(self, row: PriorRow) -> None:
        """Record the noisy counts of labels, before anybody uses them; durable on return.

        Raises:
          LedgerError: counts were released before, or a crash cut their row short: they may have been seen.
        """
        if self.counts is not None or self.counts_lost:
            raise LedgerError("The counts of labels were released before: a second release is not in the plan.")
        self._append(prior_fields(row))
        self.sync()
        self.counts = row

    def release(self, model: str) -> None:
        """Record that a model file with this hash was released; durable on return."""
        self.refuse_blocked()
        self._append({"type": "release", "model": model})
        self.sync()

    def file(self, name: str, digest: str) -> None:
        """Record the digest of a file that is about to be put in place; durable on return.

        ``files`` has the latest digest of every name. A file that is written again unchanged needs no second row.
        """
        if self.files.get(name) != digest:
            self._append({"type": "file", "name": name, "sha256": digest})
            self.files[name] = digest
        self.sync()

    def lost(self, first: int, end: int) -> None:
        """Record that the weights hold nothing of the charged steps ``first .. end - 1``; durable on return."""
        self._append({"type": "lost", "from": first, "to": end})
        self.sync()

    def told(self, position: int) -> None:
        """Record that figures of the weights at this position leave the run; durable on return."""
        self._append({"type": "told", "position": position})
        self.sync()

    def stopped(self) -> None:
        """Record the trainer's declaration that the run ends here independently of the data; durable on return.

        With every step of the plan charged there is nothing to declare, and nothing is written.
        """
        if self.reserved < self.steps:
            self._append({"type": "stopped", "position": self.reserved})
            self.sync()

    @classmethod
    def declare_stopped(cls, path: Path) -> None:
        """Add the row of ``stopped`` to a ledger that nobody is writing; durable on return."""
        charged = read(path).reserved
        cls._add(path, {"type": "stopped", "position": charged}, lambda now: now.reserved == charged < now.steps)

    def foreign(self, position: int) -> None:
        """Record that the weights changed outside of private steps before this position; not synced."""
        self._append({"type": "foreign", "position": position})

    def blocked(self, position: int, cause: str) -> None:
        """Record that no figure holds for this run any more, and refuse later releases; durable on return."""
        self._blocked = True
        self._append({"type": "blocked", "position": position, "cause": cause})
        self.sync()

    @property
    def is_blocked(self) -> bool:
        """Return whether no figure holds for this run any more."""
        return self._blocked

    def refuse_blocked(self) -> None:
        """Raise LedgerError if this run was blocked."""
        if self._blocked:
            raise LedgerError(_BLOCKED)

    @property
    def closed(self) -> bool:
        """Return whether nothing can be written any more."""
        return self._file.closed

    def close(self) -> None:
        """Write everything to disk, unless an earlier write failed, and release the lock."""
        try:
            if not self._file.closed and self._usable:
                self.sync()
        finally:
            _WRITERS.pop(self._name, None)
            try:
                self._close_file()
            finally:
                self._lock.release()

    def _close_file(self) -> None:
        """Close the file; after a failed write, which was reported, ignore that its buffer fails once more."""
        with contextlib.nullcontext() if self._usable else contextlib.suppress(OSError):
            self._file.close()

    def _abandon(self) -> None:
        """Close a file that may not be writable any more; whoever opens it next reads what is on disk."""
        _WRITERS.pop(self._name, None)
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _seal(self, reading: Reading) -> None:
        """End a last line that a crash cut short, so that the next row starts on its own line."""
        with untrusted.opened(self._path, largest=None) as file:
            file.seek(-1, os.SEEK_END)
            opened = file.read() != b"\n"
        if reading.torn:
            row = {"type": "torn", "lines": reading.torn, "charged": reading.torn_charge}
            self._append(row, before=b"\n" if opened else b"")
        elif opened:
            self._write(b"\n")

    def _append(self, row: Mapping[str, Any], before: bytes = b"") -> None:
        line, digest = encode_row(row, self._head)
        self._write(before + line)
        self._head = digest

    def _write(self, data: bytes) -> None:
        self._guarded(lambda: self._file.write(data))

    def sync(self) -> None:
        """Write every row so far to disk (fsync) before returning."""
        self._guarded(self._file.flush)
        self._guarded(lambda: durable.sync(self._file.fileno()))

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run one write. After a failed one refuse all others: only reading the file again tells what is on disk."""
        if not self._usable:
            raise LedgerError("An earlier write to the ledger failed. Nothing more is released: resume the run.")
        self._usable = False
        with durable.named(self._path):
            action()
        self._usable = True


def refuse_shortened(reading: Reading | None, anchors: Sequence[str]) -> None:
    """Raise LedgerError unless the ledger has every row that a checkpoint or statement was written after."""
    if not set(anchors) <= set(reading.hashes if reading else ()):
        raise LedgerError(
            "The ledger is missing, or was shortened: it does not contain the row that the last checkpoint or "
            "statement was written after. What was spent is not known, so nothing more is trained from here."
        )


def refuse_withdrawn(reading: Reading | None) -> None:
    """Raise LedgerError if a run was withdrawn: it goes on in another folder and must release nothing more."""
    if reading is not None and reading.withdrawn is not None:
        raise LedgerError(
            f"This run was withdrawn: its budgets were lowered, and another run folder goes on from its first "
            f"{reading.withdrawn['from']} steps. Whatever else came of this one would break the lower promise, so "
            "nothing more is trained or released from here: resume that folder. If it is lost, start a new run; the "
            "dataset ledger adds up both."
        )


_BLOCKED = (
    "This run is blocked: records were found to influence each other's gradients, or state to have been changed that "
    "no private step wrote, or an audit certified more epsilon than was promised. No bound holds for it, and nothing "
    "more is trained or released from here: mend the cause, delete what this run computed, and start a new run."
)


def refuse_blocked(reading: Reading | None) -> None:
    """Raise LedgerError if a run was blocked: no figure holds for it, so it must release nothing more."""
    if reading is not None and reading.blocked:
        raise LedgerError(_BLOCKED)


def acquire_lock(path: Path) -> FileLock:
    """Return the lock of this ledger's only writer, acquired; raise LedgerError while another process holds it."""
    lock = durable.lock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise LedgerError(
            f"Another process is training into {path.parent}: wait for it, or choose another --out."
        ) from None
    return lock
