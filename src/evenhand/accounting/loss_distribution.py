"""The privacy loss distribution of a composition: a dominating discrete one, exponentially tilted, composed by FFT.

``choose_grid`` decides where to look: tilt, window, grid width. That decides how tight the result is, never how safe.
One ``LossDistribution`` bounds the whole profile of one ordered pair from above and is sharp around the loss that it
is tilted to. Tilting multiplies each mass by ``exp(tilt * loss)`` before the transform and undoes it afterwards. The
rounding error of the FFT, which is absolute, thereby becomes relative to delta; it is bounded and added to every mass,
so a small delta is as safe as a large one. Derivations and the error budget: docs/proofs/accountant.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import erfcx, ndtri

from evenhand.accounting.gaussian_profile import Array, Direction, excess, loss_at, sampled_reach
from evenhand.accounting.noise_levels import MixtureCell, NoiseLevels

Complex = NDArray[np.complex128]

LARGEST_LOSS = 1e6
"""Losses beyond this are not resolved."""
TRUNCATION_SHARES = (1e-8, 1e-6, 1e-5, 1e-4)
"""Shares of delta that truncation may add: more than the first only where the grid would get too wide."""
LOG_FLOOR = -50.0
"""Log magnitude below which a frequency is left out (and charged)."""
UNIT = 2.0**-53
"""Rounding unit of a float."""
_MAX_SIZE = 2**20
_DEEPEST = 80.0  # -log of the smallest delta worth tilting to
_SERIES = 8  # terms of the logarithm's series that replace a product over the releases of a cell


@dataclass(frozen=True)
class Grid:
    """A window of losses and the tilt under which they are transformed.

    Attributes:
        tilt: order of the exponential tilt.
        centre: loss that the distribution is sharp around.
        top: largest loss of the window; what lies beyond is charged to delta.
        width: distance of two neighbouring losses.
        size: number of losses, a fast length of the FFT.
        tail_order: order of the Chernoff bound on the mass beyond ``top``.
        reach: deviations of the noise at which one release's loss is cut off.
        rel: relative accuracy of epsilon that was aimed for.
    """

    tilt: float
    centre: float
    top: float
    width: float
    size: int
    tail_order: float
    reach: float
    rel: float


def _saddle_log_delta(log_moment: Array, slope: Array, curvature: Array, orders: Array) -> Array:
    """Return log delta at loss ``slope`` if the tilted loss were Gaussian: only a guide, never a result."""
    s = np.sqrt(curvature / 2)
    mills = erfcx(orders * s) - erfcx((orders + 1) * s)
    return np.asarray(log_moment - orders * slope + np.log(np.maximum(mills, 1e-300) / 2))


def loss_range(rate: float, noise: float, direction: Direction, reach: float, cap: int = 1) -> tuple[float, float]:
    """Return smallest and largest loss within ``reach`` deviations, less where only a small share of mass differs."""
    if cap > 1 and rate < 1:
        from evenhand.accounting.capped_profile import capped_range

        return capped_range(rate, noise, cap, direction, reach)
    far = 1.0 / noise + sampled_reach(reach, rate)
    high = min(reach, far) if direction == "add" else far
    low = min(reach, far) if direction == "replace" else reach
    ends = loss_at(-low, rate, noise, direction), loss_at(high, rate, noise, direction)
    return min(ends), max(ends)


def release_excess(eps: Array, rate: float, noise: float, direction: Direction, cap: int) -> tuple[Array, Array]:
    """Compute the excess of one level of `NoiseLevels` with this cap, and a bound on its error.

    The noise of a level without sampling is that for all records of a person together.
    """
    if cap > 1 and rate < 1:
        from evenhand.accounting.capped_profile import capped_excess

        return capped_excess(eps, rate, noise, cap, direction)
    return excess(eps, rate, noise, direction)


def _widest_range(levels: NoiseLevels, direction: Direction, reach: float) -> tuple[float, float]:
    """Return ends that hold all levels' losses.

    When adding, noise 1/reach has the widest range: more noise or less loses less.
    """
    rate, least, most = float(levels.rate.max()), float(levels.noise.min()), float(levels.noise.max())
    noises = {least, min(max(1 / max(reach, 1e-3), least), most)} if direction == "add" else {least}
    ranges = [loss_range(rate, noise, direction, reach, levels.largest_cap) for noise in noises]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def choose_grid(
    levels: NoiseLevels,
    direction: Direction,
    *,
    delta: float | None = None,
    loss: float | None = None,
    rel: float = 1e-4,
    shares: Sequence[float] = TRUNCATION_SHARES,
) -> Grid:
    """Choose tilt, window and grid so that epsilon is at most about ``rel`` (relative) above the truth.

    The choice affects only how tight the result is. At tiny rates the loss has a long thin tail, of which more is then
    cut off and charged to delta: the next of ``shares``.

    Args:
        levels: what is composed.
        direction: which ordered pair.
        delta: the delta whose epsilon is asked for.
        loss: centre of the grid; by default a guess of the epsilon of ``delta``.
        rel: relative accuracy that epsilon should have.
        shares: shares of delta that truncation may take, tried in this order.
    """
    best, wanted = _grid_for_share(levels, direction, delta, loss, rel, shares[0])
    for share in shares[1:]:
        if best.width <= 1.5 * wanted:
            break
        grid, wanted = _grid_for_share(levels, direction, delta, loss, rel, share)
        best = grid if grid.width < 0.7 * best.width else best
    return best


def _grid_for_share(
    levels: NoiseLevels, direction: Direction, delta: float | None, loss: float | None, rel: float, share: float
) -> tuple[Grid, float]:
    """Return the grid for one share of delta, and the width that it should have."""
    releases = float(levels.count.sum())
    log_delta = math.log(delta) if delta is not None else -30.0
    reach = -float(ndtri(max(math.exp(max(log_delta, -600.0)) * share / releases, 1e-290)))
    spread = math.sqrt(levels.moments(np.zeros(1), direction, reach)[2][0])
    ups = np.geomspace(1e-4, 1e6, 96) / max(spread, 1e-12)
    orders = np.concatenate([-ups[60::-5], [0.0], ups])
    log_moment, slope, curvature = levels.moments(orders, direction, reach)
    right = orders > 0
    guess = _saddle_log_delta(log_moment[right], slope[right], curvature[right], ups)
    falls = -np.minimum.accumulate(guess)
    if loss is not None:
        tilt = float(np.interp(loss, np.maximum.accumulate(slope[right]), ups))
        tilt = min(tilt, float(np.interp(_DEEPEST, falls, ups)))
    else:
        tilt = float(np.interp(-log_delta, falls, ups))
    tilts = min(tilt, float(ups[-2])) * np.array([1.0, 0.9, 0.8, 0.7])
    tilt_moments, tilt_slopes, tilt_curvatures = levels.moments(tilts, direction, reach)
    centre = float(tilt_slopes[0]) if loss is None else loss
    if not centre < LARGEST_LOSS:
        far = LARGEST_LOSS
        return Grid(1 / far, far, far, far / 16, 64, 1 / far, reach, rel), far
    if delta is None:
        log_delta = min(float(np.interp(tilt, ups, guess)), math.log(0.5))
    scale = max(abs(centre), 0.1 * math.sqrt(tilt_curvatures[0]), 1e-12)
    wanted = math.sqrt(12 * rel * scale / (releases * (float(tilts[0]) + 1)))
    ends = _widest_range(levels, direction, reach)
    width = max(wanted, (ends[1] - ends[0]) / _MAX_SIZE)
    log_moment = log_moment + releases * orders * (orders + 1) * width**2 / 12  # what the grid itself adds
    tops = (log_moment[right] - log_delta - math.log(share)) / ups
    top, tail_order = float(tops.min()), float(ups[np.argmin(tops)])
    parts = math.log(share) - np.log1p(tilts * (1 + tilts) * np.sqrt(tilt_curvatures))
    spans = []
    for candidate, tilt_moment, part in zip(tilts, tilt_moments, parts, strict=True):
        below, beyond = orders < candidate * (1 - 1e-9), orders > candidate * (1 + 1e-9)
        low = np.max((part + tilt_moment - log_moment[below]) / (candidate - orders[below]))
        wrap = np.min((log_moment[beyond] - tilt_moment - part) / (orders[beyond] - candidate))
        spans.append(float(max(top - min(low, centre - 2 * width), wrap - centre)))
    # The saddle point gives the sharpest distribution; a smaller tilt pays when tilted tails would wrap around.
    best = int(np.argmin(np.array(spans) * np.array([1.0, 1.1, 1.2, 1.3])))
    size = spans[best] / width
    while size > _MAX_SIZE:
        width, size = 2 * width, size / 2
    points = int(next_fast_len(max(int(size) + 8, 64), real=True))
    return Grid(float(tilts[best]), centre, top, width, points, tail_order, reach, rel), wanted


def invert_profile(profile: Callable[[Array], Array], delta: float) -> float:
    """Return the smallest epsilon >= 0 with ``profile(epsilon) <= delta``; infinity beyond ``LARGEST_LOSS``.

    Found by bisection; a falling profile is assumed.
    """
    if profile(np.array([0.0]))[0] <= delta:
        return 0.0
    high = 1.0
    while profile(np.array([high]))[0] > delta:
        high *= 2
        if high > LARGEST_LOSS:
            return math.inf
    low = 0.0 if high == 1.0 else high / 2
    while high - low > 1e-13 * high:
        grid = np.linspace(low, high, 33)
        index = int(np.argmax(profile(grid) <= delta))
        low, high = float(grid[index - 1]), float(grid[index])
    return high


class GridMasses(NamedTuple):
    """Masses of one release on a grid: entry ``i`` lies at loss ``(first + i) * width``."""

    first: int
    masses: Array
    infinite: float
    """Mass at an infinite loss."""


def dominating_masses(rate: float, noise: float, direction: Direction, grid: Grid, cap: int = 1) -> GridMasses:
    """Compute the connect-the-dots masses of one release on the grid.

    Guarantee: composing with these masses bounds every profile from above. Linear interpolation of the convex profile
    in ``exp(loss)`` lies above it; ``excess``'s error bound is added to each mass.
    """
    h = grid.width
    ends = loss_range(rate, noise, direction, grid.reach, cap)
    first, last = min(math.floor(ends[0] / h), -1), max(math.ceil(ends[1] / h), 1)
    g, error = release_excess(np.arange(first, last + 1, dtype=np.float64) * h, rate, noise, direction, cap)
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
    slack[-first] += 8 * UNIT
    return GridMasses(first, np.maximum(p, 0.0) + slack, float(g[-1] + error[-1]))


@dataclass(frozen=True)
class ReleaseSpectrum:
    """The Fourier transform of one release's tilted masses.

    Attributes:
        log_moment: log of the sum of the tilted masses.
        log_tail: log of the sum of the masses tilted by the grid's tail order.
        spectrum: transform of the tilted masses after they are scaled to sum 1.
        error: bound on the error of every entry of ``spectrum``.
        infinite: mass at an infinite loss.
    """

    log_moment: float
    log_tail: float
    spectrum: Complex
    error: float
    infinite: float


def transform_release(rate: float, noise: float, direction: Direction, grid: Grid, cap: int = 1) -> ReleaseSpectrum:
    """Tilt the masses of one release, fold them onto the circle of the window and Fourier-transform them."""
    first, masses, infinite = dominating_masses(rate, noise, direction, grid, cap)
    loss = np.arange(first, first + masses.size) * grid.width

    def tilted(order: float) -> tuple[float, Array]:
        """Return the log of the sum of the masses tilted by ``order``, and these masses scaled to sum 1."""
        exponent = order * loss
        shift = float(exponent[masses > 0].max())
        weight = masses * np.exp(np.minimum(exponent - shift, 0.0))
        total = float(weight.sum())
        rounding = 8 * UNIT * (4 + math.log2(masses.size) + float(np.abs(exponent).max()))
        return math.log(total) + shift + rounding, weight / total

    log_tail = tilted(grid.tail_order)[0]
    log_moment, weight = tilted(grid.tilt)
    size = grid.size
    folded = np.zeros(-(-masses.size // size) * size)
    folded[: masses.size] = weight
    circle = np.roll(folded.reshape(-1, size).sum(axis=0), first % size)
    # Every coefficient is a sum of masses (total 1) times products of roots of unity, log2(size) rounded levels deep.
    depth = 2 + math.log2(size) + folded.size // size
    return ReleaseSpectrum(log_moment, log_tail, rfft(circle, workers=1), 8 * UNIT * depth, infinite)


def relative_error(size: Array, error: float) -> Array:
    """Return the error relative to coefficients of this size.

    A coefficient that is no larger than its error is replaced by it, which is off by up to 3 times.
    """
    return np.where(size > error, error / np.maximum(size, error), 2.0)


class _LogProduct(NamedTuple):
    """Product of the spectra of several releases, in the log domain."""

    spectrum: Complex
    error: Array
    moment: float
    tail: float


def _log_product(cell: MixtureCell, knots: Sequence[ReleaseSpectrum], active: int) -> _LogProduct:
    """Compute the log of the product of the spectra of all releases of a cell.

    Args:
        cell: releases that mix the same knots.
        knots: spectra of all knots; ``cell.corners`` are positions in them.
        active: number of frequencies, from 0 on, that matter.

    Returns:
        Sum of log spectra, a bound on its error, sums of log moments at the tilt and at the tail order.
    """
    corners = [knots[i] for i in cell.corners]
    moment, tail = (np.array([getattr(c, name) for c in corners]) for name in ("log_moment", "log_tail"))
    top, tail_top = moment.max(), tail.max()
    tilted = cell.weights * np.exp(moment - top)
    norm = tilted.sum(axis=1)
    log_moment = float(cell.counts @ (np.log(norm) + top + 4 * UNIT))
    log_tail = float(cell.counts @ (np.log(cell.weights @ np.exp(tail - tail_top)) + tail_top + 4 * UNIT))
    share = tilted / norm[:, None]
    spectra = np.array([c.spectrum[:active] for c in corners])
    error = max(c.error for c in corners) + 8 * UNIT
    releases = float(cell.counts.sum())
    mean = (cell.counts @ share) / releases
    centre: Complex = mean @ spectra
    size = np.abs(centre)
    log_sum: Complex = np.log(np.where(np.abs(centre) > error, centre, error))
    log_sum = releases * log_sum
    log_error: Array = releases * relative_error(size, error)
    if len(corners) == 1 or share.shape[0] == 1:
        return _LogProduct(log_sum, log_error, log_moment, log_tail)
    exact_at = np.arange(active)
    if len(corners) == 2:
        offset = share[:, 1] - mean[1]
        ratio = (spectra[1] - spectra[0]) / np.where(np.abs(centre) > error, centre, error)
        rho = np.abs(ratio) * float(np.abs(offset).max())
        remainder = releases * rho ** (_SERIES + 1) / np.maximum(1 - rho, 0.5)
        for order in range(2, _SERIES + 1):
            log_sum -= (-ratio) ** order * (float(cell.counts @ offset**order) / order)
        log_error = log_error / np.maximum(1 - rho, 0.5) + remainder
        exact_at = np.flatnonzero((rho > 0.5) | (remainder > 1e-9))
    for part in np.array_split(exact_at, max(1, exact_at.size * share.shape[0] // 2**20)):
        exact = share @ spectra[:, part]
        size = np.abs(exact)
        exact = np.where(size > error, exact, error)
        log_sum[part] = cell.counts @ np.log(exact)
        log_error[part] = cell.counts @ relative_error(size, error)
    return _LogProduct(log_sum, log_error, log_moment, log_tail)


def _discounted_sums(mass: Array, width: float) -> Array:
    """Return ``sum_{j >= i} mass[j] exp(-(j - i) width)`` for every i, in blocks so that no exponential overflows."""
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


class LossDistribution:
    """An upper bound on the profile of one ordered pair under composition, sharp around ``grid.centre``.

    Example:
        >>> levels = NoiseLevels.of([(0.01, 1.0, 1000)], "add_remove")
        >>> grid = choose_grid(levels, "remove", delta=1e-5, loss=None, rel=1e-4)
        >>> 1.826 < LossDistribution(levels, "remove", grid).epsilon(1e-5) < 1.8295
        True
    """

    def __init__(self, levels: NoiseLevels, direction: Direction, grid: Grid) -> None:
        knots, cells = levels.reduce(grid.tilt, 0.3 * grid.rel * max(grid.centre, 1e-3), grid.reach)
        spectra = [transform_release(q, s, direction, grid, cap) for q, s, cap in knots]
        size = grid.size
        ceiling = np.zeros(size // 2 + 1)
        sizes = [np.log(np.abs(spectrum.spectrum) + spectrum.error) for spectrum in spectra]
        for cell in cells:
            ceiling += cell.counts.sum() * np.max([sizes[i] for i in cell.corners], axis=0)
        active = int(np.flatnonzero(ceiling > LOG_FLOOR)[-1]) + 1
        log_spectrum = np.zeros(active, dtype=np.complex128)
        log_error, log_moment, log_tail, infinite = np.zeros(active), 0.0, 0.0, 0.0
        for cell in cells:
            part = _log_product(cell, spectra, active)
            log_spectrum += part.spectrum
            log_error += part.error + 4 * UNIT * np.abs(part.spectrum)
            log_moment, log_tail = log_moment + part.moment, log_tail + part.tail
            infinite += float(cell.counts @ (cell.weights @ [spectra[i].infinite for i in cell.corners]))
        product = np.exp(np.minimum(log_spectrum.real, 0.0) + 1j * log_spectrum.imag)
        lost = np.abs(product) * np.expm1(np.minimum(log_error + 4 * UNIT * np.abs(log_spectrum.imag), 50.0))
        weight = irfft(np.append(product, np.zeros(size // 2 + 1 - active)), n=size, workers=1)
        lost += 8 * UNIT * (2 + math.log2(size)) * np.abs(product)
        self.noise_floor = 2 * float(lost.sum()) / size + math.exp(LOG_FLOOR)
        end = math.floor(grid.top / grid.width)
        loss = np.arange(end - size + 1, end + 1) * grid.width
        weight = np.maximum(np.roll(weight, -((end + 1) % size)), 0.0) + self.noise_floor
        away = loss - grid.centre
        with np.errstate(over="ignore"):
            untilted = weight * np.exp(-grid.tilt * away)
        # Sums of non-negative terms: relative error below size * unit, charged to the first sum only.
        rounding = 1 + 4 * UNIT * (size + (1 + grid.tilt) * float(np.abs(away).max()))
        self._tail_sums = np.append(np.cumsum(untilted[::-1])[::-1], 0.0) * rounding**2
        self._discounted = np.append(_discounted_sums(untilted, grid.width), 0.0)
        self._loss = np.append(loss, loss[-1] + grid.width)
        self._width = grid.width
        self._log_scale = log_moment - grid.tilt * grid.centre
        self._beyond = min(1.0, infinite + math.exp(min(0.0, log_tail - grid.tail_order * end * grid.width)))

    def _delta_of_sums(self, tail: Array, discounted: Array) -> Array:
        """Return delta from the two sums over losses above epsilon, of which the second is discounted to epsilon."""
        with np.errstate(over="ignore", invalid="ignore"):
            value = np.exp(np.log(np.maximum(tail - discounted, 1e-300)) + self._log_scale) + self._beyond
        return np.asarray(np.where(np.isfinite(value), np.clip(value, 0.0, 1.0), 1.0))

    def delta(self, eps: Array) -> Array:
        """Return an upper bound on delta at every ``eps``; 1 left of the window."""
        index = np.minimum(np.searchsorted(self._loss, eps, side="right"), self._tail_sums.size - 1)
        fall = np.exp(np.minimum(eps - self._loss[index], 0.0))
        bound = self._delta_of_sums(self._tail_sums[index], fall * self._discounted[index])
        return np.where(eps < self._loss[0], 1.0, bound)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon >= 0 whose bound is at most ``delta``; infinity if the window holds none."""
        nodes = self._delta_of_sums(self._tail_sums[1:], math.exp(-self._width) * self._discounted[1:])
        index = int(np.searchsorted(-nodes, -delta, side="left"))
        if index == nodes.size:
            return math.inf
        low, high = float(self._loss[max(index - 1, 0)]), float(self._loss[index])
        level = math.log(delta - self._beyond) - self._log_scale if delta > self._beyond else -math.inf
        with np.errstate(invalid="ignore"):
            ratio = (self._tail_sums[index] - math.exp(min(level, 700.0))) / self._discounted[index]
        return max(0.0, min(max(high + math.log(ratio), low), high) if ratio > 0 else high)
