"""``rebudget``: budgets that change while a run goes on. What was spent stays spent; the rest is planned anew.

Raising gives the steps that remain less noise, larger rates or larger bounds. Lowering works as long as every owner has
spent no more than its new budget. Below that no plan can help: the weights hold those steps already.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenhand import _validate, registry
from evenhand.composition import Method
from evenhand.config import of_run
from evenhand.data.fingerprint import fingerprint
from evenhand.data.wrapping import wrap
from evenhand.datasets import DatasetLedger
from evenhand.errors import CalibrationError, PlanMismatchError, UsageError
from evenhand.methods import method as find_method
from evenhand.planning import budgets_of, level_of, stretches_of
from evenhand.plans import Plan
from evenhand.privacy import accountants, continuing
from evenhand.privacy.budgets import Budgets, Privacy
from evenhand.privacy.ledger import Ledger
from evenhand.privacy.statement import rounded_up
from evenhand.runs import Folder, write_json
from evenhand.stages import PlannedLevel, Stage, cut

Solved = tuple[float, tuple[float, ...], tuple[float, ...]]


def rebudget(path: str | Path, privacy: Privacy | Budgets, *, epochs: float | None = None, train: Any = None) -> Plan:
    """Give a run other budgets from here on; ``resume`` then takes the steps that remain under the new plan.

    What was charged stays charged, and the ledger records the change. Models that were released before stay released:
    the new statement counts them, since the new budgets hold for all steps from the first to the last. It holds if the
    change was decided without looking at what this run released, and says so.

    Args:
      path: the run folder; the run may be stopped, killed or finished.
      privacy: the new budgets; delta stays as it is.
      epochs: expected further passes over the data, for a finished run; default the steps that remain.
      train: the training data, if the run was started from Python.

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
    made = replan(plan, privacy, reading.reserved, epochs=epochs)
    counted = _entered(folder, made, train)
    write_json(_next(folder), {"plan": made.to_json(), "composition": counted})
    Ledger.replan(folder.ledger_file, before=plan.digest, plan=made.digest, steps=made.steps, reserved=reading.reserved)
    _finish(folder)
    return made


def replan(plan: Plan, privacy: Privacy | Budgets, charged: int, *, epochs: float | None = None) -> Plan:
    """The plan for a run that has charged ``charged`` steps of ``plan`` and has other budgets from now on.

    Guarantee:
      Every owner's epsilon is that of all its steps composed, those before and those to come, and is at most its new
      budget. What was planned for steps that are charged is not touched.

    Raises:
      CalibrationError: an owner has spent more than its new budget already, or has nothing left for the method.

    Examples:
      >>> from evenhand.planning import plan
      >>> from evenhand.types import Facts
      >>> old = plan("dpsgd", Privacy(1, 1e-5), data=Facts(1000, (("all", 1000),)), epochs=10, batch_size=100)
      >>> new = replan(old, Privacy(2, 1e-5), charged=50)
      >>> new.steps, new.levels[0].noise < old.levels[0].noise, 1.99 < new.epsilons[0] <= 2
      (100, True, True)
    """
    if not plan.certified:
        raise UsageError("This run has no established epsilon, so there are no budgets that could change.")
    if privacy.delta is not None and privacy.delta != plan.delta:
        raise UsageError(f"delta cannot change while a run goes on: leave it out, or pass {plan.delta:g}.")
    budgets = [float(budget or 0.0) for budget in budgets_of(privacy, plan.facts)]
    _refuse_overspent(plan, budgets, charged)
    per_epoch = plan.facts.records / plan.expected_batch
    further = plan.steps - charged
    if epochs is not None:
        further = math.ceil(_validate.number(epochs, "epochs", low=0) * per_epoch)
    if further < 1:
        raise UsageError("No step of the plan remains: say how long to go on, for example epochs=5.")
    chosen = _method(plan)
    whole = [
        PlannedLevel(n, level.noise, level.bound) for n, level in stretches_of(chosen, charged + further, per_epoch)
    ]
    rest = cut(whole, charged, charged + further)
    scale, rates, scales = _solved(plan, chosen, budgets, charged, rest)
    before = charged - sum(stage.steps for stage in plan.earlier)
    made = dataclasses.replace(
        plan,
        budgets=tuple(budgets),
        steps=charged + further,
        rates=rates,
        scales=scales,
        levels=tuple(level_of(chosen, part.count, scale * part.noise, part.bound) for part in rest),
        earlier=(*plan.earlier, Stage(plan.rates, plan.scales, cut(plan.levels, 0, before), plan.digest)),
        epsilons=(None,) * len(rates),
    )
    made = dataclasses.replace(made, epsilons=made.spent_by_owner())
    for epsilon, budget in zip(made.epsilons, budgets, strict=True):
        if epsilon is None or epsilon > budget:
            raise CalibrationError("The new plan would spend more than was promised: nothing was changed.")
    return made


def _refuse_overspent(plan: Plan, budgets: Sequence[float], charged: int) -> None:
    rows = zip(plan.facts.owner_names, plan.spent_by_owner(charged), budgets, strict=True)
    over = [(name, epsilon, budget) for name, epsilon, budget in rows if epsilon is not None and epsilon > budget]
    if over:
        name, epsilon, budget = over[0]
        others = f", and {len(over) - 1} more owners likewise" if len(over) > 1 else ""
        raise CalibrationError(
            f"Owner {name!r} has spent epsilon {rounded_up(epsilon)} (delta {plan.delta:g}, one record, add/remove) "
            f"and would be promised {budget:g}{others}. What is spent is in the weights and cannot be taken back: "
            "promise at least that, or start a new run with the new budgets and release nothing of this one."
        )


def _method(plan: Plan) -> Method:
    """The method of a plan, from its parts; how owners are treated shows in rates and bounds, or in its name."""
    try:
        named = find_method(plan.method)
        sampling, bounds = named.sampling, named.bounds
    except UsageError:
        sampling, bounds = "uniform", "uniform"
    return Method(
        registry.build("rule", **plan.rule),
        queries=tuple(registry.build("query", **query) for query in plan.queries),
        schedule=registry.build("schedule", **plan.schedule),
        sampling="owner" if len(set(plan.rates)) > 1 else sampling,
        bounds="owner" if len(set(plan.scales)) > 1 else bounds,
        name=plan.method,
    )


def _solved(plan: Plan, chosen: Method, budgets: Sequence[float], charged: int, rest: Sequence[PlannedLevel]) -> Solved:
    """Scale of the noise, rates and relative bounds for the steps that remain, on top of what was spent."""
    side = accountants.merged(math.inf, [query.noise for query in chosen.queries if query.noise is not None])
    left = continuing.Rest(
        tuple((part.noise, part.count) for part in rest), plan.expected_batch, plan.delta, query_noise=side
    )
    owed = [
        continuing.Owed(records, budget, tuple(plan.events(owner, charged)))
        for owner, ((_, records), budget) in enumerate(zip(plan.facts.owners, budgets, strict=True))
    ]
    rate, ones = plan.expected_batch / plan.facts.records, (1.0,) * len(owed)
    if chosen.sampling == "owner":
        scale, rates = continuing.rates(owed, left)
        return scale, tuple(rates), ones
    if chosen.bounds == "owner":
        scale, bounds = continuing.bounds(owed, left)
        return scale, (rate,) * len(owed), tuple(bounds)
    return continuing.alike(owed, left), (rate,) * len(owed), ones


def _next(folder: Folder) -> Path:
    return folder.private / "next-plan.json"


def _finish(folder: Folder) -> None:
    """Put a new plan in place once the ledger has it; a crash in between is mended by the next call."""
    if not _next(folder).exists():
        return
    waiting = json.loads(_next(folder).read_bytes())
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
    data = wrap(of_run(folder.path).load_data()[0] if train is None else train)
    if data.facts != plan.facts:
        raise PlanMismatchError("These data have other public facts than the run's: pass the data it was started with.")
    return DatasetLedger(fingerprint(data)).enter(plan)
