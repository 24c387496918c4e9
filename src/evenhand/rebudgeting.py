"""``rebudget``: budgets that change while a run goes on. What was spent stays spent; the rest is planned anew.

Raising gives the steps that remain less noise, larger rates or larger bounds. So does lowering, as long as every owner
has spent no more than its new budget. Below that no plan can help, since the weights hold those steps already: then a
new run goes on from the last checkpoint that fits (see ``forking``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenhand import forking, untrusted
from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.accounting.plan import Plan
from evenhand.config import of_run
from evenhand.data.dataset import wrap
from evenhand.errors import CalibrationError, EvenhandError, PlanMismatchError, UsageError
from evenhand.mechanism.replan import OverspentError, back, promised, refuse_overspent, replan
from evenhand.runs.dataset_ledger import DatasetLedger, at_least, hold
from evenhand.runs.folder import Folder, write_json
from evenhand.runs.ledger import Ledger, refuse_blocked, refuse_withdrawn
from evenhand.runs.os_errors import boundary

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
    noise; resume that one. The old run is withdrawn: what it computed after that checkpoint must be deleted, and if it
    released any of it, figures for loggers included, going back is refused. The dataset ledger counts both runs.

    Args:
      path: the run folder; the run may be stopped, killed or finished.
      privacy: the new budgets; delta stays as it is.
      epochs: expected further passes over the data, for a finished run; default the steps that remain.
      train: the training data, if the run was started from Python.
      out: where a run goes on that must go back. If nothing is left for a further step there, or ``epochs`` is 0, the
        plan ends at the checkpoint, and ``resume`` releases its model.

    Returns:
      The new plan.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> run = eh.fit(torch.nn.Linear(64, 10), train, epsilon=1.0, epochs=2, out=tempfile.mkdtemp())
      >>> made = rebudget(run.path, Privacy(2), epochs=2, train=train)
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
        made = replan(plan, privacy, reading.reserved, epochs=epochs)
    except OverspentError as error:
        raise CalibrationError(f"{error} {forking.possible(folder, plan, promised(plan, privacy))}") from None
    counted = _entered(folder, made, train)
    write_json(_next(folder), {"plan": made.to_json(), "composition": counted})
    Ledger.replan(folder.ledger_file, before=plan.digest, plan=made.digest, steps=made.steps, reserved=reading.reserved)
    _finish(folder)
    return made


def _go_back(
    folder: Folder, plan: Plan, privacy: Privacy | Budgets, epochs: float | None, train: Any, out: Path
) -> Plan:
    reading, budgets = folder.ledger(), promised(plan, privacy)
    if reading.withdrawn is not None:
        made = forking.mend(folder, reading, out)
        if made.budgets != tuple(budgets):
            raise UsageError(f"{out} goes on with the budgets that were given first: change them there.")
        return made
    try:
        refuse_overspent(plan, budgets, reading.reserved)
    except OverspentError:
        point = forking.last_that_fits(folder, plan, budgets)
    else:
        raise UsageError("These budgets cover all that is spent, so there is nothing to go back for: leave out --out.")
    made = back(plan, privacy, point.then.reserved, len(point.then.replans), epochs=epochs)
    new = forking.begin(folder, out, made, point)
    opted_out = (folder.composition() or {}).get("runs", 0) is None
    forking.finish(folder, new, {"runs": None} if opted_out else _count(folder, made, train, left=plan))
    return made


def _next(folder: Folder) -> Path:
    return folder.private / "next-plan.json"


def _finish(folder: Folder) -> None:
    """Put a new plan in place once the ledger has it; a crash in between is mended by the next call."""
    if not _next(folder).exists():
        return
    waiting = untrusted.read_json(_next(folder), {"plan": dict, "composition": (dict, type(None))})
    made = Plan.from_json(waiting["plan"])
    if made.digest == folder.ledger().plan:
        write_json(folder.plan_file, made.to_json())
        if waiting["composition"] is not None:
            write_json(folder.composition_file, waiting["composition"])
        if folder.statement_file.exists():
            folder.write_statement()
    _next(folder).unlink()


def _entered(folder: Folder, plan: Plan, train: Any) -> dict[str, Any] | None:
    """Count the steps to come in the dataset ledger, unless the run is not counted there."""
    counted = folder.composition()
    if counted is None or counted["runs"] is None:
        return None
    return _count(folder, plan, train)


def _count(folder: Folder, plan: Plan, train: Any, *, left: Plan | None = None) -> dict[str, Any]:
    data = wrap(of_run(folder.path, remembered=True).load_data()[0] if train is None else train)
    if data.facts != plan.facts:
        raise PlanMismatchError("These data have other public facts than the run's: pass the data it was started with.")
    before, reading = folder.composition() or {"runs": None}, folder.ledger()
    run = hold(folder, data)
    ledger = DatasetLedger.of(data, tuned=bool(before.get("tuned")))
    if (before["runs"] or 0) > 1 and not ledger.has(run):
        raise EvenhandError(
            "The dataset ledger does not know this run, which was counted with others: it was lost, or EVENHAND_STATE "
            "was another folder then. Set it to that one; the run is as it was."
        )
    if before["runs"] is not None and not ledger.knows(run, reading):
        ledger.enter(folder.plan(), run=run)
    counted = at_least(ledger.enter(plan, run=run, left=left), before)
    ledger.note(run, reading)
    return counted
