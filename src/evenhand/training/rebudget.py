"""Change budgets while a run goes on. What was spent stays spent; the remaining steps are planned anew.

The remaining steps get another noise, rate or bound. That is possible as long as no owner has spent more than its new
budget. If one has, no plan can help, since the weights contain those steps: then a new run (a fork) goes on from the
last checkpoint that fits.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import wrap
from evenhand.errors import CalibrationError, EvenhandError, LedgerError, PlanMismatchError, UsageError
from evenhand.mechanism.replan import OverspentError, new_budgets, refuse_overspent, replan, replan_from_checkpoint
from evenhand.runs import checkpoints
from evenhand.runs.checkpoints import Mark
from evenhand.runs.dataset_ledger import DatasetLedger, check_records, keep_larger_counts
from evenhand.runs.folder import Folder, sha256, write_durably, write_json
from evenhand.runs.ledger import (
    Ledger,
    acquire_lock,
    read,
    refuse_blocked,
    refuse_shortened,
    refuse_withdrawn,
)
from evenhand.runs.ledger_rows import LARGEST, Reading, encode_row, parse, prior_fields
from evenhand.runs.os_errors import boundary
from evenhand.runs.run_files import digests
from evenhand.training import trusted_code
from evenhand.training.config import of_run, recorded

__all__ = ["rebudget", "replan"]


@boundary()
def rebudget(
    path: str | Path,
    privacy: Privacy | Budgets,
    *,
    epochs: float | None = None,
    train: Any = None,
    out: str | Path | None = None,
) -> Plan:
    """Give a run other budgets from here on; ``resume`` then takes the steps that remain under the new plan.

    What was charged stays charged, and the ledger records the change. Models that were released before stay released:
    the new statement counts them, since the new budgets hold for all steps from the first to the last. It holds if the
    change was decided without looking at what this run released, and says so.

    Budgets below what is spent need ``out``: a new run folder that goes on from the last checkpoint that fits, with new
    noise; resume that one. The old run is withdrawn: what it computed after that checkpoint must be deleted. If it
    released any of it, figures for loggers included, going back is refused. The dataset ledger counts both runs.

    Args:
      path: the run folder; the run may be stopped, killed or finished.
      privacy: the new budgets; delta stays as it is.
      epochs: expected further passes over the data, for a finished run; default the steps that remain.
      train: the training data, if the run was started from Python.
      out: the new folder of a run that must go back. If the budgets leave nothing for a further step, or ``epochs`` is
        0, the plan ends at the checkpoint, and ``resume`` releases its model.

    Returns:
      The new plan.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> run = eh.fit(torch.nn.Linear(64, 10), train, epsilon=1.0, epochs=2, out=tempfile.mkdtemp())
      >>> plan = rebudget(run.path, Privacy(2), epochs=2, train=train)
      >>> again = eh.resume(run.path, model=torch.nn.Linear(64, 10), train=train)
      >>> 1.99 < again.privacy.epsilon <= 2, eh.verify(run.path)["ok"]
      (True, True)
    """
    folder = Folder.existing(path)
    _finish(folder)
    plan, reading = folder.plan(), folder.ledger()
    if plan.digest != reading.plan:
        raise PlanMismatchError("plan.json is not the plan that the ledger follows: run `evenhand verify` on it.")
    refuse_blocked(reading)
    if out is not None:
        return _go_back(folder, plan, privacy, epochs, train, Path(out))
    refuse_withdrawn(reading)
    try:
        new_plan = replan(plan, privacy, reading.reserved, epochs=epochs)
    except OverspentError as error:
        raise CalibrationError(f"{error} {describe_options(folder, plan, new_budgets(plan, privacy))}") from None
    counted = _entered(folder, new_plan, train)
    write_json(_next(folder), {"plan": new_plan.to_json(), "composition": counted})
    Ledger.replan(
        folder.ledger_file, before=plan.digest, plan=new_plan.digest, steps=new_plan.steps, reserved=reading.reserved
    )
    _finish(folder)
    return new_plan


def _go_back(
    folder: Folder, plan: Plan, privacy: Privacy | Budgets, epochs: float | None, train: Any, out: Path
) -> Plan:
    """Begin a new run in ``out`` from the last checkpoint that fits, withdraw the old one, and return the new plan."""
    reading, budgets = folder.ledger(), new_budgets(plan, privacy)
    if reading.withdrawn is not None:
        new_plan = mend(folder, reading, out)
        if new_plan.budgets != tuple(budgets):
            raise UsageError(f"{out} goes on with the budgets that were given first: change them there.")
        return new_plan
    try:
        refuse_overspent(plan, budgets, reading.reserved)
    except OverspentError:
        point = last_that_fits(folder, plan, budgets)
    else:
        raise UsageError("These budgets cover all that is spent, so there is nothing to go back for: leave out --out.")
    new_plan = replan_from_checkpoint(plan, privacy, point.then.reserved, len(point.then.replans), epochs=epochs)
    new = begin(folder, out, new_plan, point)
    opted_out = (folder.composition() or {}).get("runs", 0) is None
    finish(folder, new, {"runs": None} if opted_out else _count(folder, new_plan, train, left=plan))
    return new_plan


def _next(folder: Folder) -> Path:
    return folder.private / "next-plan.json"


def _finish(folder: Folder) -> None:
    """Replace plan.json by the new plan once the ledger names it; after a crash in between the next call does it."""
    if not _next(folder).exists():
        return
    waiting = untrusted.read_json(_next(folder), {"plan": dict, "composition": (dict, type(None))})
    new_plan = Plan.from_json(waiting["plan"])
    if new_plan.digest == folder.ledger().plan:
        write_json(folder.plan_file, new_plan.to_json())
        if waiting["composition"] is not None:
            write_json(folder.composition_file, waiting["composition"])
        if folder.statement_file.exists():
            folder.write_statement()
    _next(folder).unlink()


def _entered(folder: Folder, plan: Plan, train: Any) -> dict[str, Any] | None:
    """Enter the steps to come into the dataset ledger, unless the run is not counted there; return its composition."""
    counted = folder.composition()
    if counted is None or counted["runs"] is None:
        return None
    return _count(folder, plan, train)


def _count(folder: Folder, plan: Plan, train: Any, *, left: Plan | None = None) -> dict[str, Any]:
    """Enter a plan into the dataset ledger and return the composition; ``left`` is the plan that the run leaves."""
    data = wrap(of_run(folder.path, remembered=True).load_data()[0] if train is None else train)
    if data.facts != plan.facts:
        raise PlanMismatchError("These data have other public facts than the run's: pass the data it was started with.")
    before, reading = folder.composition() or {"runs": None}, folder.ledger()
    run = check_records(folder, data)
    ledger = DatasetLedger.of(data, tuned=bool(before.get("tuned")))
    if (before["runs"] or 0) > 1 and not ledger.has(run):
        raise EvenhandError(
            "The dataset ledger does not know this run, which was counted with others: it was lost, or EVENHAND_STATE "
            "was another folder then. Set it to that one; the run is as it was."
        )
    if before["runs"] is not None and not ledger.knows([(run, reading)])[0]:
        ledger.enter(folder.plan(), run=run)
    counted = keep_larger_counts(ledger.enter(plan, run=run, left=left), before)
    ledger.note([(run, reading)])
    return counted


@dataclass(frozen=True)
class Point:
    """A checkpoint to go back to, with the ledger as it was then (``start``, ``then``) and as it is now."""

    mark: Mark
    start: bytes
    then: Reading
    now: Reading


def last_that_fits(folder: Folder, plan: Plan, budgets: Sequence[float]) -> Point:
    """Return the latest checkpoint whose charges fit the budgets.

    Raises:
      CalibrationError: there is none, or a model was released after it, or loggers were told figures of later steps.
      LedgerError: the ledger was shortened, so that releases might be missing from it.
    """
    checkpoints.repair_marker(folder)
    whole = folder.ledger()
    data = untrusted.read_bytes(folder.ledger_file, largest=LARGEST)
    refuse_shortened(whole, folder.anchors())
    starts = (
        (mark, beginning(data, mark.head))
        for mark in checkpoints.marks(folder)
        if mark.position and mark.head in whole.hashes
    )
    points = (Point(mark, start, parse(start), whole) for mark, start in starts)
    fork_point = next((point for point in points if _fits(plan, budgets, point.then.reserved)), None)
    if fork_point is None:
        raise CalibrationError(
            "No checkpoint that was kept fits these budgets, so there is nothing to go back to: promise more, or start "
            "a new run with the new budgets and release nothing of this one. The dataset ledger adds up both."
        )
    if len(whole.released) > len(fork_point.then.released) or _unrecorded(folder, fork_point.then):
        raise CalibrationError(
            f"This run has released a model after step {fork_point.then.reserved}, where the last checkpoint lies that "
            "fits these budgets. Who has that model has what it spends, and no other run can change that: promise at "
            "least what is spent. If the model never left your hands, delete it, start a new run with the new budgets, "
            "and tell the owners so."
        )
    if max(whole.told, default=0) > fork_point.mark.position:
        raise CalibrationError(
            f"This run has given its loggers figures of step {max(whole.told)}, and the last checkpoint that fits "
            f"these budgets lies after step {fork_point.mark.position}. Who has those figures has something of what "
            "the later steps spent, and no other run can change that: promise at least what is spent. If they never "
            "left your hands, delete them, start a new run with the new budgets, and tell the owners so."
        )
    return fork_point


def begin(folder: Folder, out: Path, plan: Plan, point: Point) -> Folder:
    """Return a new run folder with everything that the fork needs except its ledger: it is no run until ``finish``."""
    state = checkpoints.read(point.mark.file)
    inside = state["position"], state["ledger_head"], state["plan"]
    if inside != (point.mark.position, point.mark.head, point.then.plan):
        raise UsageError("A kept checkpoint is not the one that its marker names: it was exchanged, and is not used.")
    _clear(out, point.now)
    new = Folder.create(out, plan)
    ledger, _ = forked(point.start, point.now, position=point.mark.position, plan=plan.digest, steps=plan.steps)
    write_durably(_waiting(new), ledger)
    config = recorded(folder.path)
    if config is not None:
        write_durably(new.path / "config.toml", config.encode())
    trusted_code.copy(folder, new)
    if (folder.path / "preprocessing.json").exists():
        write_durably(new.path / "preprocessing.json", untrusted.read_bytes(folder.path / "preprocessing.json"))
    if folder.records_file.exists():
        write_durably(new.records_file, untrusted.read_bytes(folder.records_file))
    if folder.rows_file.exists():
        write_durably(new.rows_file, untrusted.read_bytes(folder.rows_file))
    lines = [line for line in folder.metrics() if line["step"] <= point.mark.position]
    if lines:
        write_durably(new.metrics_file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    if folder.full_metrics_file.exists():
        write_durably(new.full_metrics_file, untrusted.read_bytes(folder.full_metrics_file))
        new.drop_metrics(point.mark.position)
    earlier = [mark for mark in checkpoints.marks(folder) if 0 < mark.position < point.mark.position]
    checkpoints.take(new, point.mark, [mark for mark in earlier if mark.head in point.then.hashes])
    return new


def finish(folder: Folder, new: Folder, counted: Mapping[str, Any]) -> None:
    """Withdraw the old run, then begin the new one; after a crash in between call ``rebudget`` again."""
    write_json(new.composition_file, counted)
    write_durably(_waiting(new), with_files(_ledger(new), digests(new.path)))
    fork = parse(_ledger(new)).forks[-1]
    Ledger.withdraw(folder.ledger_file, head=fork["head"], first=fork["from"], fork=fork["hash"])
    _begin_ledger(folder, new)


def mend(folder: Folder, reading: Reading, out: Path | None) -> Plan:
    """Finish the fork of a withdrawn run that a crash left without its ledger, and return its plan; else raise."""
    waiting = None if out is None else _waiting(Folder(out))
    mark = None if reading.withdrawn is None else reading.withdrawn["fork"]
    if out is None or waiting is None or not waiting.exists() or mark not in read(waiting).hashes:
        refuse_withdrawn(reading)
    new = Folder.existing(str(out))
    _begin_ledger(folder, new)
    return new.plan()


def refuse_waiting(folder: Folder) -> None:
    """Raise if this folder is a fork that a crash left without its ledger."""
    if _waiting(folder).exists() and not folder.begun:
        raise LedgerError(
            "This folder has no ledger yet: a crash came while another run was being left for it, so nothing can be "
            "trained here. Give the command again that was to make it, `evenhand resume OLD --budgets ... --out "
            f"{folder.path}`, with the same budgets: it is finished then."
        )


def describe_options(folder: Folder, plan: Plan, budgets: Sequence[float]) -> str:
    """Return in words what can be done about budgets below what is spent."""
    try:
        point = last_that_fits(folder, plan, budgets)
    except CalibrationError as error:
        return str(error)
    return (
        f"Promise at least that, or go back: pass out=NEW (--out NEW), and a new run goes on from the checkpoint after "
        f"step {point.mark.position}; this one is withdrawn, and what it computed since must be deleted."
    )


def _fits(plan: Plan, budgets: Sequence[float], charged: int) -> bool:
    """Return whether no owner has spent more than its budget after ``charged`` steps."""
    try:
        refuse_overspent(plan, budgets, charged)
    except OverspentError:
        return False
    return True


def _unrecorded(folder: Folder, then: Reading) -> bool:
    """Return whether the folder has a model that was not released by then: a crash may have kept it from the ledger."""
    files = (folder.model_file, folder.last_model_file)
    return any(file.exists() and sha256(file) not in then.released for file in files)


def _waiting(folder: Folder) -> Path:
    return folder.private / "fork.jsonl"


def _ledger(folder: Folder) -> bytes:
    """Return the fork's ledger, which waits for the old run to be withdrawn."""
    return untrusted.read_bytes(_waiting(folder), largest=LARGEST)


def _begin_ledger(folder: Folder, new: Folder) -> None:
    """Mark the old folder as withdrawn, and write the new ledger; only if there is none, since it may have grown."""
    lock = acquire_lock(new.ledger_file)
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
    """Remove the files of an earlier attempt to fork the same run into ``out`` that had withdrawn nothing yet."""
    new = Folder(out)
    if new.ledger_file.exists() or not _waiting(new).exists():
        return
    if read(_waiting(new)).forks[-1]["head"] in left.hashes:
        for file in (*new.private.glob("checkpoint.*"), *new.kept.glob("*"), _waiting(new)):
            file.unlink()


_LEFT = (b'{"type":"release",', b'{"type":"told",', b'{"type":"file",')


def beginning(data: bytes, head: str) -> bytes:
    """Return the rows of a ledger up to the one with hash ``head``, and the rows of releases right behind it."""
    hashes, lines = parse(data).hashes, data.splitlines(keepends=True)
    if head not in hashes[1:]:
        raise LedgerError("The ledger does not contain the row that this checkpoint was written after.")
    end = next(place for place, line in enumerate(lines) if _hash(line) == head) + 1
    while end < len(lines) and lines[end].startswith(_LEFT) and _hash(lines[end]) in hashes:
        end += 1
    rows = b"".join(lines[:end])
    return rows if rows.endswith(b"\n") else rows + b"\n"


def forked(start: bytes, left: Reading, *, position: int, plan: str, steps: int) -> tuple[bytes, str]:
    """Return the ledger of a run that goes on from ``start`` under another plan, and the hash of its ``fork`` row.

    Args:
      start: from ``beginning``.
      left: the whole ledger of the run that is left.
      position: steps in the checkpoint; its weights may contain a foreign change that was noted right behind it, and
        figures of them may have been told later.
      plan: digest of the new plan.
      steps: its steps in all.
    """
    before = parse(start)
    fork = {"type": "fork", "head": left.head, "from": before.reserved, "charged": left.reserved}
    keys = [key for key in left.keys if key not in before.keys]
    foreign, told = left.foreign[len(before.foreign) :], left.told[len(before.told) :]
    line, mark = encode_row({**fork, "keys": keys, "id": secrets.token_hex(16)}, before.head)
    lines, head = [start, line], mark
    if left.prior_lost and not before.prior_lost:
        raise LedgerError(
            "A crash cut the released counts of labels short after this checkpoint, so a run that goes back to it "
            "could release them a second time: start a new run; the dataset ledger adds up both."
        )
    for row in (
        *([] if left.prior is None or before.prior is not None else [prior_fields(left.prior)]),
        *({"type": "foreign", "position": place} for place in foreign if place <= position),
        *({"type": "told", "position": place} for place in told if place <= position),
        {"type": "replan", "plan": plan, "steps": steps, "from": before.reserved},
    ):
        line, head = encode_row(row, head)
        lines.append(line)
    return b"".join(lines), mark


def with_files(data: bytes, files: Mapping[str, str]) -> bytes:
    """Return the ledger with a row for each of these files, by name and digest; existing rows are not repeated."""
    reading, lines = parse(data), [data]
    head, known = reading.head, reading.files()
    for name, digest in files.items():
        if known.get(name) != digest:
            line, head = encode_row({"type": "file", "name": name, "sha256": digest}, head)
            lines.append(line)
    return b"".join(lines)


def _hash(line: bytes) -> str | None:
    """Return the hash that a row of a ledger names, None if it cannot be read."""
    try:
        return str(json.loads(line)["hash"])
    except (ValueError, KeyError, TypeError):
        return None
