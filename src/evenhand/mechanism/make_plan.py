"""Make a plan: calibrate sampling, noise and bounds of a method to the promise, before the first gradient.

Only public facts are used. The result is the frozen Plan of ``accounting/plan.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from evenhand import _validate
from evenhand.accounting import calibration
from evenhand.accounting.accountant import MOST_RECORDS, merged_noise
from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy, Promise, default_delta
from evenhand.accounting.many_owners import FEW
from evenhand.accounting.plan import UNITS, Plan, PlannedLevel, PlannedPrior
from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.methods.catalogue import Method
from evenhand.methods.catalogue import method as find_method
from evenhand.methods.plugins import packages
from evenhand.methods.schedules import PRINTED_RATE
from evenhand.types import PRIOR_KINDS, Event, Facts, Level, PriorKind

__all__ = ["Plan", "PlannedLevel", "default_batch", "default_delta", "plan"]

_LEAST_PRIOR_NOISE = 10.0
"""In multiples of the noise that would spend the whole promise in one release."""
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
    prior: PriorKind | None = None,
    prior_noise: float | None = None,
) -> Plan:
    """Return the plan: every number that decides privacy, calibrated so that the promise is met and nearly used up.

    Args:
      method: a name from ``evenhand methods`` or a Method.
      privacy: Privacy, Budgets or FixedNoise; None only for a method that is not private.
      data: public facts (``evenhand.data.wrap(...).facts``).
      epochs: expected passes over the data; steps are ceil(epochs * N / batch_size).
      batch_size: EXPECTED number of records per step (Poisson sampling: the real number varies).
      allow_unproven: let a rule without an established guarantee run; no epsilon is printed then.
      prior: release noisy counts once beside the steps, paid from the same promise: "labels", "labels by group", or
        "each label" where a record may have several. A goal other than overall needs them.
      prior_noise: noise multiplier of these counts; default ``default_prior_noise``.

    Examples:
      >>> from evenhand.types import Facts, Level
      >>> dpsgd = plan("dpsgd", Privacy(3, 1e-5), data=Facts(1257, (("all", 1257),)), epochs=30, batch_size=128)
      >>> dpsgd.steps, round(dpsgd.epsilons[0], 2)
      (295, 3.0)
    """
    chosen = find_method(method)
    if not isinstance(data, Facts):
        raise UsageError("data= takes public facts alone: pass wrap(...).facts, not the data themselves.")
    if not isinstance(privacy, Privacy | Budgets | FixedNoise | None):
        raise UsageError("Say what is promised: Privacy(3, delta=1e-5), Budgets({...}, delta=1e-5), FixedNoise(1).")
    records = _validate.whole(data.records, "the number of records")
    _check_cap(data)
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
    delta, budgets = _delta(privacy, records), budgets_of(privacy, data)
    counts = _planned_prior(prior, prior_noise, chosen, privacy, budgets, data, delta)

    def calibrated(chosen: Method) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        shape = [(level.noise, count) for count, level in stretches_of(chosen, steps, records / batch)]
        return _calibrated(chosen, privacy, budgets, data, batch, shape, delta, counts)

    chosen = _solved_rate(chosen, steps, lambda chosen: calibrated(chosen)[0])
    stretches = stretches_of(chosen, steps, records / batch)
    scale, rates, scales = calibrated(chosen)
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
        unit=UNITS[data.promised],
        prior=counts,
        packages=() if chosen.ours else packages(chosen),
    )
    epsilons = budgets if _certified(chosen, budgets) else draft.spent_by_owner()
    if any(epsilon == math.inf for epsilon in epsilons):
        raise UsageError(
            "This noise spends more than an epsilon of a million, which promises nothing: give more noise, or choose "
            "the method 'sgd' to train without privacy and say so."
        )
    return dataclasses.replace(draft, epsilons=epsilons)


def _check_cap(facts: Facts) -> None:
    """Raise unless a cap of records a person, if there is one, fits the numbers of records and persons."""
    cap, persons = facts.person_cap, facts.persons
    if cap > MOST_RECORDS:
        raise UsageError(
            f"person_cap={cap} is more records of a person than are accounted for: at most {MOST_RECORDS}."
        )
    if (cap or persons) and not (cap >= 1 and facts.unit == "record" and persons <= facts.records <= persons * cap):
        raise UsageError(
            f"{persons} persons with at most {cap} records each do not have {facts.records} records: take the facts of "
            "eh.data.wrap(..., persons=..., person_cap=...)."
        )


def _solved_rate(chosen: Method, steps: int, first_noise: Callable[[Method], float]) -> Method:
    """Return the method with the number R = sigma_0 / T in place of the words, where its noise falls over time.

    sigma_0 is the calibrated noise of the first step and depends on R: the two are iterated until they agree to 1e-6.
    Whatever R comes out, the schedule with it is calibrated and accounted like any other.
    """
    if getattr(chosen.schedule, "decay", None) != PRINTED_RATE:
        return chosen
    rate, before = 1.0 / steps, 0.0
    while abs(rate - before) > 1e-6 * rate:
        chosen = dataclasses.replace(chosen, schedule=dataclasses.replace(chosen.schedule, decay=rate))  # type: ignore[type-var]
        before, rate = rate, first_noise(chosen) / steps
    return chosen


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
    counts: PlannedPrior | None,
) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return the scale of the noise, the sampling rate of each class, and the relative clip bound of each class.

    A method that treats owners alike gives every class the strictest promise: one rate, one bound.
    """
    rate, owners, cap = batch / facts.records, len(facts.owners), max(1, facts.person_cap)
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
    fixed: list[Event] = [] if counts is None else [(1.0, counts.noise, 1)]
    if chosen.sampling == "owner":
        scale, rates = _solve_rates(sizes, promised, batch, tuple(shape), delta, side, tuple(fixed), cap)
        return scale, rates, alike[1]
    if chosen.bounds == "owner":
        scale, bounds = calibration.owner_bounds(
            *(sizes, promised, rate, shape, delta), query_noise=side, fixed=fixed, cap=cap
        )
        return scale, alike[0], tuple(bounds)
    events = [(rate, noise, count) for noise, count in shape]
    return calibration.calibrate(events, min(promised), delta, query_noise=side, fixed=fixed, cap=cap), *alike


def default_prior_noise(epsilon: float, delta: float, records: int, cells: int, cap: int = 1) -> float:
    """Return the noise multiplier of counts in ``cells`` cells that loses least: steps and counts share one promise.

    Counts with multiplier s take the share (z / s)^2 of the promise's squared mu = 1 / z, which makes the gradient's
    noise larger by half of that; and they miss a cell of n records by about s / n. The smaller of both errors together
    is at s = sqrt(n z), with n a tenth of a cell's average: small cells are what counts are for. At least 10 z is
    taken: counts never cost more than a hundredth of the promise. With a ``cap`` all of a person's records count.

    Examples:
      >>> round(default_prior_noise(3.0, 1e-5, 60_000, 10), 1)  # unbalanced MNIST
      28.9
    """
    alone = calibration.calibrate([(1.0, 1.0, 1)], epsilon, delta, cap=cap)
    return max(_LEAST_PRIOR_NOISE * alone, math.sqrt(records / (10 * cells) * alone))


def _planned_prior(
    kind: PriorKind | None,
    noise: float | None,
    chosen: Method,
    privacy: Promise | None,
    budgets: Sequence[float | None],
    facts: Facts,
    delta: float,
) -> PlannedPrior | None:
    """Return what is counted and with which noise.

    None for a method that is not private: exact counts would stand in the ledger, which may be shared.
    """
    if kind is None or chosen.rule.guarantee == "not private":
        return None
    _validate.known(kind, PRIOR_KINDS, "prior")
    if len(facts.labels) < (1 if kind == "each label" else 2):
        raise UsageError("A prior counts labels, and the data declare none: wrap(..., labels=[...]), or leave it out.")
    if noise is not None:
        return PlannedPrior(kind, _validate.number(noise, "prior_noise", low=0))
    if isinstance(privacy, FixedNoise):
        return PlannedPrior(kind, _LEAST_PRIOR_NOISE * privacy.noise)
    cells = len(facts.labels) * (len(facts.groups) if kind == "labels by group" else 1)
    strictest = min((float(epsilon) for epsilon in budgets if epsilon is not None), default=1.0)
    return PlannedPrior(kind, default_prior_noise(strictest, delta, facts.records, cells, max(1, facts.person_cap)))


@lru_cache(maxsize=64)
def _solve_rates(
    sizes: tuple[int, ...],
    promised: tuple[float, ...],
    batch: float,
    shape: tuple[tuple[float, int], ...],
    delta: float,
    side: float,
    fixed: tuple[Event, ...],
    cap: int,
) -> tuple[float, tuple[float, ...]]:
    """Return the scale of the noise and each owner's rate, once for all methods of a comparison that need the same."""
    scale, rates = calibration.owner_rates(
        *(sizes, promised, batch, shape, delta), query_noise=side, fixed=fixed, cap=cap
    )
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
