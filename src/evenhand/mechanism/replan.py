"""Plan again for budgets that changed: what is charged stays charged, and the remaining steps are planned anew."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from evenhand import _validate
from evenhand._numbers import rounded_up
from evenhand.accounting import remaining_budget
from evenhand.accounting.accountant import merged_noise
from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.accounting.plan import Plan, PlannedLevel, Stage, cut_levels
from evenhand.errors import CalibrationError, UsageError
from evenhand.mechanism.make_plan import budgets_of, level_of, stretches_of
from evenhand.methods import registry
from evenhand.methods.catalogue import method as find_method
from evenhand.methods.composition import Method

Solved = tuple[float, tuple[float, ...], tuple[float, ...]]


class OverspentError(CalibrationError):
    """An owner has already spent more than its new budget."""


def replan(plan: Plan, privacy: Privacy | Budgets, charged: int, *, epochs: float | None = None) -> Plan:
    """Return the plan of a run that has charged ``charged`` steps of ``plan`` and has other budgets from now on.

    Guarantee:
      Every owner's epsilon is that of all its steps composed, those before and those to come, and is at most its new
      budget. What was planned for steps that are charged is not touched.

    Raises:
      CalibrationError: an owner has spent more than its new budget already, or has nothing left for the method.

    Examples:
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand.types import Facts
      >>> old = plan("dpsgd", Privacy(1, 1e-5), data=Facts(1000, (("all", 1000),)), epochs=10, batch_size=100)
      >>> new = replan(old, Privacy(2, 1e-5), charged=50)
      >>> new.steps, new.levels[0].noise < old.levels[0].noise, 1.99 < new.epsilons[0] <= 2
      (100, True, True)
    """
    budgets = new_budgets(plan, privacy)
    refuse_overspent(plan, budgets, charged)
    further = _further(plan, charged, epochs)
    if further < 1:
        raise UsageError("No step of the plan remains: say how long to go on, for example epochs=5 (--epochs 5).")
    return _plan_remaining(plan, budgets, _before(plan, charged, len(plan.earlier)), further)


def replan_from_checkpoint(
    plan: Plan, privacy: Privacy | Budgets, charged: int, replans: int, *, epochs: float | None = None
) -> Plan:
    """Return the plan of a run that goes back to its first ``charged`` steps.

    Guarantee and errors are those of ``replan``. What ``plan`` fixed for later steps is dropped. If the budgets leave
    nothing for a further step, or ``epochs`` is 0, the plan ends there.

    Args:
      plan: the plan before.
      privacy: the new budgets.
      charged: steps that count.
      replans: how often budgets had changed when these steps were charged.
      epochs: expected further passes over the data; default the steps that remain.

    Examples:
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand.types import Facts
      >>> old = plan("dpsgd", Privacy(2, 1e-5), data=Facts(1000, (("all", 1000),)), epochs=10, batch_size=100)
      >>> new, ended = (replan_from_checkpoint(old, Privacy(1, 1e-5), 10, 0, epochs=epochs) for epochs in (None, 0))
      >>> new.steps, new.levels[0].noise > old.levels[0].noise, new.epsilons[0] <= 1
      (100, True, True)
      >>> ended.steps, ended.epsilons[0] == old.spent(10)
      (10, True)
    """
    budgets = new_budgets(plan, privacy)
    refuse_overspent(plan, budgets, charged)
    before = _before(plan, charged, replans)
    if further := _further(plan, charged, epochs):
        try:
            return _plan_remaining(plan, budgets, before, further)
        except remaining_budget.NothingLeftError:
            pass
    last = next(stage for stage in reversed(before) if stage.levels)
    ended = dataclasses.replace(
        plan,
        budgets=tuple(budgets),
        steps=charged,
        rates=last.rates,
        scales=last.scales,
        levels=(dataclasses.replace(last.levels[-1], count=0),),
        earlier=before,
        epsilons=(None,) * len(budgets),
    )
    return dataclasses.replace(ended, epsilons=ended.spent_by_owner())


def new_budgets(plan: Plan, privacy: Privacy | Budgets) -> list[float]:
    """Return the new budget of every owner class; raise if the plan has none or if delta would change."""
    if not plan.certified:
        raise UsageError("This run has no established epsilon, so there are no budgets that could change.")
    if privacy.delta is not None and privacy.delta != plan.delta:
        raise UsageError(f"delta cannot change while a run goes on: leave it out, or pass {plan.delta:g}.")
    if isinstance(privacy, Budgets) and privacy.owners is not None:
        raise UsageError(
            "One epsilon per record cannot be given while a run goes on: who is in which class is fixed, so that a "
            "record would keep its old budget without a word. Pass one per class, such as Budgets({'1': 2, '3': 4})."
        )
    return [float(budget or 0.0) for budget in budgets_of(privacy, plan.facts)]


def refuse_overspent(plan: Plan, budgets: Sequence[float], charged: int) -> None:
    """Raise if any owner class has spent more than its new budget after ``charged`` steps."""
    rows = zip(plan.facts.owner_names, plan.spent_by_owner(charged), budgets, strict=True)
    over = [(name, epsilon, budget) for name, epsilon, budget in rows if epsilon is not None and epsilon > budget]
    if over:
        name, epsilon, budget = over[0]
        others = f", and {len(over) - 1} more owners likewise" if len(over) > 1 else ""
        raise OverspentError(
            f"Owner {name!r} has spent epsilon {rounded_up(epsilon)} (delta {plan.delta:g}, one {plan.facts.promised}, "
            f"add/remove) and would be promised {budget:g}{others}. What is spent is in the weights and cannot be "
            "taken back."
        )


def _further(plan: Plan, charged: int, epochs: float | None) -> int:
    """Return the number of steps to come."""
    if epochs is None:
        return plan.steps - charged
    return math.ceil(
        _validate.number(epochs, "epochs", low=0, open_low=False) * plan.facts.records / plan.expected_batch
    )


def _before(plan: Plan, charged: int, replans: int) -> tuple[Stage, ...]:
    """Return the stages of the first ``charged`` steps, during which budgets changed ``replans`` times."""
    whole = (*plan.earlier, Stage(plan.rates, plan.scales, plan.levels, plan.digest))
    over = whole[:replans]
    return (*over, whole[replans].first(charged - sum(stage.steps for stage in over)))


def _plan_remaining(plan: Plan, budgets: Sequence[float], before: tuple[Stage, ...], further: int) -> Plan:
    """Return the plan of ``further`` steps after ``before``; raise if it would exceed a budget."""
    charged = sum(stage.steps for stage in before)
    chosen = _method(plan)
    stretches = stretches_of(chosen, charged + further, plan.facts.records / plan.expected_batch)
    whole = [PlannedLevel(n, level.noise, level.bound) for n, level in stretches]
    rest = cut_levels(whole, charged, charged + further)
    scale, rates, scales = _calibrate_remaining(plan, chosen, budgets, charged, rest)
    new_plan = dataclasses.replace(
        plan,
        budgets=tuple(budgets),
        steps=charged + further,
        rates=rates,
        scales=scales,
        levels=tuple(level_of(chosen, part.count, scale * part.noise, part.bound) for part in rest),
        earlier=before,
        epsilons=(None,) * len(rates),
    )
    new_plan = dataclasses.replace(new_plan, epsilons=new_plan.spent_by_owner())
    for epsilon, budget in zip(new_plan.epsilons, budgets, strict=True):
        if epsilon is None or epsilon > budget:
            raise CalibrationError("The new plan would spend more than was promised: nothing was changed.")
    return new_plan


def _method(plan: Plan) -> Method:
    """Return the method of a plan, rebuilt from its parts; rates, bounds or its name tell how owners are treated."""
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


def _calibrate_remaining(
    plan: Plan, chosen: Method, budgets: Sequence[float], charged: int, rest: Sequence[PlannedLevel]
) -> Solved:
    """Return scale of the noise, rates and relative bounds of the remaining steps, given what is spent already."""
    side = merged_noise(math.inf, [query.noise for query in chosen.queries if query.noise is not None])
    left = remaining_budget.RemainingSteps(
        *(tuple((part.noise, part.count) for part in rest), plan.expected_batch, plan.delta),
        query_noise=side,
        cap=plan.cap,
    )
    owed = [
        remaining_budget.OwnerBudget(records, budget, tuple(plan.events_of_each(owner, charged)))
        for owner, ((_, records), budget) in enumerate(zip(plan.facts.owners, budgets, strict=True))
    ]
    rate, ones = plan.expected_batch / plan.facts.records, (1.0,) * len(owed)
    if chosen.sampling == "owner":
        scale, rates = remaining_budget.remaining_rates(owed, left)
        return scale, tuple(rates), ones
    if chosen.bounds == "owner":
        scale, bounds = remaining_budget.remaining_bounds(owed, left)
        return scale, (rate,) * len(owed), tuple(bounds)
    return remaining_budget.common_noise(owed, left), (rate,) * len(owed), ones
