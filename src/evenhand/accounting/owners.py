"""What each of many owners has spent: exact for a few, certified for tens of thousands.

Owners differ in one number, their sampling rate or their relative bound, in which the spend rises. Between two knots
every owner is dominated by a mixture of the knots (see ``certificates``): one transform a knot certifies all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from evenhand.accounting.accountant import epsilon
from evenhand.accounting.gaussian_profile import Array
from evenhand.accounting.many_owners import certify, pchip
from evenhand.accounting.settling import FEW, mixture_share
from evenhand.types import Event

_CELL = 0.02
_BLOCK = 2e-4
_STEP = 5e-4


def owner_epsilons(
    points: Sequence[float],
    events: Callable[[float], list[Event]],
    delta: float,
    *,
    by_rate: bool,
    tries: Sequence[float | None] = (),
) -> list[float]:
    """Epsilon of every owner: an upper bound, at most about 0.2 % above the exact value.

    Args:
        points: the rate (``by_rate``) or the relative bound of each owner, positive.
        events: what an owner with this rate or bound is exposed to; spends more for a larger point.
        delta: the same for all.
        by_rate: whether points are rates.
        tries: values to try first, such as budgets: one that is certified and lower than our own guess is returned.

    Example:
        >>> spent = owner_epsilons([0.01, 0.02], lambda rate: [(rate, 1.0, 100)], 1e-5, by_rate=True)
        >>> spent[0] < spent[1]
        True
    """
    unique, index = np.unique(np.asarray(points, dtype=float), return_inverse=True)
    tried = np.full(unique.size, math.inf)
    np.minimum.at(tried, index, [math.inf if value is None else value for value in tries] or math.inf)
    if unique.size <= FEW:
        found = np.array([epsilon(events(float(point)), delta) for point in unique])
    else:
        found = _certified(unique, tried, events, delta, by_rate)
    return [float(value) for value in found[index]]


def _certified(
    unique: Array, tried: Array, events: Callable[[float], list[Event]], delta: float, by_rate: bool
) -> Array:
    """Group owners closer than ``_BLOCK`` with the dearest of them, guess between knots, certify, raise what fails."""
    blocks = np.floor(np.log(unique) / _BLOCK)
    last = np.append(np.flatnonzero(np.diff(blocks)), unique.size - 1)
    sizes = np.diff(np.append(-1, last))
    dear = unique[last]
    least = np.minimum.reduceat(tried, last - sizes + 1)
    ends = [epsilon(events(float(dear[place])), delta) for place in (0, -1)]
    count = max(8, math.ceil(math.log(max(ends[1] / ends[0], 1.1)) / _CELL))
    knots = np.geomspace(dear[0], dear[-1], count)
    knots[0], knots[-1] = dear[0], dear[-1]
    spent = np.maximum.accumulate([epsilon(events(float(knot)), delta) for knot in knots])
    guess = np.minimum(least, np.exp(pchip(np.log(knots), np.log(spent), np.log(dear))) * (1 + _STEP))
    cell = np.clip(np.searchsorted(knots, dear, side="left"), 1, count - 1)
    for place in range(1, count):
        rows = cell == place
        if rows.any():
            pair = float(knots[place - 1]), float(knots[place])
            guess[rows] = _cell(dear[rows], guess[rows], pair, float(spent[place]), events, delta, by_rate)
    return np.repeat(guess, sizes)


def _cell(
    points: Array,
    guess: Array,
    knots: tuple[float, float],
    ceiling: float,
    events: Callable[[float], list[Event]],
    delta: float,
    by_rate: bool,
    halvings: int = 3,
) -> Array:
    """Certified epsilons of the owners between two knots.

    A guess that fails is tried again between nearer knots, whose mixture is closer to the owner; then it is raised. The
    dearer knot's own epsilon always holds.
    """
    pair = events(knots[0]), events(knots[1])
    share = np.array(
        [
            [mixture_share(*levels, by_rate) for levels in zip(*pair, events(float(point)), strict=True)]
            for point in points
        ]
    )
    result = np.minimum(guess, ceiling)
    failed = ~(certify(*pair, share, result, delta) <= delta) & (result < ceiling)
    if halvings and failed.any():
        middle = math.sqrt(knots[0] * knots[1])
        for half, ends in ((points <= middle, (knots[0], middle)), (points > middle, (middle, knots[1]))):
            rows = failed & half
            if rows.any():
                result[rows] = _cell(points[rows], result[rows], ends, ceiling, events, delta, by_rate, halvings - 1)
        return result
    pending = np.flatnonzero(failed)
    for _ in range(6):
        if not pending.size:
            return result
        result[pending] = np.minimum(result[pending] * (1 + _STEP), ceiling)
        failed = ~(certify(*pair, share[pending], result[pending], delta) <= delta)
        pending = pending[failed & (result[pending] < ceiling)]
    result[pending] = ceiling
    return result
