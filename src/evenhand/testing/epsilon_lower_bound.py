"""A lower bound on epsilon, for tests: together with the upper bound it pins the exact value from both sides.

Outcomes whose losses fall into the same grid cell are merged. Merging is post-processing, so it can only lower every
divergence; each merged outcome is then moved down to a grid point, which lowers it further by O(width^2).
Rounding of its FFT is not charged: use it at rates of 1e-4 and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.fft import irfft, rfft
from scipy.special import ndtr

from evenhand._validate import any_delta
from evenhand.accounting.events import check_events
from evenhand.accounting.gaussian_profile import Array, Direction, Relation, directions, loss_at
from evenhand.accounting.loss_distribution import Grid, choose_grid
from evenhand.accounting.noise_levels import NoiseLevels
from evenhand.types import Event


def _outputs(loss: Array, q: float, m: float, direction: Direction) -> Array:
    """Output ``t`` (in units of noise) at which the remove or replace loss takes each value; infinite outside."""
    if direction == "replace":
        with np.errstate(divide="ignore"):
            log_b = np.log(np.abs(np.sinh(np.minimum(np.abs(loss), 300.0) / 2)))
        log_b += math.log(1 / q - 1 + 1e-300) + m * m / 2
        slope = np.where(log_b > 30, log_b + math.log(2), np.arcsinh(np.exp(np.minimum(log_b, 30.0))))
        return np.asarray(np.sign(loss) * (np.abs(loss) / 2 + slope) / m)
    ratio = 1 + np.expm1(np.minimum(loss, 600.0)) / q
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(ratio > 0, np.log(np.maximum(ratio, 1e-300)) / m + m / 2, -np.inf))


def _masses(q: float, noise: float, direction: Direction, grid: Grid) -> tuple[int, Array, float]:
    """Merged masses on the grid, their first index, and the common offset (<= 0) of the points they sit on."""
    m, h = 1 / noise, grid.width
    shift = 0.0 if direction == "add" else m
    ends = sorted((loss_at(-grid.reach, q, noise, direction), loss_at(grid.reach + shift, q, noise, direction)))
    first, last = math.floor(ends[0] / h) - 1, math.ceil(ends[1] / h) + 1
    edges = (np.arange(first, last + 2, dtype=np.float64) - 0.5) * h
    t = _outputs(-edges if direction == "add" else edges, q, m, direction)
    if direction == "add":  # the loss falls with t, so the tail of the loss is the lower tail of t
        p, r = ndtr(t), (1 - q) * ndtr(t) + q * ndtr(t - m)
    else:
        p = (1 - q) * ndtr(-t) + q * ndtr(m - t)
        r = (1 - q) * ndtr(-t) + q * ndtr(-m - t) if direction == "replace" else ndtr(-t)
    tail_p, tail_r = p[:-1], r[:-1]
    p, r = np.maximum(-np.diff(p), 0.0), np.maximum(-np.diff(r), 0.0)
    index = np.arange(first, last + 1)
    seen = (p > 1e-12 * tail_p) & (r > 1e-12 * tail_r) & (r > 1e-280)
    safe_p, safe_r = np.where(seen, p, 1.0), np.where(seen, r, 1.0)
    rounding = 1e-15 * (tail_p / safe_p + tail_r / safe_r)
    gap = np.where(seen, np.clip(np.log(safe_p / safe_r) - rounding - index * h, -h, 0.0), -h)
    weight = p * np.exp(np.minimum(grid.tilt * index * h - (grid.tilt * index * h)[seen].max(), 0.0))
    # Cells below the offset fall a whole cell further: balance that against the offset, which everybody pays.
    order = np.argsort(gap)
    falling = np.cumsum(weight[order]) - weight[order]
    offset = float(gap[order][np.argmin(h * falling / weight.sum() - gap[order])]) - 1e-12
    moved = np.zeros(p.size + 1)
    stay = seen & (gap >= offset)
    moved[1:] += np.where(stay, p, 0.0)
    moved[:-1] += np.where(seen & ~stay, p, 0.0)
    return first - 1, moved, offset


def epsilon(events: Sequence[Event], delta: float, *, relation: Relation = "add_remove", rel: float = 4e-6) -> float:
    """Lower bound on the exact epsilon of a composition of at most a few dozen levels.

    Example:
        >>> 1.826 < epsilon([(0.01, 1.0, 1000)], 1e-5) < 1.8284
        True
    """
    levels = NoiseLevels.of(check_events(events), relation)
    delta = any_delta(delta)
    return max(_one(levels, delta, direction, rel) for direction in directions(relation))


def _one(levels: NoiseLevels, delta: float, direction: Direction, rel: float) -> float:
    grid = choose_grid(levels, direction, delta=delta, rel=rel)
    size = grid.size
    log_k, offset, log_g = 0.0, 0.0, np.zeros(size // 2 + 1, dtype=np.complex128)
    for q, s, n in levels.events():
        first, p, step = _masses(q, s, direction, grid)
        exponent = grid.tilt * grid.width * np.arange(first, first + p.size)
        top = float(exponent[p > 0].max())
        weight = p * np.exp(np.minimum(exponent - top, 0.0))
        folded = np.zeros(-(-p.size // size) * size)
        folded[: p.size] = weight / weight.sum()
        spectrum = rfft(np.roll(folded.reshape(-1, size).sum(axis=0), first % size), workers=1)
        log_g += n * np.log(np.where(np.abs(spectrum) > 1e-15, spectrum, 1e-15))
        log_k += n * (math.log(float(weight.sum())) + top)
        offset += n * step
    end = math.floor(grid.top / grid.width)
    loss = np.arange(end - size + 1, end + 1) * grid.width
    mass = np.roll(irfft(np.exp(log_g), n=size, workers=1), -((end + 1) % size))
    mass = np.maximum(mass - 1e-9 * mass.max(), 0.0)

    def value(eps: float) -> float:
        above = loss + offset > eps
        payoff = np.exp(log_k - grid.tilt * loss[above]) * -np.expm1(eps - loss[above] - offset)
        return float((mass[above] * payoff).sum()) * (1 - 1e-6)

    low, high = max(0.0, float(loss[0]) + offset), float(loss[-1])
    if value(low) <= delta:
        return 0.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if value(middle) > delta else (low, middle)
    return low
