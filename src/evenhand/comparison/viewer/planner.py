"""Answers what other settings of a run would cost: its method planned anew, by the accountant that plans every run.

A dial is one setting with the values that it can have. A position is the index of one value for each dial. What is
answered is public: no record is looked at, so moving a dial costs no privacy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand._numbers import count, delta, promised, rounded_up, setting
from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.accounting.plan import Plan
from evenhand.comparison import recommend
from evenhand.errors import EvenhandError, UsageError
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.methods import catalogue, registry
from evenhand.methods.catalogue import Method

EPSILON, FACTOR, EPOCHS, BATCH = "epsilon", "all budgets, times", "epochs", "expected batch"
OWNERS = 8
"""Owner classes up to which each budget has a dial of its own."""
MOST_OWNERS = 20
"""Owner classes up to which a plan is made while somebody waits."""
_EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
_FINE_EPSILONS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)
_FACTORS = (0.5, 1.0, 2.0)
_FINE_FACTORS = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
_MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Dial:
    """A setting, the values that it can have, and the index of the run's own."""

    name: str
    values: tuple[float, ...]
    start: int


def lacks(plan: Plan) -> str:
    """Return why a run has no planner; empty if it has one.

    Examples:
      >>> from evenhand.types import Facts
      >>> lacks(make_plan("dpsgd", Privacy(3, 1e-5), data=Facts(1000, (("all", 1000),))))
      ''
    """
    if None in plan.budgets or not plan.certified:
        return "Nothing was promised to plan for."
    if len(plan.facts.owners) > MOST_OWNERS:
        return f"With more than {MOST_OWNERS} owner classes plan on the command line: evenhand plan --help"
    try:
        _method(plan)
    except (EvenhandError, TypeError, ValueError):
        return "Its method has no noisy steps, or is not known here, so there is nothing to plan anew."
    return ""


def dials(plan: Plan, *, fine: bool) -> list[Dial]:
    """Return the dials of a run, promises first; the run's own settings are among the values of each.

    Args:
      plan: the plan of the run.
      fine: many values, and a dial for each owner's budget; else few, so that every position can be answered ahead.
    """
    names, budgets = plan.facts.owner_names, [budget for budget in plan.budgets if budget is not None]
    epsilons, factors = (_FINE_EPSILONS, _FINE_FACTORS) if fine else (_EPSILONS, _FACTORS)
    if len(set(budgets)) == 1:
        promises = [_dial(EPSILON, budgets[0], epsilons)]
    elif fine and len(names) <= OWNERS:
        promises = [_dial(f"epsilon of {name}", own, epsilons) for name, own in zip(names, budgets, strict=True)]
    else:
        promises = [_dial(FACTOR, 1.0, factors)]
    epochs = plan.steps * plan.expected_batch / plan.facts.records
    most = plan.facts.records
    batches = [value for factor in factors if 1 <= (value := _whole(plan.expected_batch * factor)) <= most]
    passes = [_rounded(epochs * factor) for factor in factors if factor != 1]
    return [*promises, _dial(EPOCHS, epochs, passes), _dial(BATCH, plan.expected_batch, batches)]


def positions(of: Sequence[Dial]) -> Iterator[tuple[int, ...]]:
    """Yield every position of these dials.

    Examples:
      >>> list(positions([Dial("a", (1.0, 2.0), 0), Dial("b", (5.0,), 0)]))
      [(0, 0), (1, 0)]
    """
    return itertools.product(*(range(len(dial.values)) for dial in of))


def answer(plan: Plan, of: Sequence[Dial], position: Sequence[int]) -> dict[str, str]:
    """Return noise, steps, cost and spent epsilon of a run's method under other settings: names with words."""
    if len(position) != len(of) or any(
        not 0 <= index < len(dial.values) for index, dial in zip(position, of, strict=False)
    ):
        raise UsageError("There is no such position of these dials.")
    values = {dial.name: dial.values[index] for dial, index in zip(of, position, strict=True)}
    return _answer(plan, _budgets(plan, values), values[EPOCHS], values[BATCH])


def largest(plan: Plan, of: Sequence[Dial], position: Sequence[int]) -> float:
    """Return the largest promise at a position; the dials after the promises may be left out of it."""
    return max(_budgets(plan, {dial.name: dial.values[index] for dial, index in zip(of, position, strict=False)}))


def study(plan: Plan, epsilon: float, kind: str) -> str:
    """Return what the nearest study of docs/results reached, in words; never a promise of what this run would reach."""
    treated = len({*plan.budgets}) > 1
    advice = recommend.recommend(recommend.Facts(plan.facts.records, epsilon, None, treated, kind), "accuracy")
    if not advice.measured:
        return "Nothing similar was measured: no accuracy can be expected from studies."
    near = min(
        recommend.table()["studies"],
        key=lambda one: recommend.distance(recommend.Facts(plan.facts.records, epsilon, None, treated, kind), one),
    )
    best, worst = near["best"]["accuracy"], near["best"].get("worst")
    parts = [f"{_reached(best)} overall by {best['method']}"]
    if worst is not None:
        parts.append(f"{_reached(worst)} for the worst group by {worst['method']}")
    return (
        f"{' and '.join(parts)}, on {near['data']} ({count(near['records'])} records, {near['model']}, epsilon "
        f"{near['epsilon']:g}). How sure that yours is alike: {advice.sure}."
    )


def kind(plan: Plan) -> str:
    """Return what kind of data a run's inputs look like: one of the kinds of ``recommend``.

    Examples:
      >>> from evenhand.types import Facts
      >>> facts = Facts(1000, (("all", 1000),), inputs="(1, 28, 28) float32")
      >>> kind(make_plan("dpsgd", Privacy(3, 1e-5), data=facts))
      'images'
    """
    shape, _, dtype = plan.facts.inputs.partition(") ")
    if "int" in dtype:
        return "text"
    return {1: "table", 3: "images"}.get(len([part for part in shape.strip("()").split(",") if part.strip()]), "other")


def _answer(plan: Plan, budgets: Sequence[float], epochs: float, batch: float) -> dict[str, str]:
    facts, units = plan.facts, plan.facts.units
    steps = max(1, round(epochs * facts.records / batch))
    if steps > _MOST_STEPS:
        return {"Not planned": f"This takes more than {count(_MOST_STEPS)} steps: fewer epochs, or a larger batch."}
    promise = Budgets(dict(zip(facts.owner_names, budgets, strict=True)), plan.delta)
    one = Privacy(budgets[0], plan.delta) if len(set(budgets)) == 1 else promise
    try:
        new = make_plan(
            _method(plan),
            one,
            data=facts,
            epochs=(steps - 0.5) * batch / facts.records,
            batch_size=batch,
            prior=None if plan.prior is None else plan.prior.kind,
        )
    except UsageError as error:
        return {"Not planned": str(error)}
    noises, bounds = [level.noise for level in new.levels], [level.bound for level in new.levels]
    mean = [level.noise * level.bound / batch for level in new.levels]
    work = new.steps * batch
    return {
        "Noise multiplier": setting(min(noises), max(noises)),
        "Noise on the mean gradient": setting(min(mean), max(mean)),
        "Clip bound": setting(min(bounds), max(bounds)),
        "Steps": f"{count(new.steps)}, about {batch:g} {units} each",
        "Cost": f"{count(round(work))} gradients, {work / (plan.steps * plan.expected_batch):.3g} times this run",
        "Spent at the end": _spent(new),
    }


def _spent(plan: Plan) -> str:
    terms = f"per {plan.facts.promised}, add/remove, delta {delta(plan.delta)}"
    spent = [epsilon for epsilon in plan.epsilons if epsilon is not None]
    if len(set(plan.budgets)) == 1:
        return f"epsilon {rounded_up(max(spent))} of {promised(plan.budgets[0])} ({terms})"
    names = zip(plan.facts.owner_names, spent, plan.budgets, strict=True)
    return f"epsilon ({terms}): " + ", ".join(f"{name} {rounded_up(of)} of {promised(own)}" for name, of, own in names)


def _budgets(plan: Plan, values: Mapping[str, float]) -> tuple[float, ...]:
    if EPSILON in values:
        return (values[EPSILON],) * len(plan.budgets)
    own = [float(budget) for budget in plan.budgets if budget is not None]
    if FACTOR in values:
        return tuple(values[FACTOR] * budget for budget in own)
    names = [f"epsilon of {name}" for name in plan.facts.owner_names]
    return tuple(values.get(name, budget) for name, budget in zip(names, own, strict=True))


def _method(plan: Plan) -> Method:
    """Return the method of a plan with its own settings."""
    return dataclasses.replace(
        catalogue.method(plan.method),
        rule=registry.build("rule", **plan.rule),
        queries=tuple(registry.build("query", **query) for query in plan.queries),
        schedule=registry.build("schedule", **plan.schedule),
    )


def _dial(name: str, own: float, values: Sequence[float]) -> Dial:
    every = tuple(sorted({own, *values}))
    return Dial(name, every, every.index(own))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _whole(value: float) -> float:
    return float(round(value))


def _reached(best: Mapping[str, Any]) -> str:
    ends = "" if best["low"] is None else f" ({best['low']:.1f} to {best['high']:.1f})"
    return f"{best['value']:.1f} %{ends}"
