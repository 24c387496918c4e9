"""Noise, rates and bounds that spend a promised epsilon: never more, and hardly less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from evenhand.accounting.accountant import Composition
from evenhand.accounting.events import check_delta, check_events, check_number, merged
from evenhand.accounting.gaussian_profile import Array, Relation
from evenhand.accounting.settling import COARSE, FEW, MARGIN, settle, solve, spread
from evenhand.errors import CalibrationError, UsageError
from evenhand.types import Event

Shape: TypeAlias = Sequence[tuple[float, int]]


def _check_target(epsilon: object, delta: object) -> tuple[float, float]:
    target = check_number(epsilon, "epsilon")
    if not 0 < target < math.inf:
        raise UsageError(f"epsilon must be positive and finite, got {target}.")
    return target, check_delta(delta)


def _check_shape(events: Sequence[Event]) -> list[Event]:
    shape = [event for event in check_events(events) if event[2] > 0 and math.isfinite(event[1])]
    if not shape:
        raise CalibrationError("There is nothing to calibrate: no event releases anything, so epsilon is always 0.")
    if any(noise == 0 for _, noise, _ in shape):
        raise CalibrationError("A release has relative noise 0, so no scale gives it a finite epsilon; give it noise.")
    return shape


def calibrate(
    events: Sequence[Event],
    epsilon: float,
    delta: float,
    *,
    query_noise: float = math.inf,
    relation: Relation = "add_remove",
) -> float:
    """Scale such that the events with noise ``scale * relative noise`` spend at most ``epsilon``.

    Guarantee: the epsilon of the returned scale was computed and is at most ``epsilon``, and within 0.05 % of it.

    Args:
        events: (rate, relative noise, count): the shape of a schedule.
        epsilon: what may be spent, positive.
        delta: strictly between 0 and 1.
        query_noise: fixed noise multiplier of side queries on the same samples (several: ``merged`` them first).
        relation: neighbouring relation.

    Raises:
        CalibrationError: if no noise spends ``epsilon``; says what is nearest.

    Example:
        >>> scale = calibrate([(0.01, 1.0, 1000)], 1.0, 1e-5)
        >>> 1.41 < scale < 1.42
        True
    """
    target, delta = _check_target(epsilon, delta)
    shape = _check_shape(events)
    if query_noise < math.inf:
        least = Composition([(q, query_noise, n) for q, _, n in shape], relation).epsilon(delta)
        if least >= target:
            raise CalibrationError(
                f"The side queries alone (noise {query_noise:g}) spend epsilon {least:.4g}, so {target:g} is out of "
                f"reach at any gradient noise; ask for more than {least:.4g} or give the queries more noise."
            )

    def spend(x: float, rel: float, near: float) -> float:
        scaled = [(q, merged(math.exp(x) * s, [query_noise]), n) for q, s, n in shape]
        return Composition(scaled, relation, rel=rel).epsilon(delta, near=near if rel < COARSE else None)

    return math.exp(solve(spend, target, -math.log(min(s for _, s, _ in shape))))


def _check_owners(sizes: Sequence[int], epsilons: Sequence[float], levels: Shape) -> tuple[Array, Array, list[Event]]:
    if len(sizes) != len(epsilons) or len(sizes) == 0:
        raise UsageError(f"sizes and epsilons must be equally long, not empty; got {len(sizes)} and {len(epsilons)}.")
    count = np.array([check_number(n, "size") for n in sizes])
    budget = np.array([check_number(e, "epsilon") for e in epsilons])
    if not (np.all(count >= 0) and np.all(np.isfinite(count)) and count.sum() > 0):
        raise UsageError("sizes must be numbers of records: not negative, and not all zero.")
    if not np.all((budget > 0) & np.isfinite(budget)):
        raise UsageError("every owner's epsilon must be positive and finite.")
    return count, budget, _check_shape([(1.0, s, n) for s, n in levels])


def owner_bounds(
    sizes: Sequence[int],
    epsilons: Sequence[float],
    rate: float,
    relative_levels: Shape,
    delta: float,
    *,
    query_noise: float = math.inf,
) -> tuple[float, list[float]]:
    """IDP Scale: one noise, and a clip bound per owner, so that every owner spends its own epsilon.

    Owner k sees noise multiplier ``scale * relative / c_k`` (merged with ``query_noise``). The scale is the harmonic
    mean over records, so the bounds average to 1 over records.

    Guarantee: every owner spends at most its epsilon and within 0.3 % of it; every owner is certified.

    Args:
        sizes: records per owner.
        epsilons: budget per owner.
        rate: the common sampling rate.
        relative_levels: (relative noise, count): the shape of the schedule.
        delta: the same for all.
        query_noise: fixed noise multiplier of side queries on the same samples, the same for all owners.

    Returns:
        The scale and the relative bounds ``c_k``, in the order given.

    Example:
        >>> scale, bounds = owner_bounds([1, 1], [1.0, 2.0], 0.01, [(1.0, 1000)], 1e-5)
        >>> round(sum(bounds), 6)
        2.0
    """
    count, budget, shape = _check_owners(sizes, epsilons, relative_levels)
    delta = check_delta(delta)
    check_events([(rate, 1.0, 1)])
    unique, index = np.unique(budget, return_inverse=True)

    def events(x: float) -> list[Event]:
        return [(rate, merged(math.exp(x) * s, [query_noise]), n) for _, s, n in shape]

    def spend(x: float, rel: float, near: float) -> float:
        return Composition(events(x), rel=rel).epsilon(delta, near=near if rel < COARSE else None)

    start = math.log(calibrate([(rate, s, n) for _, s, n in shape], float(unique[0]), delta, query_noise=query_noise))
    own = np.exp(settle(spend, events, unique, delta, start, by_rate=False))[index]
    scale = float(count.sum() / np.sum(count / own))
    return scale, (scale / own).tolist()


def owner_rates(
    sizes: Sequence[int],
    epsilons: Sequence[float],
    expected_batch: float,
    relative_levels: Shape,
    delta: float,
    *,
    query_noise: float = math.inf,
) -> tuple[float, list[float]]:
    """IDP Sample: one noise, and a sampling rate per owner, so that every owner spends its own epsilon.

    Guarantee: every owner spends at most its epsilon and within 0.3 % of it, every owner is certified, and
    ``sum_k sizes[k] * rates[k] == expected_batch``.

    Args:
        sizes: records per owner.
        epsilons: budget per owner.
        expected_batch: expected number of sampled records per step.
        relative_levels: (relative noise, count): the shape of the schedule.
        delta: the same for all.
        query_noise: fixed noise multiplier of side queries on the same samples.

    Raises:
        CalibrationError: if some owner would need a rate above 1; names the largest expected batch that works.

    Example:
        >>> scale, rates = owner_rates([500, 500], [1.0, 2.0], 10, [(1.0, 100)], 1e-5)
        >>> round(500 * sum(rates), 6)
        10.0
    """
    count, budget, shape = _check_owners(sizes, epsilons, relative_levels)
    delta, batch = check_delta(delta), check_number(expected_batch, "expected_batch")
    if not 0 < batch <= count.sum():
        raise CalibrationError(f"expected_batch must lie in (0, {count.sum():g}] (all records), got {batch:g}.")
    unique, index = np.unique(budget, return_inverse=True)
    held = np.bincount(index, weights=count)

    def rates_at(scale: float, fine: bool, certified: bool = False) -> Array:
        def events(x: float) -> list[Event]:
            return [(math.exp(-x), merged(scale * s, [query_noise]), n) for _, s, n in shape]

        def spend(x: float, rel: float, near: float) -> float:
            return Composition(events(x), rel=rel).epsilon(delta, near=near if rel < COARSE else None)

        start = -math.log(batch / float(count.sum()))
        if certified or (fine and unique.size <= FEW):
            return np.exp(-settle(spend, events, unique, delta, start, by_rate=True, floor=0.0))
        if unique.size <= FEW:
            return np.exp([-solve(spend, float(e), start, floor=0.0, fine=False) for e in unique])
        return np.exp(-spread(spend, unique * (1 - MARGIN) if fine else unique, start, fine, 0.0)[0])

    full = [(1.0, s, n) for _, s, n in shape]
    try:
        top = calibrate(full, float(unique[-1]), delta, query_noise=query_noise)
    except CalibrationError:  # the queries alone keep every rate below 1, so the noise has no upper end
        top = math.inf
    most = float(held @ rates_at(top, False)) if unique.size > 1 or top == math.inf else float(count.sum())
    if batch > most:
        raise CalibrationError(
            f"An expected batch of {batch:g} is out of reach: even with the most noise the owners with epsilon "
            f"{unique[-1]:g} would need a higher sampling rate than they can have. The largest batch that works with "
            f"these budgets is about {most * 0.99:.4g}. Bring the budgets closer together, take fewer steps, give side "
            "queries more noise, or use owner bounds (Scale)."
        )
    mean = float(held @ np.log(unique) / held.sum())
    scale = min(top, calibrate([(batch / float(count.sum()), s, n) for _, s, n in shape], math.exp(mean), delta))
    fine, power, previous = False, 1.0, None
    for _ in range(24):
        rates = rates_at(scale, fine)
        total = float(held @ rates)
        if fine and unique.size > FEW and 1 <= total / batch <= 1 + 1e-3:
            rates = rates_at(scale, True, certified=True)
            total = float(held @ rates)
        if fine and 1 <= total / batch <= 1 + 1e-3:
            return scale, (rates * (batch / total))[index].tolist()
        gap = math.log(total / batch)
        if previous and abs(gap - previous[1]) > 1e-9:
            power = min(max((gap - previous[1]) / math.log(scale / previous[0]), 0.3), 6.0)
        previous = (scale, gap) if abs(gap) > 4e-3 or fine else None
        fine = fine or abs(gap) < 4e-3
        scale = min(top, scale * math.exp((6e-4 - gap) / power))
    raise CalibrationError(f"No common noise makes the rates add up to an expected batch of {batch:g}; try another.")
