"""Certifying many owners at once: everyone between two knots is dominated by a mixture of the two knots.

Between two knots an owner's release is dominated by a mixture of the knots' releases (convexity in the rate, or in the
total variation of the noise). Its spectrum is the same mixture of two spectra, of which only a few dozen frequencies
matter, and delta at the owner's own epsilon is a linear functional of it: certifying 50,000 owners costs two
transforms per knot and level, and a small sum for each owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evenhand.accounting.gaussian_profile import Array, Relation, directions
from evenhand.accounting.grids import Grid, plan
from evenhand.accounting.loss_distribution import Complex, Transform, transform
from evenhand.accounting.noise_levels import Levels
from evenhand.types import Event

_UNIT = 2.0**-53
_FLOOR = -50.0
_REL = 2e-4


def certify(
    low: Sequence[Event],
    high: Sequence[Event],
    share: Array,
    epsilons: Array,
    delta: float,
    relation: Relation = "add_remove",
) -> Array:
    """Upper bound on every owner's delta at its own epsilon.

    Args:
        low: the events of the cheaper knot.
        high: the events of the dearer knot, level by level.
        share: weight on ``high``, one row per owner and one column per level (or a single column).
        epsilons: one per owner, close to each other.
        delta: what they are going to be compared with; only centres the grid.
        relation: neighbouring relation.

    Example:
        >>> bound = certify([(0.01, 1.0, 1000)], [(0.011, 1.0, 1000)], np.array([[0.0]]), np.array([1.829]), 1e-5)
        >>> bool(bound[0] <= 1e-5)
        True
    """
    levels = Levels.of(high, relation)
    centre = float(np.mean(epsilons))
    worst = np.zeros_like(epsilons)
    for direction in directions(relation):
        near = None if direction == "add" else centre
        grid = plan(levels, direction, delta=delta, loss=near, rel=_REL)
        pairs = [
            (transform(a[0], a[1], direction, grid), transform(b[0], b[1], direction, grid), float(b[2]))
            for a, b in zip(low, high, strict=True)
        ]
        ceiling = sum(n * np.log(np.maximum(_size(a), _size(b))) for a, b, n in pairs)
        active = int(np.flatnonzero(np.asarray(ceiling) > _FLOOR)[-1]) + 1
        for rows in np.array_split(np.arange(epsilons.size), max(1, epsilons.size * active // 2**19)):
            if rows.size:
                bound = _bound(pairs, share[rows], epsilons[rows], grid, active)
                worst[rows] = np.maximum(worst[rows], bound)
    return worst


def _size(knot: Transform) -> Array:
    return np.abs(knot.spectrum) + knot.error


def _bound(
    pairs: Sequence[tuple[Transform, Transform, float]], share: Array, epsilons: Array, grid: Grid, active: int
) -> Array:
    """Delta of one direction for a block of owners."""
    log_k, log_tail, infinite = (np.zeros(epsilons.size) for _ in range(3))
    log_g: Complex = np.zeros((epsilons.size, active), dtype=np.complex128)
    log_error = np.zeros((epsilons.size, active))
    for level, (a, b, n) in enumerate(pairs):
        w = share[:, min(level, share.shape[1] - 1)]
        top, tail = max(a.log_moment, b.log_moment), max(a.log_tail, b.log_tail)
        part_a, part_b = (1 - w) * math.exp(a.log_moment - top), w * math.exp(b.log_moment - top)
        log_k += n * (np.log(part_a + part_b) + top + 8 * _UNIT)
        rest = (1 - w) * math.exp(a.log_tail - tail) + w * math.exp(b.log_tail - tail)
        log_tail += n * (np.log(rest) + tail + 8 * _UNIT)
        infinite += n * ((1 - w) * a.infinite + w * b.infinite)
        mixed = (part_b / (part_a + part_b))[:, None]
        spectrum = (1 - mixed) * a.spectrum[:active] + mixed * b.spectrum[:active]
        error = max(a.error, b.error) + 8 * _UNIT
        size = np.abs(spectrum)
        part = n * np.log(np.where(size > error, spectrum, error))
        log_g += part
        vague = np.where(size > error, error / np.maximum(size, error), 2.0)
        log_error += n * vague + 4 * _UNIT * np.abs(part)
    product = np.exp(np.minimum(log_g.real, 0.0) + 1j * log_g.imag)
    twice = np.where((np.arange(active) == 0) | (2 * np.arange(active) == grid.size), 1.0, 2.0)
    lost = np.abs(product) * np.expm1(np.minimum(log_error + 4 * _UNIT * np.abs(log_g.imag), 50.0))
    floor = (lost * twice).sum(axis=1) / grid.size + math.exp(_FLOOR)
    end, start = math.floor(grid.top / grid.width), np.floor(epsilons / grid.width) + 1
    below = epsilons - start * grid.width
    angle = 2 * math.pi / grid.size * np.arange(active)
    turn = np.exp(1j * np.outer(start, angle))

    def ladder(order: float) -> Complex:
        """``sum_j exp(-order * (j - start) * width + i angle j)`` over the window from ``start`` to its end."""
        step = -order * grid.width + 1j * angle
        rungs = np.maximum(end + 1 - start, 0.0)
        return np.asarray(turn * np.expm1(np.outer(rungs, step)) / np.expm1(step))

    payoff = ladder(grid.tilt) - np.exp(below)[:, None] * ladder(grid.tilt + 1)
    value = ((product * payoff).real * twice).sum(axis=1) / grid.size
    rounding = 64 * _UNIT * (grid.size + active) * (np.abs(product * payoff) * twice).sum(axis=1) / grid.size
    slack = rounding + floor * payoff[:, 0].real
    scale = np.exp(log_k - grid.tilt * (start * grid.width))
    upper = np.exp(np.minimum(log_tail - grid.tail_order * end * grid.width, 0.0))
    return np.asarray(np.minimum(1.0, scale * (np.maximum(value, 0.0) + slack) + infinite + upper))


def pchip(x: Array, y: Array, at: Array) -> Array:
    """Monotone cubic interpolation (Fritsch and Carlson) of increasing ``x``; ends are extended linearly.

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
