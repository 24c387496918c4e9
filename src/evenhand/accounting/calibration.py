"""Noise, rates and bounds that spend a promised epsilon: never more, and hardly less.

Searches run over a *point*: the log of a noise scale or minus the log of a rate, so that the spend falls with it. One
budget is met by a safeguarded secant, many by knots, interpolation between them, and a certificate for each owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np

from evenhand._validate import any_delta, real
from evenhand.accounting.accountant import Composition, check_events, merged_noise
from evenhand.accounting.gaussian_profile import Array, Relation
from evenhand.accounting.many_owners import FEW, MANY_WITH_CAP, certified_deltas, mixture_share, pchip
from evenhand.errors import CalibrationError, UsageError
from evenhand.types import Event

Shape: TypeAlias = Sequence[tuple[float, int]]
"""(relative noise, count) of each stretch of a schedule."""
Spend: TypeAlias = Callable[[float, float, float], float]
"""(point, relative accuracy of the grid, about what to expect) -> epsilon."""

COARSE, FINE = 2e-3, 1e-4
_SPAN = 18.0  # how far (in logs) from its start a search may wander
_MARGIN = 1.4e-3  # what interpolation aims below many budgets: more than a certificate loses between two knots
_BLOCK = 4e-4  # budgets this close (relative) share one certificate


class _SearchStage(NamedTuple):
    """Accuracy of the spends in one stage of a search (``rel``), and where, relative to the target, it may end.

    It ends with a spend between ``1 - tolerance`` and ``1 - margin`` of the target, and aims at ``exp(-aim)`` of it.
    """

    rel: float
    tolerance: float
    aim: float
    margin: float


_STAGES = _SearchStage(COARSE, 0.01, 0.003, 0.0), _SearchStage(FINE, 4.5e-4, 2e-4, 6e-5)


def _check_target(epsilon: object, delta: object) -> tuple[float, float]:
    target = real(epsilon, "epsilon")
    if not 0 < target < math.inf:
        raise UsageError(f"epsilon must be positive and finite, got {target}.")
    return target, any_delta(delta)


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
    fixed: Sequence[Event] = (),
    relation: Relation = "add_remove",
    cap: int = 1,
) -> float:
    """Return the scale such that the events with noise ``scale * relative noise`` spend at most ``epsilon``.

    Guarantee: the epsilon of the returned scale was computed and is at most ``epsilon``, and within 0.05 % of it.

    Args:
        events: (rate, relative noise, count): the shape of a schedule.
        epsilon: what may be spent, positive.
        delta: strictly between 0 and 1.
        query_noise: fixed noise multiplier of side queries on the same samples (several: ``merged_noise`` of them).
        fixed: further releases whose noise does not scale, such as counts before the first step.
        relation: neighbouring relation.
        cap: above 1, how many records of a person there are at most, each of which is sampled by itself.

    Raises:
        CalibrationError: if no noise spends ``epsilon``; says what is nearest.

    Example:
        >>> scale = calibrate([(0.01, 1.0, 1000)], 1.0, 1e-5)
        >>> 1.41 < scale < 1.42
        True
    """
    target, delta = _check_target(epsilon, delta)
    shape = _check_shape(events)
    if query_noise < math.inf or fixed:
        least = Composition([*((q, query_noise, n) for q, _, n in shape), *fixed], relation, cap=cap).epsilon(delta)
        if least >= target:
            alone = [f"the side queries (noise {query_noise:g})"] if query_noise < math.inf else []
            alone += ["the counts before the first step"] if fixed else []
            raise CalibrationError(
                f"Alone, {' and '.join(alone)} spend epsilon {least:.4g}, so {target:g} is out of reach at any "
                f"gradient noise; ask for more than {least:.4g}, or give them more noise."
            )

    def spend(x: float, rel: float, near: float) -> float:
        scaled = [(q, merged_noise(math.exp(x) * s, [query_noise]), n) for q, s, n in shape]
        composed = Composition([*scaled, *fixed], relation, rel=rel, cap=cap)
        return composed.epsilon(delta, near=near if rel < COARSE else None)

    return math.exp(find_point(spend, target, math.log(cap / min(s for _, s, _ in shape))))


def _check_owners(sizes: Sequence[int], epsilons: Sequence[float], levels: Shape) -> tuple[Array, Array, list[Event]]:
    if len(sizes) != len(epsilons) or len(sizes) == 0:
        raise UsageError(f"sizes and epsilons must be equally long, not empty; got {len(sizes)} and {len(epsilons)}.")
    count = np.array([real(n, "size") for n in sizes])
    budget = np.array([real(e, "epsilon") for e in epsilons])
    if not (np.all(count >= 0) and np.all(np.isfinite(count)) and count.sum() > 0):
        raise UsageError("sizes must be numbers of records: not negative, and not all zero.")
    if not np.all((budget > 0) & np.isfinite(budget)):
        raise UsageError("every owner's epsilon must be positive and finite.")
    return count, budget, _check_shape([(1.0, s, n) for s, n in levels])


def _refuse_many(budgets: int, cap: int) -> None:
    """Raise if budgets would be solved between knots, whose certificates rest on a proof for single records."""
    if cap > 1 and budgets > FEW:
        raise CalibrationError(MANY_WITH_CAP.format(budgets))


def owner_bounds(
    sizes: Sequence[int],
    epsilons: Sequence[float],
    rate: float,
    relative_levels: Shape,
    delta: float,
    *,
    query_noise: float = math.inf,
    fixed: Sequence[Event] = (),
    cap: int = 1,
) -> tuple[float, list[float]]:
    """Compute one noise and a clip bound per owner (IDP Scale), so that every owner spends its own epsilon.

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
        fixed: further releases, the same for all owners, whose noise does not scale.
        cap: above 1, how many records of a person there are at most; then only a few budgets may differ.

    Returns:
        The scale and the relative bounds ``c_k``, in the order given.

    Example:
        >>> scale, bounds = owner_bounds([1, 1], [1.0, 2.0], 0.01, [(1.0, 1000)], 1e-5)
        >>> round(sum(bounds), 6)
        2.0
    """
    count, budget, shape = _check_owners(sizes, epsilons, relative_levels)
    delta = any_delta(delta)
    check_events([(rate, 1.0, 1)])
    unique, index = np.unique(budget, return_inverse=True)
    _refuse_many(unique.size, cap)

    def events(x: float) -> list[Event]:
        return [*((rate, merged_noise(math.exp(x) * s, [query_noise]), n) for _, s, n in shape), *fixed]

    def spend(x: float, rel: float, near: float) -> float:
        return Composition(events(x), rel=rel, cap=cap).epsilon(delta, near=near if rel < COARSE else None)

    alone = [(rate, s, n) for _, s, n in shape]
    start = math.log(calibrate(alone, float(unique[0]), delta, query_noise=query_noise, fixed=fixed, cap=cap))
    noises = np.exp(_certified_points(spend, events, unique, delta, start, by_rate=False))[index]
    scale = float(count.sum() / np.sum(count / noises))
    return scale, (scale / noises).tolist()


def owner_rates(
    sizes: Sequence[int],
    epsilons: Sequence[float],
    expected_batch: float,
    relative_levels: Shape,
    delta: float,
    *,
    query_noise: float = math.inf,
    fixed: Sequence[Event] = (),
    cap: int = 1,
) -> tuple[float, list[float]]:
    """Compute one noise and a sampling rate per owner (IDP Sample), so that every owner spends its own epsilon.

    Guarantee: every owner spends at most its epsilon and within 0.3 % of it, every owner is certified, and
    ``sum_k sizes[k] * rates[k] == expected_batch``.

    Args:
        sizes: records per owner.
        epsilons: budget per owner.
        expected_batch: expected number of sampled records per step.
        relative_levels: (relative noise, count): the shape of the schedule.
        delta: the same for all.
        query_noise: fixed noise multiplier of side queries on the same samples.
        fixed: further releases, the same for all owners, whose noise does not scale.
        cap: above 1, how many records of a person there are at most; then only a few budgets may differ.

    Returns:
        The scale of the noise and the rates, in the order given.

    Raises:
        CalibrationError: if some owner would need a rate above 1; names the largest expected batch that works.

    Example:
        >>> scale, rates = owner_rates([500, 500], [1.0, 2.0], 10, [(1.0, 100)], 1e-5)
        >>> round(500 * sum(rates), 6)
        10.0
    """
    count, budget, shape = _check_owners(sizes, epsilons, relative_levels)
    delta, batch = any_delta(delta), real(expected_batch, "expected_batch")
    if not 0 < batch <= count.sum():
        raise CalibrationError(f"expected_batch must lie in (0, {count.sum():g}] (all records), got {batch:g}.")
    unique, index = np.unique(budget, return_inverse=True)
    _refuse_many(unique.size, cap)
    records = np.bincount(index, weights=count)

    def rates_at(scale: float, fine: bool, certified: bool = False) -> Array:
        def events(x: float) -> list[Event]:
            return [*((math.exp(-x), merged_noise(scale * s, [query_noise]), n) for _, s, n in shape), *fixed]

        def spend(x: float, rel: float, near: float) -> float:
            return Composition(events(x), rel=rel, cap=cap).epsilon(delta, near=near if rel < COARSE else None)

        start = -math.log(batch / float(count.sum()))
        if certified or (fine and unique.size <= FEW):
            return np.exp(-_certified_points(spend, events, unique, delta, start, by_rate=True, floor=0.0))
        if unique.size <= FEW:
            return np.exp([-find_point(spend, float(e), start, floor=0.0, fine=False) for e in unique])
        targets = unique * (1 - _MARGIN) if fine else unique
        return np.exp(-_interpolated_points(spend, targets, start, fine, 0.0)[0])

    full = [(1.0, s, n) for _, s, n in shape]
    try:
        top = calibrate(full, float(unique[-1]), delta, query_noise=query_noise, fixed=fixed, cap=cap)
    except CalibrationError:  # the queries alone keep every rate below 1, so the noise has no upper end
        top = math.inf
    most = float(records @ rates_at(top, False)) if unique.size > 1 or top == math.inf else float(count.sum())
    if batch > most:
        raise CalibrationError(
            f"An expected batch of {batch:g} is out of reach: even with the most noise the owners with epsilon "
            f"{unique[-1]:g} would need a higher sampling rate than they can have. The largest batch that works with "
            f"these budgets is about {most * 0.99:.4g}. Bring the budgets closer together, take fewer steps, give side "
            "queries more noise, or use owner bounds (Scale)."
        )
    mean = float(records @ np.log(unique) / records.sum())
    usual = [(batch / float(count.sum()), s, n) for _, s, n in shape]
    scale = min(top, calibrate(usual, math.exp(mean), delta, cap=cap))
    fine, power, previous = False, 1.0, None
    for _ in range(24):
        rates = rates_at(scale, fine)
        total = float(records @ rates)
        if fine and unique.size > FEW and 1 <= total / batch <= 1 + 1e-3:
            rates = rates_at(scale, True, certified=True)
            total = float(records @ rates)
        if fine and 1 <= total / batch <= 1 + 1e-3:
            return scale, (rates * (batch / total))[index].tolist()
        gap = math.log(total / batch)
        if previous and abs(gap - previous[1]) > 1e-9:
            power = min(max((gap - previous[1]) / math.log(scale / previous[0]), 0.3), 6.0)
        previous = (scale, gap) if abs(gap) > 4e-3 or fine else None
        fine = fine or abs(gap) < 4e-3
        scale = min(top, scale * math.exp((6e-4 - gap) / power))
    raise CalibrationError(f"No common noise makes the rates add up to an expected batch of {batch:g}; try another.")


def find_point(spend: Spend, target: float, x: float, *, floor: float = -math.inf, fine: bool = True) -> float:
    """Find a point whose spend lies 0.006 to 0.045 % below the target.

    Takes secant steps on log epsilon, on a coarse grid first. Only a point whose spend was computed is returned; the
    margin keeps it within the target when it is computed again on another grid.

    Args:
        spend: gives the epsilon of a point; falls with the point.
        target: epsilon that may be spent.
        x: where to start.
        floor: least point that may be returned.
        fine: whether the search goes on after the coarse grid; without, the spend lies within 1 % of the target.

    Raises:
        CalibrationError: if no point spends the target; says what is nearest.
    """
    slope, origin = -1.0, x
    for rel, tolerance, aim, margin in _STAGES if fine else _STAGES[:1]:
        low, high, step = -math.inf, math.inf, 1.0
        previous: tuple[float, float] | None = None
        for _ in range(60):
            value = spend(x, rel, target)
            if target * (1 - tolerance) <= value <= target * (1 - margin):
                break
            low, high = (x, high) if value > target * (1 - margin) else (low, x)
            if abs(x - origin) > _SPAN or (x == floor and value < target):
                raise CalibrationError(
                    f"No setting spends epsilon {target:.6g}: the nearest tried spends {value:.6g}. Ask for an epsilon "
                    "on that side, or change the number of releases or their rates."
                )
            y = math.log(value / target) + aim if 0 < value < math.inf else math.copysign(math.inf, value - target)
            if previous and math.isfinite(y) and math.isfinite(previous[1]) and x != previous[0]:
                slope = min((y - previous[1]) / (x - previous[0]), -0.02)
            previous = (x, y)
            move = max(-step, min(step, -y / slope))
            step *= 1.5 if abs(move) == step else 1.0
            x = max(x + move, floor)
            if not low < x < high:
                x = 0.5 * (max(low, floor) + high)
        else:
            raise CalibrationError(
                f"No setting was found that spends epsilon {target:.6g}: the spend jumps there, and the nearest tried "
                f"spends {value:.6g}. Try another delta, or other rates or numbers of releases."
            )
    return x


def _interpolated_points(spend: Spend, budgets: Array, x: float, fine: bool, floor: float) -> tuple[Array, Array]:
    """Return points for sorted budgets by interpolation between knots, and the knots (falling)."""
    rel = FINE if fine else COARSE
    if not fine and budgets[-1] < 1.05 * budgets[0]:  # closer together than a coarse solution tells apart
        x = find_point(spend, float(budgets[0]), x, floor=floor, fine=False)
        return np.full(budgets.size, x), np.array([x])
    ends = []
    for target in (float(budgets[0]), float(budgets[-1])):
        x = find_point(spend, target, x, floor=floor, fine=fine)
        ends.append(x)
    count = max(6, math.ceil(math.log(budgets[-1] / budgets[0]) / (0.04 if fine else 0.3)))
    knots = np.linspace(ends[0], ends[1], count)
    guess = np.geomspace(budgets[0], budgets[-1], count)
    spent = np.array([spend(float(k), rel, float(g)) for k, g in zip(knots, guess, strict=True)])
    spent = np.maximum.accumulate(spent * (1 + 1e-12 * np.arange(count)))
    return pchip(np.log(spent), knots, np.log(budgets)), knots


def _move_until_certified(
    points: Array, knots: Array, budgets: Array, delta: float, events: Callable[[float], list[Event]], by_rate: bool
) -> Array:
    """Move points up (cheaper) until every owner's certificate holds, and return them; owners in one block share it.

    Spend is monotone in the point, so the block's dearest point with the block's smallest budget covers all of it.
    """
    order = np.argsort(knots)
    edges = knots[order]
    blocks = np.floor(np.log(budgets) / _BLOCK)
    first = np.flatnonzero(np.append(True, np.diff(blocks) != 0))
    last = np.append(first[1:], budgets.size) - 1
    pending = np.arange(first.size)
    for _ in range(12):
        dear = points[last[pending]]
        cell = np.clip(np.searchsorted(edges, dear, side="left"), 1, edges.size - 1)
        failed: list[int] = []
        for j in np.unique(cell):
            rows = pending[cell == j]
            # A point outside the knots takes the nearer end of a wider cell.
            ends = max(edges[j], float(points[last[rows]].max())), min(edges[j - 1], float(points[last[rows]].min()))
            cheap, costly = events(ends[0]), events(ends[1])
            owner = [events(float(x)) for x in points[last[rows]]]
            share = np.array([list(map(mixture_share, cheap, costly, e, repeat(by_rate))) for e in owner])
            bound = certified_deltas(cheap, costly, share, budgets[first[rows]], delta)
            failed += rows[~(bound <= delta)].tolist()
        if not failed:
            return points
        for block in failed:
            points[first[block] : last[block] + 1] += 3e-4
        pending = np.array(failed)
    raise CalibrationError("Some owners could not be certified; bring the budgets closer together or use fewer levels.")


def _certified_points(
    spend: Spend,
    events: Callable[[float], list[Event]],
    budgets: Array,
    delta: float,
    x: float,
    *,
    by_rate: bool,
    floor: float = -math.inf,
) -> Array:
    """Return a certified point for every budget (sorted): one by one if they are few, else by knots and certificates.

    ``events`` gives what an owner at a point is exposed to, ``spend`` its epsilon; ``x`` is where to start.
    """
    if budgets.size <= FEW:
        single = []
        for target in budgets:
            x = find_point(spend, float(target), x, floor=floor)
            single.append(x)
        return np.array(single)
    if budgets[-1] < 1.002 * budgets[0]:  # the smallest budget's point serves all within 0.3 %
        return np.full(budgets.size, find_point(spend, float(budgets[0]), x, floor=floor))
    points, knots = _interpolated_points(spend, budgets * (1 - _MARGIN), x, True, floor)
    return _move_until_certified(np.minimum.accumulate(points), knots, budgets, delta, events, by_rate)
