"""Epsilons of many owners: exact for a few, certified for tens of thousands.

Owners differ in one number, their sampling rate or their relative bound, in which the spend rises. Between two knots
an owner's release is dominated by a mixture of the knots' releases (convexity in the rate, or in the total variation
of the noise). Its spectrum is the same mixture of two spectra, of which only a few dozen frequencies matter, and delta
at the owner's own epsilon is a linear functional of it: certifying 50,000 owners costs two transforms per knot and
level, and a small sum for each owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from evenhand.accounting.accountant import epsilon
from evenhand.accounting.gaussian_profile import Array, Relation, directions, total_variation_gap
from evenhand.accounting.loss_distribution import (
    LOG_FLOOR,
    UNIT,
    Complex,
    Grid,
    ReleaseSpectrum,
    choose_grid,
    relative_error,
    transform_release,
)
from evenhand.accounting.noise_levels import NoiseLevels
from evenhand.types import Event

FEW = 8
"""Distinct budgets or owners that are solved one by one."""
MANY_WITH_CAP = (
    f"With person_cap at most {FEW} distinct budgets can be certified, and these are {{}}: give fewer, or leave out "
    "person_cap (then persons are drawn, each with some of their records)."
)
"""Why many owner classes are refused where records of a person are drawn one by one."""
_REL = 2e-4  # relative accuracy of the grids on which owners are certified
_CELL = 0.02  # distance of knots, in logs of epsilon
_BLOCK = 2e-4  # owners whose rates or bounds are this close (relative) share one certificate
_RAISE = 5e-4  # by how much a guess is raised that could not be certified


class _KnotPair(NamedTuple):
    """One level at two neighbouring knots: the cheaper and the dearer release, and how many of them are composed."""

    low: ReleaseSpectrum
    high: ReleaseSpectrum
    releases: float


def certified_deltas(
    low: Sequence[Event],
    high: Sequence[Event],
    share: Array,
    epsilons: Array,
    delta: float,
    relation: Relation = "add_remove",
) -> Array:
    """Compute an upper bound on every owner's delta at its own epsilon.

    Args:
        low: the events of the cheaper knot.
        high: the events of the dearer knot, level by level.
        share: weight on ``high``, one row per owner and one column per level (or a single column).
        epsilons: one per owner, close to each other.
        delta: what they are going to be compared with; only centres the grid.
        relation: neighbouring relation.

    Returns:
        One bound per owner; an owner whose bound is at most ``delta`` is certified.

    Example:
        >>> knots = [(0.01, 1.0, 1000)], [(0.011, 1.0, 1000)]
        >>> bound = certified_deltas(*knots, np.array([[0.0]]), np.array([1.829]), 1e-5)
        >>> bool(bound[0] <= 1e-5)
        True
    """
    levels = NoiseLevels.of(high, relation)
    centre = float(np.mean(epsilons))
    worst = np.zeros_like(epsilons)
    for direction in directions(relation):
        near = None if direction == "add" else centre
        grid = choose_grid(levels, direction, delta=delta, loss=near, rel=_REL)
        pairs = [
            _KnotPair(
                transform_release(*a[:2], direction, grid), transform_release(*b[:2], direction, grid), float(b[2])
            )
            for a, b in zip(low, high, strict=True)
        ]
        ceiling = sum(n * np.log(np.maximum(_magnitude(a), _magnitude(b))) for a, b, n in pairs)
        active = int(np.flatnonzero(np.asarray(ceiling) > LOG_FLOOR)[-1]) + 1
        for rows in np.array_split(np.arange(epsilons.size), max(1, epsilons.size * active // 2**19)):
            if rows.size:
                bound = _deltas(pairs, share[rows], epsilons[rows], grid, active)
                worst[rows] = np.maximum(worst[rows], bound)
    return worst


def _magnitude(knot: ReleaseSpectrum) -> Array:
    return np.abs(knot.spectrum) + knot.error


def _deltas(pairs: Sequence[_KnotPair], share: Array, epsilons: Array, grid: Grid, active: int) -> Array:
    """Compute the bounds of one direction for a block of owners; ``active`` is how many frequencies matter."""
    log_moment, log_tail, infinite = (np.zeros(epsilons.size) for _ in range(3))
    log_spectrum: Complex = np.zeros((epsilons.size, active), dtype=np.complex128)
    log_error = np.zeros((epsilons.size, active))
    for level, (a, b, n) in enumerate(pairs):
        w = share[:, min(level, share.shape[1] - 1)]
        top, tail = max(a.log_moment, b.log_moment), max(a.log_tail, b.log_tail)
        part_a, part_b = (1 - w) * math.exp(a.log_moment - top), w * math.exp(b.log_moment - top)
        log_moment += n * (np.log(part_a + part_b) + top + 8 * UNIT)
        mixed_tail = (1 - w) * math.exp(a.log_tail - tail) + w * math.exp(b.log_tail - tail)
        log_tail += n * (np.log(mixed_tail) + tail + 8 * UNIT)
        infinite += n * ((1 - w) * a.infinite + w * b.infinite)
        mixed = (part_b / (part_a + part_b))[:, None]
        spectrum = (1 - mixed) * a.spectrum[:active] + mixed * b.spectrum[:active]
        error = max(a.error, b.error) + 8 * UNIT
        size = np.abs(spectrum)
        part = n * np.log(np.where(size > error, spectrum, error))
        log_spectrum += part
        log_error += n * relative_error(size, error) + 4 * UNIT * np.abs(part)
    product = np.exp(np.minimum(log_spectrum.real, 0.0) + 1j * log_spectrum.imag)
    twice = np.where((np.arange(active) == 0) | (2 * np.arange(active) == grid.size), 1.0, 2.0)
    lost = np.abs(product) * np.expm1(np.minimum(log_error + 4 * UNIT * np.abs(log_spectrum.imag), 50.0))
    floor = (lost * twice).sum(axis=1) / grid.size + math.exp(LOG_FLOOR)
    end, start = math.floor(grid.top / grid.width), np.floor(epsilons / grid.width) + 1
    below = epsilons - start * grid.width
    angle = 2 * math.pi / grid.size * np.arange(active)
    turn = np.exp(1j * np.outer(start, angle))

    def ladder(order: float) -> Complex:
        """Return ``sum_j exp(-order * (j - start) * width + i angle j)`` over the window from ``start`` to its end."""
        step = -order * grid.width + 1j * angle
        rungs = np.maximum(end + 1 - start, 0.0)
        return np.asarray(turn * np.expm1(np.outer(rungs, step)) / np.expm1(step))

    payoff = ladder(grid.tilt) - np.exp(below)[:, None] * ladder(grid.tilt + 1)
    value = ((product * payoff).real * twice).sum(axis=1) / grid.size
    rounding = 64 * UNIT * (grid.size + active) * (np.abs(product * payoff) * twice).sum(axis=1) / grid.size
    slack = rounding + floor * payoff[:, 0].real
    scale = np.exp(log_moment - grid.tilt * (start * grid.width))
    beyond = np.exp(np.minimum(log_tail - grid.tail_order * end * grid.width, 0.0))
    return np.asarray(np.minimum(1.0, scale * (np.maximum(value, 0.0) + slack) + infinite + beyond))


def pchip(x: Array, y: Array, at: Array) -> Array:
    """Interpolate by monotone cubics (Fritsch and Carlson) at ``at``; the ends are extended linearly.

    Args:
        x: increasing points.
        y: a value at each of them.
        at: where to interpolate.

    Example:
        >>> pchip(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0]), np.array([0.5])).tolist()
        [0.5]
    """
    step, secant = np.diff(x), np.diff(y) / np.diff(x)
    slope = np.empty_like(y)
    slope[0], slope[-1] = secant[0], secant[-1]
    if x.size > 2:
        left, right = 2 * step[1:] + step[:-1], step[1:] + 2 * step[:-1]
        same = secant[:-1] * secant[1:] > 0
        safe = np.where(same[:, None], np.stack([secant[:-1], secant[1:]], axis=1), 1.0)
        slope[1:-1] = np.where(same, (left + right) / (left / safe[:, 0] + right / safe[:, 1]), 0.0)
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, x.size - 2)
    t = (at - x[i]) / step[i]
    cubic = (
        y[i] * (1 + 2 * t) * (1 - t) ** 2
        + y[i + 1] * t * t * (3 - 2 * t)
        + step[i] * (slope[i] * t * (1 - t) ** 2 - slope[i + 1] * t * t * (1 - t))
    )
    line = np.where(t < 0, y[i] + slope[i] * (at - x[i]), y[i + 1] + slope[i + 1] * (at - x[i + 1]))
    return np.asarray(np.where((t < 0) | (t > 1), line, cubic))


def mixture_share(cheap: Event, costly: Event, owner: Event, by_rate: bool) -> float:
    """Return the weight on the costly knot of the mixture of both knots that dominates the owner's release.

    Owners differ in their rate if ``by_rate``, else in their noise.
    """
    if by_rate:
        whole, part = costly[0] - cheap[0], owner[0] - cheap[0]
    else:
        m = 1 / cheap[1], 1 / owner[1], 1 / costly[1]
        whole = float(total_variation_gap(m[0], m[2], "add_remove"))
        part = float(total_variation_gap(m[0], m[1], "add_remove"))
    return min(1.0, max(0.0, part / whole + 1e-11)) if whole > 0 else 1.0  # 1e-11: far above the rounding error


def owner_epsilons(
    points: Sequence[float],
    events: Callable[[float], list[Event]],
    delta: float,
    *,
    by_rate: bool,
    candidates: Sequence[float | None] = (),
) -> list[float]:
    """Compute the epsilon of every owner: an upper bound, at most about 0.2 % above the exact value.

    Args:
        points: the rate (``by_rate``) or the relative bound of each owner, positive.
        events: what an owner with this rate or bound is exposed to; spends more for a larger point.
        delta: the same for all.
        by_rate: whether points are rates.
        candidates: an epsilon to try first for each owner, such as its budget: it is returned if it is certified and
            lower than the guess between knots.

    Example:
        >>> spent = owner_epsilons([0.01, 0.02], lambda rate: [(rate, 1.0, 100)], 1e-5, by_rate=True)
        >>> spent[0] < spent[1]
        True
    """
    unique, index = np.unique(np.asarray(points, dtype=float), return_inverse=True)
    least = np.full(unique.size, math.inf)
    np.minimum.at(least, index, [math.inf if value is None else value for value in candidates] or math.inf)
    if unique.size <= FEW:
        epsilons = np.array([epsilon(events(float(point)), delta) for point in unique])
    else:
        epsilons = _certified_epsilons(unique, least, events, delta, by_rate)
    return [float(value) for value in epsilons[index]]


def _certified_epsilons(
    unique: Array, candidates: Array, events: Callable[[float], list[Event]], delta: float, by_rate: bool
) -> Array:
    """Group owners closer than ``_BLOCK`` with the dearest of them, guess between knots, certify, raise what fails."""
    blocks = np.floor(np.log(unique) / _BLOCK)
    last = np.append(np.flatnonzero(np.diff(blocks)), unique.size - 1)
    sizes = np.diff(np.append(-1, last))
    dear = unique[last]
    least = np.minimum.reduceat(candidates, last - sizes + 1)
    ends = [epsilon(events(float(dear[place])), delta) for place in (0, -1)]
    count = max(8, math.ceil(math.log(max(ends[1] / ends[0], 1.1)) / _CELL))
    knots = np.geomspace(dear[0], dear[-1], count)
    knots[0], knots[-1] = dear[0], dear[-1]
    spent = np.maximum.accumulate([epsilon(events(float(knot)), delta) for knot in knots])
    guess = np.minimum(least, np.exp(pchip(np.log(knots), np.log(spent), np.log(dear))) * (1 + _RAISE))
    cell = np.clip(np.searchsorted(knots, dear, side="left"), 1, count - 1)
    for place in range(1, count):
        rows = cell == place
        if rows.any():
            pair = float(knots[place - 1]), float(knots[place])
            guess[rows] = _certify_cell(dear[rows], guess[rows], pair, float(spent[place]), events, delta, by_rate)
    return np.repeat(guess, sizes)


def _certify_cell(
    points: Array,
    guess: Array,
    knots: tuple[float, float],
    ceiling: float,
    events: Callable[[float], list[Event]],
    delta: float,
    by_rate: bool,
    halvings: int = 3,
) -> Array:
    """Return certified epsilons of the owners between two knots.

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
    failed = ~(certified_deltas(*pair, share, result, delta) <= delta) & (result < ceiling)
    if halvings and failed.any():
        middle = math.sqrt(knots[0] * knots[1])
        for half, ends in ((points <= middle, (knots[0], middle)), (points > middle, (middle, knots[1]))):
            rows = failed & half
            if rows.any():
                nearer = _certify_cell(points[rows], result[rows], ends, ceiling, events, delta, by_rate, halvings - 1)
                result[rows] = nearer
        return result
    pending = np.flatnonzero(failed)
    for _ in range(6):
        if not pending.size:
            return result
        result[pending] = np.minimum(result[pending] * (1 + _RAISE), ceiling)
        failed = ~(certified_deltas(*pair, share[pending], result[pending], delta) <= delta)
        pending = pending[failed & (result[pending] < ceiling)]
    result[pending] = ceiling
    return result
