"""Make a plan: calibrate sampling, noise and bounds of a method to the promise, before the first gradient.

Only public facts are used. The result is the frozen Plan of ``accounting/plan.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import lru_cache

from evenhand import _validate
from evenhand.accounting import calibration
from evenhand.accounting.accountant import merged_noise
from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy, Promise
from evenhand.accounting.many_owners import FEW
from evenhand.accounting.plan import Plan, PlannedLevel, default_delta
from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.methods.catalogue import Method
from evenhand.methods.catalogue import method as find_method
from evenhand.types import Facts, Level

__all__ = ["Plan", "PlannedLevel", "default_batch", "default_delta", "plan"]

Shape = Sequence[tuple[float, int]]
"""Relative noise and count of each stretch of a schedule."""


def plan(
    method: str | Method,
    privacy: Promise | None,
    *,
    data: Facts,
    epochs: float = 10,
    batch_size: float | None = None,
    allow_unproven: bool = False,
) -> Plan:
    """Return the plan: every number that decides privacy, calibrated so that the promise is met and nearly used up.

    Args:
      method: a name from ``evenhand methods`` or a Method.
      privacy: Privacy, Budgets or FixedNoise; None only for a method that is not private.
      data: public facts (``evenhand.data.wrap(...).facts``).
      epochs: expected passes over the data; steps are ceil(epochs * N / batch_size).
      batch_size: EXPECTED number of records per step (Poisson sampling: the real number varies).
      allow_unproven: let a rule without an established guarantee run; no epsilon is printed then.

    Examples:
      >>> from evenhand.types import Facts, Level
      >>> dpsgd = plan("dpsgd", Privacy(3, 1e-5), data=Facts(1257, (("all", 1257),)), epochs=30, batch_size=128)
      >>> dpsgd.steps, round(dpsgd.epsilons[0], 2)
      (295, 3.0)
    """
    chosen = find_method(method)
    records = _validate.whole(data.records, "the number of records")
    epochs = _validate.number(epochs, "epochs", low=0)
    batch = _validate.number(default_batch(records) if batch_size is None else batch_size, "batch_size", low=0)
    if batch > records:
        raise UsageError(f"batch_size={batch:g} is more than the {records} records: pass at most {records}.")
    guarantee = chosen.rule.guarantee
    if guarantee == "not established" and not allow_unproven:
        raise UsageError(
            f"No guarantee is established for {chosen.name!r}: pass allow_unproven=True to run it without an epsilon."
        )
    steps = math.ceil(epochs * records / batch)
    stretches = stretches_of(chosen, steps, records / batch)
    delta, budgets = _delta(privacy, records), budgets_of(privacy, data)
    shape = [(level.noise, count) for count, level in stretches]
    scale, rates, scales = _calibrated(chosen, privacy, budgets, data, batch, shape, delta)
    draft = Plan(
        method=chosen.name,
        guarantee=guarantee,
        rule=registry.spec(chosen.rule),
        queries=tuple(registry.spec(query) for query in chosen.queries),
        schedule=registry.spec(chosen.schedule),
        facts=data,
        delta=delta,
        budgets=budgets,
        steps=steps,
        expected_batch=batch,
        rates=rates,
        scales=scales,
        levels=tuple(level_of(chosen, count, scale * level.noise, level.bound) for count, level in stretches),
        epsilons=(None,) * len(rates),
    )
    epsilons = budgets if _certified(chosen, budgets) else draft.spent_by_owner()
    if any(epsilon == math.inf for epsilon in epsilons):
        raise UsageError(
            "This noise spends more than an epsilon of a million, which promises nothing: give more noise, or choose "
            "the method 'sgd' to train without privacy and say so."
        )
    return dataclasses.replace(draft, epsilons=epsilons)


def default_batch(records: int) -> int:
    """Return the expected batch size when none is given: a tenth of the data, at most 1024."""
    return max(1, min(1024, round(records / 10)))


def _delta(privacy: Promise | None, records: int) -> float:
    """Return the delta that was asked for, else the default for so many records."""
    given = privacy.delta if privacy is not None else None
    return default_delta(records) if given is None else given


def stretches_of(chosen: Method, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
    """Return the schedule's segments over so many steps; raise unless they cover each step with a usable bound."""
    stretches = list(chosen.schedule.segments(steps, steps_per_epoch))
    if any(count < 1 for count, _ in stretches) or sum(count for count, _ in stretches) != steps:
        raise UsageError(
            f"The schedule {chosen.schedule.name!r} does not cover the {steps} steps: its segments must be at least "
            "one step long each and add up to them, since every step is accounted by its own level."
        )
    if any(not 1e-30 < level.bound < 1e30 for _, level in stretches):
        raise UsageError("Clip bounds must lie between 1e-30 and 1e30, so that float sums of them stay exact enough.")
    return stretches


def budgets_of(privacy: Promise | None, facts: Facts) -> tuple[float | None, ...]:
    """Return the epsilon promised to each owner class, in the order of the facts; None if none was promised."""
    if isinstance(privacy, Budgets):
        missing = set(facts.owner_names) - set(privacy.epsilons)
        unknown = set() if privacy.owners is not None else set(privacy.epsilons) - set(facts.owner_names)
        if missing or unknown:
            raise UsageError(
                f"Budgets and owners differ: {len(missing)} owner(s) have no budget and {len(unknown)} budget(s)"
                f" have no records{_listed(unknown)}. Give one epsilon for each of the {len(facts.owners)} owner(s); a "
                "plan for one epsilon lists them."
            )
        return tuple(float(privacy.epsilons[name]) for name in facts.owner_names)
    return (float(privacy.epsilon) if isinstance(privacy, Privacy) else None,) * len(facts.owners)


def _certified(chosen: Method, budgets: Sequence[float | None]) -> bool:
    """Return whether calibration has certified that every owner spends at most 0.3 % less than its budget.

    With many classes the budgets are then reported as what is spent: computing it again would change little.
    """
    treated = "owner" in (chosen.sampling, chosen.bounds)
    return treated and None not in budgets and len(set(budgets)) > FEW


def _calibrated(
    chosen: Method,
    privacy: Promise | None,
    budgets: Sequence[float | None],
    facts: Facts,
    batch: float,
    shape: Shape,
    delta: float,
) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return the scale of the noise, the sampling rate of each class, and the relative clip bound of each class.

    A method that treats owners alike gives every class the strictest promise: one rate, one bound.
    """
    rate, owners = batch / facts.records, len(facts.owners)
    alike = (rate,) * owners, (1.0,) * owners
    if chosen.rule.guarantee == "not private":
        return 0.0, *alike
    if privacy is None:
        raise UsageError(f"{chosen.name!r} is a private method: say what was promised, for example epsilon=3.")
    if isinstance(privacy, FixedNoise):
        return privacy.noise, *alike
    promised = tuple(float(epsilon) for epsilon in budgets if epsilon is not None)
    sizes = tuple(count for _, count in facts.owners)
    side = merged_noise(math.inf, [query.noise for query in chosen.queries if query.noise is not None])
    if chosen.sampling == "owner":
        scale, rates = _solve_rates(sizes, promised, batch, tuple(shape), delta, side)
        return scale, rates, alike[1]
    if chosen.bounds == "owner":
        scale, bounds = calibration.owner_bounds(sizes, promised, rate, shape, delta, query_noise=side)
        return scale, alike[0], tuple(bounds)
    events = [(rate, noise, count) for noise, count in shape]
    return calibration.calibrate(events, min(promised), delta, query_noise=side), *alike


@lru_cache(maxsize=1024)
def _solve_rates(
    sizes: tuple[int, ...],
    promised: tuple[float, ...],
    batch: float,
    shape: tuple[tuple[float, int], ...],
    delta: float,
    side: float,
) -> tuple[float, tuple[float, ...]]:
    """Return the scale of the noise and each owner's rate, once for all methods of a comparison that need the same."""
    scale, rates = calibration.owner_rates(sizes, promised, batch, shape, delta, query_noise=side)
    return scale, tuple(rates)


def level_of(chosen: Method, count: int, noise: float, bound: float) -> PlannedLevel:
    """Return the level whose noise on gradient and side queries together costs as much as one multiplier ``noise``."""
    left = 1.0 - sum(query.share or 0.0 for query in chosen.queries)
    queries = tuple(
        query.noise if query.noise is not None else noise / math.sqrt(query.share or 1.0) for query in chosen.queries
    )
    return PlannedLevel(count, noise / math.sqrt(left), bound, queries)


def _listed(unknown: Collection[str]) -> str:
    """Return the first few names that the user typed; names from the data are never printed."""
    return f" ({', '.join(_validate.shown(name) for name in sorted(unknown)[:5])})" if unknown else ""
