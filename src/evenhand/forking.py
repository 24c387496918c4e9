"""Going back: budgets were lowered below what is spent, so a new run goes on from the last checkpoint that still fits.

Nothing is un-spent. The new run's ledger begins with the old one's rows up to that checkpoint, so the new promise holds
for them and for all that the new run does; the old run is withdrawn, and can compute and release nothing more. What it
had computed after that checkpoint must be deleted, and what it had released after it, to loggers too, makes going back
impossible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import consents, untrusted
from evenhand.accounting.plan import Plan
from evenhand.config import recorded
from evenhand.errors import CalibrationError, LedgerError, UsageError
from evenhand.mechanism.replan import OverspentError, refuse_overspent
from evenhand.runs import checkpoints, ledger_forks
from evenhand.runs.checkpoints import Mark
from evenhand.runs.folder import Folder, sha256, write_durably, write_json
from evenhand.runs.ledger import Ledger, Reading, locked, parse, read, refuse_shortened, refuse_withdrawn
from evenhand.runs.ledger_rows import LARGEST
from evenhand.runs.run_files import digests


@dataclass(frozen=True)
class Point:
    """A checkpoint to go back to, the ledger as it was then, and as it is now."""

    mark: Mark
    start: bytes
    then: Reading
    now: Reading


def last_that_fits(folder: Folder, plan: Plan, budgets: Sequence[float]) -> Point:
    """The latest checkpoint whose charges fit the budgets.

    Raises:
      CalibrationError: there is none, or a model was released after it, or loggers were told figures of later steps.
      LedgerError: the ledger was shortened, so that releases might be missing from it.
    """
    checkpoints.mend(folder)
    whole = folder.ledger()
    data = untrusted.read_bytes(folder.ledger_file, largest=LARGEST)
    refuse_shortened(whole, folder.anchors())
    starts = (
        (mark, ledger_forks.beginning(data, mark.head))
        for mark in checkpoints.marks(folder)
        if mark.position and mark.head in whole.hashes
    )
    points = (Point(mark, start, parse(start), whole) for mark, start in starts)
    found = next((point for point in points if _fits(plan, budgets, point.then.reserved)), None)
    if found is None:
        raise CalibrationError(
            "No checkpoint that was kept fits these budgets, so there is nothing to go back to: promise more, or start "
            "a new run with the new budgets and release nothing of this one. The dataset ledger adds up both."
        )
    if len(whole.released) > len(found.then.released) or _unrecorded(folder, found.then):
        raise CalibrationError(
            f"This run has released a model after step {found.then.reserved}, where the last checkpoint lies that fits "
            "these budgets. Who has that model has what it spends, and no other run can change that: promise at least "
            "what is spent. If the model never left your hands, delete it, start a new run with the new budgets, and "
            "tell the owners so."
        )
    if max(whole.told, default=0) > found.mark.position:
        raise CalibrationError(
            f"This run has given its loggers figures of step {max(whole.told)}, and the last checkpoint that fits "
            f"these budgets lies after step {found.mark.position}. Who has those figures has something of what the "
            "later steps spent, and no other run can change that: promise at least what is spent. If they never left "
            "your hands, delete them, start a new run with the new budgets, and tell the owners so."
        )
    return found


def begin(folder: Folder, out: Path, made: Plan, point: Point) -> Folder:
    """A new run folder with all that the fork needs, except its ledger: it counts for nothing until ``finish``."""
    state = checkpoints.read(point.mark.file)
    inside = state["position"], state["ledger_head"], state["plan"]
    if inside != (point.mark.position, point.mark.head, point.then.plan):
        raise UsageError("A kept checkpoint is not the one that its marker names: it was exchanged, and is not used.")
    _clear(out, point.now)
    new = Folder.create(out, made)
    ledger, _ = ledger_forks.forked(
        point.start, point.now, position=point.mark.position, plan=made.digest, steps=made.steps
    )
    write_durably(_waiting(new), ledger)
    config = recorded(folder.path)
    if config is not None:
        write_durably(new.path / "config.toml", config.encode())
    consents.copy(folder, new)
    if (folder.path / "preprocessing.json").exists():
        write_durably(new.path / "preprocessing.json", untrusted.read_bytes(folder.path / "preprocessing.json"))
    if folder.records_file.exists():
        write_durably(new.records_file, untrusted.read_bytes(folder.records_file))
    if folder.rows_file.exists():
        write_durably(new.rows_file, untrusted.read_bytes(folder.rows_file))
    lines = [line for line in folder.metrics() if line["step"] <= point.mark.position]
    if lines:
        write_durably(new.metrics_file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    earlier = [mark for mark in checkpoints.marks(folder) if 0 < mark.position < point.mark.position]
    checkpoints.take(new, point.mark, [mark for mark in earlier if mark.head in point.then.hashes])
    return new


def finish(folder: Folder, new: Folder, counted: Mapping[str, Any]) -> None:
    """Withdraw the old run, then let the new one begin; a crash in between is mended by calling ``rebudget`` again."""
    write_json(new.composition_file, counted)
    write_durably(_waiting(new), ledger_forks.with_files(_ledger(new), digests(new.path)))
    fork = parse(_ledger(new)).forks[-1]
    Ledger.withdraw(folder.ledger_file, head=fork["head"], first=fork["from"], fork=fork["hash"])
    _begin_ledger(folder, new)


def mend(folder: Folder, reading: Reading, out: Path | None) -> Plan:
    """The fork of a run that is withdrawn already, if a crash left it without its ledger; else the run is refused."""
    waiting = None if out is None else _waiting(Folder(out))
    mark = None if reading.withdrawn is None else reading.withdrawn["fork"]
    if out is None or waiting is None or not waiting.exists() or mark not in read(waiting).hashes:
        refuse_withdrawn(reading)
    new = Folder.existing(str(out))
    _begin_ledger(folder, new)
    return new.plan()


def refuse_waiting(folder: Folder) -> None:
    """Raise if a crash left this folder without its ledger while another run was being left for it."""
    if _waiting(folder).exists() and not folder.begun:
        raise LedgerError(
            "This folder has no ledger yet: a crash came while another run was being left for it, so nothing can be "
            "trained here. Give the command again that was to make it, `evenhand resume OLD --budgets ... --out "
            f"{folder.path}`, with the same budgets: it is finished then."
        )


def possible(folder: Folder, plan: Plan, budgets: Sequence[float]) -> str:
    """What can be done about budgets that lie below what is spent."""
    try:
        point = last_that_fits(folder, plan, budgets)
    except CalibrationError as error:
        return str(error)
    return (
        f"Promise at least that, or go back: pass out=NEW (--out NEW), and a new run goes on from the checkpoint after "
        f"step {point.mark.position}; this one is withdrawn, and what it computed since must be deleted."
    )


def _fits(plan: Plan, budgets: Sequence[float], charged: int) -> bool:
    try:
        refuse_overspent(plan, budgets, charged)
    except OverspentError:
        return False
    return True


def _unrecorded(folder: Folder, then: Reading) -> bool:
    """Whether a model lies in the folder that was not released by then: a crash may have kept it out of the ledger."""
    files = (folder.model_file, folder.last_model_file)
    return any(file.exists() and sha256(file) not in then.released for file in files)


def _waiting(folder: Folder) -> Path:
    return folder.private / "fork.jsonl"


def _ledger(folder: Folder) -> bytes:
    """The ledger that waits for the old run to be withdrawn."""
    return untrusted.read_bytes(_waiting(folder), largest=LARGEST)


def _begin_ledger(folder: Folder, new: Folder) -> None:
    """Let the old folder say that it is withdrawn, and put the new ledger in place: once, for it may grow since."""
    lock = locked(new.ledger_file)
    try:
        folder.say_withdrawn()
        ledger = _ledger(new)
        if not new.ledger_file.exists():
            write_durably(new.ledger_file, ledger)
        elif parse(ledger).forks[-1]["hash"] not in new.ledger().hashes:
            raise LedgerError(
                f"The ledger in {new.path} is not that of the run which was begun there, so it is left as it is: "
                "run `evenhand verify` on it."
            )
        _waiting(new).unlink()
    finally:
        lock.release()


def _clear(out: Path, left: Reading) -> None:
    """Remove what an earlier attempt to leave the same run here left behind before it withdrew anything."""
    new = Folder(out)
    if new.ledger_file.exists() or not _waiting(new).exists():
        return
    if read(_waiting(new)).forks[-1]["head"] in left.hashes:
        for file in (*new.private.glob("checkpoint.*"), *new.kept.glob("*"), _waiting(new)):
            file.unlink()
