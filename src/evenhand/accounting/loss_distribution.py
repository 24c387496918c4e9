"""The privacy loss distribution of a composition: a dominating discrete one, exponentially tilted, composed by FFT.

One ``Table`` bounds the whole profile of one ordered pair from above and is sharp around the loss it was tilted to.
Tilting multiplies each mass by ``exp(tilt * loss)`` before the transform and undoes it afterwards. The rounding error
of the FFT, which is absolute, thereby becomes relative to delta; it is bounded and added to every mass, so a small
delta is as safe as a large one. Derivations and the error budget: docs/proofs/accountant.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft

from evenhand.accounting.gaussian_profile import Array, Direction, excess
from evenhand.accounting.grids import Grid, loss_ends
from evenhand.accounting.noise_levels import Cell, Levels

Complex = NDArray[np.complex128]

_UNIT = 2.0**-53
_FLOOR = -50.0  # log magnitude below which a frequency is left out (and charged)
_SERIES = 8


def masses(rate: float, noise: float, direction: Direction, grid: Grid) -> tuple[int, Array, float]:
    """Connect-the-dots masses of one release on the grid: first index, masses, mass at infinity.

    Guarantee: composing with these masses bounds every profile from above. Linear interpolation of the convex profile
    in ``exp(loss)`` lies above it; ``excess``'s error bound is added to each mass.
    """
    h = grid.width
    ends = loss_ends(rate, noise, direction, grid.reach)
    first, last = min(math.floor(ends[0] / h), -1), max(math.ceil(ends[1] / h), 1)
    g, error = excess(np.arange(first, last + 1, dtype=np.float64) * h, rate, noise, direction)
    up, down = 1 / math.expm1(min(h, 500.0)), -1 / math.expm1(-h)
    rise, rise_error = np.diff(g), error[1:] + error[:-1]
    p = np.zeros_like(g)
    slack = np.full_like(g, 1e-200)  # covers what capping h leaves out
    p[:-1] += rise * up
    slack[:-1] += rise_error * up
    p[1:] -= rise * down
    slack[1:] += rise_error * down
    p[0] -= g[0]
    slack[0] += error[0]
    p[-first] += 1
    slack[-first] += 8 * _UNIT
    return first, np.maximum(p, 0.0) + slack, float(g[-1] + error[-1])


@dataclass(frozen=True)
class Transform:
    """The tilted masses of one knot: log moment at the tilt and at the tail order, spectrum, its error, infinity."""

    log_moment: float
    log_tail: float
    spectrum: Complex
    error: float
    infinite: float


def transform(rate: float, noise: float, direction: Direction, grid: Grid) -> Transform:
    """Tilt, fold onto the circle of the window and Fourier-transform one release."""
    first, p, infinite = masses(rate, noise, direction, grid)
    loss = np.arange(first, first + p.size) * grid.width

    def log_moment(order: float) -> tuple[float, Array]:
        exponent = order * loss
        shift = float(exponent[p > 0].max())
        weight = p * np.exp(np.minimum(exponent - shift, 0.0))
        total = float(weight.sum())
        rounding = 8 * _UNIT * (4 + math.log2(p.size) + float(np.abs(exponent).max()))
        return math.log(total) + shift + rounding, weight / total

    log_tail = log_moment(grid.tail_order)[0]
    log_k, weight = log_moment(grid.tilt)
    size = grid.size
    folded = np.zeros(-(-p.size // size) * size)
    folded[: p.size] = weight
    circle = np.roll(folded.reshape(-1, size).sum(axis=0), first % size)
    # Every coefficient is a sum of masses (total 1) times products of roots of unity, log2(size) rounded levels deep.
    depth = 2 + math.log2(size) + folded.size // size
    return Transform(log_k, log_tail, rfft(circle, workers=1), 8 * _UNIT * depth, infinite)


def _relative(size: Array, error: float) -> Array:
    """Error relative to a coefficient; one that is no larger than its error is replaced by it, off by up to 3 times."""
    return np.where(size > error, error / np.maximum(size, error), 2.0)


def _log_product(cell: Cell, knots: Sequence[Transform], active: int) -> tuple[Complex, Array, float, float]:
    """Log spectrum of the cell's releases, a bound on its error, log moments at the tilt and at the tail order."""
    corners = [knots[i] for i in cell.corners]
    moment, tail = (np.array([getattr(c, name) for c in corners]) for name in ("log_moment", "log_tail"))
    top, tail_top = moment.max(), tail.max()
    tilted = cell.weights * np.exp(moment - top)
    norm = tilted.sum(axis=1)
    log_k = float(cell.counts @ (np.log(norm) + top + 4 * _UNIT))
    log_tail = float(cell.counts @ (np.log(cell.weights @ np.exp(tail - tail_top)) + tail_top + 4 * _UNIT))
    share = tilted / norm[:, None]
    spectra = np.array([c.spectrum[:active] for c in corners])
    error = max(c.error for c in corners) + 8 * _UNIT
    n = float(cell.counts.sum())
    mean = (cell.counts @ share) / n
    centre: Complex = mean @ spectra
    size = np.abs(centre)
    log_sum: Complex = np.log(np.where(np.abs(centre) > error, centre, error))
    log_sum = n * log_sum
    log_error: Array = n * _relative(size, error)
    if len(corners) == 1 or share.shape[0] == 1:
        return log_sum, log_error, log_k, log_tail
    rest = np.arange(active)
    if len(corners) == 2:
        offset = share[:, 1] - mean[1]
        ratio = (spectra[1] - spectra[0]) / np.where(np.abs(centre) > error, centre, error)
        rho = np.abs(ratio) * float(np.abs(offset).max())
        remainder = n * rho ** (_SERIES + 1) / np.maximum(1 - rho, 0.5)
        for order in range(2, _SERIES + 1):
            log_sum -= (-ratio) ** order * (float(cell.counts @ offset**order) / order)
        log_error = log_error / np.maximum(1 - rho, 0.5) + remainder
        rest = np.flatnonzero((rho > 0.5) | (remainder > 1e-9))
    for part in np.array_split(rest, max(1, rest.size * share.shape[0] // 2**20)):
        exact = share @ spectra[:, part]
        size = np.abs(exact)
        exact = np.where(size > error, exact, error)
        log_sum[part] = cell.counts @ np.log(exact)
        log_error[part] = cell.counts @ _relative(size, error)
    return log_sum, log_error, log_k, log_tail


def _discounted(mass: Array, width: float) -> Array:
    """``sum_{j >= i} mass[j] exp(-(j - i) width)`` for every i, in blocks so that no exponential overflows."""
    out = np.empty_like(mass)
    block = max(1, min(mass.size, int(500 / width)))
    carry = 0.0
    for end in range(mass.size, 0, -block):
        start = max(0, end - block)
        fall = np.exp(-width * np.arange(end - start))
        sums = np.cumsum((mass[start:end] * fall)[::-1])[::-1]
        out[start:end] = (sums + carry * fall[-1] * math.exp(-width)) / fall
        carry = float(out[start])
    return out


class Table:
    """Upper bound on the profile of one ordered pair under composition, sharp around ``grid.centre``.

    Example:
        >>> from evenhand.accounting.grids import plan
        >>> from evenhand.accounting.noise_levels import Levels
        >>> levels = Levels.of([(0.01, 1.0, 1000)], "add_remove")
        >>> table = Table(levels, "remove", plan(levels, "remove", delta=1e-5, loss=None, rel=1e-4))
        >>> 1.826 < table.epsilon(1e-5) < 1.8295
        True
    """

    def __init__(self, levels: Levels, direction: Direction, grid: Grid) -> None:
        knots, cells = levels.reduce(grid.tilt, 0.3 * grid.rel * max(grid.centre, 1e-3), grid.reach)
        spectra = [transform(q, s, direction, grid) for q, s in knots]
        size = grid.size
        ceiling = np.zeros(size // 2 + 1)
        sizes = [np.log(np.abs(spectrum.spectrum) + spectrum.error) for spectrum in spectra]
        for cell in cells:
            ceiling += cell.counts.sum() * np.max([sizes[i] for i in cell.corners], axis=0)
        active = int(np.flatnonzero(ceiling > _FLOOR)[-1]) + 1
        log_g = np.zeros(active, dtype=np.complex128)
        log_error, log_k, log_tail, infinite = np.zeros(active), 0.0, 0.0, 0.0
        for cell in cells:
            part, part_error, k, tail = _log_product(cell, spectra, active)
            log_g += part
            log_error += part_error + 4 * _UNIT * np.abs(part)
            log_k, log_tail = log_k + k, log_tail + tail
            infinite += float(cell.counts @ (cell.weights @ [spectra[i].infinite for i in cell.corners]))
        product = np.exp(np.minimum(log_g.real, 0.0) + 1j * log_g.imag)
        lost = np.abs(product) * np.expm1(np.minimum(log_error + 4 * _UNIT * np.abs(log_g.imag), 50.0))
        weight = irfft(np.append(product, np.zeros(size // 2 + 1 - active)), n=size, workers=1)
        lost += 8 * _UNIT * (2 + math.log2(size)) * np.abs(product)
        self.noise_floor = 2 * float(lost.sum()) / size + math.exp(_FLOOR)
        end = math.floor(grid.top / grid.width)
        loss = np.arange(end - size + 1, end + 1) * grid.width
        weight = np.maximum(np.roll(weight, -((end + 1) % size)), 0.0) + self.noise_floor
        away = loss - grid.centre
        with np.errstate(over="ignore"):
            first = weight * np.exp(-grid.tilt * away)
        # Sums of non-negative terms: relative error below size * unit, charged to the first sum only.
        rounding = 1 + 4 * _UNIT * (size + (1 + grid.tilt) * float(np.abs(away).max()))
        self._first = np.append(np.cumsum(first[::-1])[::-1], 0.0) * rounding**2
        self._second = np.append(_discounted(first, grid.width), 0.0)
        self._loss = np.append(loss, loss[-1] + grid.width)
        self._width = grid.width
        self._log_scale = log_k - grid.tilt * grid.centre
        self._rest = min(1.0, infinite + math.exp(min(0.0, log_tail - grid.tail_order * end * grid.width)))

    def _value(self, first: Array, second: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            value = np.exp(np.log(np.maximum(first - second, 1e-300)) + self._log_scale) + self._rest
        return np.asarray(np.where(np.isfinite(value), np.clip(value, 0.0, 1.0), 1.0))

    def delta(self, eps: Array) -> Array:
        """Upper bound on delta at every ``eps``; 1 left of the window."""
        index = np.minimum(np.searchsorted(self._loss, eps, side="right"), self._first.size - 1)
        fall = np.exp(np.minimum(eps - self._loss[index], 0.0))
        return np.where(eps < self._loss[0], 1.0, self._value(self._first[index], fall * self._second[index]))

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon >= 0 whose bound is at most ``delta``; infinity if the window holds none."""
        nodes = self._value(self._first[1:], math.exp(-self._width) * self._second[1:])
        index = int(np.searchsorted(-nodes, -delta, side="left"))
        if index == nodes.size:
            return math.inf
        low, high = float(self._loss[max(index - 1, 0)]), float(self._loss[index])
        level = math.log(delta - self._rest) - self._log_scale if delta > self._rest else -math.inf
        with np.errstate(invalid="ignore"):
            ratio = (self._first[index] - math.exp(min(level, 700.0))) / self._second[index]
        return max(0.0, min(max(high + math.log(ratio), low), high) if ratio > 0 else high)
