"""Where a table of the privacy loss looks: tilt, window, grid width. That decides how tight it is, never how safe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import erfcx, ndtri

from evenhand.accounting.gaussian_profile import Array, Direction, loss_at, narrowed
from evenhand.accounting.noise_levels import Levels

HUGE = 1e6  # losses beyond this are not resolved
NEGLIGIBLE = (1e-8, 1e-6, 1e-5, 1e-4)
"""Share of delta that truncation may add: more than the first only where the grid would get too wide."""
_MAX_SIZE = 2**20
_DEEPEST = 80.0  # -log of the smallest delta worth tilting to


@dataclass(frozen=True)
class Grid:
    """Where a table looks: tilt, the loss it is centred on, window, grid width, tail order, reach, aimed accuracy."""

    tilt: float
    centre: float
    top: float
    width: float
    size: int
    tail_order: float
    reach: float
    rel: float


def _saddle_delta(k: Array, slope: Array, curve: Array, orders: Array) -> Array:
    """Log delta at loss ``slope`` if the tilted loss were Gaussian: only a guide, never a result."""
    s = np.sqrt(curve / 2)
    mills = erfcx(orders * s) - erfcx((orders + 1) * s)
    return np.asarray(k - orders * slope + np.log(np.maximum(mills, 1e-300) / 2))


def loss_ends(rate: float, noise: float, direction: Direction, reach: float) -> tuple[float, float]:
    """Smallest and largest loss within ``reach`` deviations, less where only a small share of the mass differs."""
    far = 1.0 / noise + narrowed(reach, rate)
    high = min(reach, far) if direction == "add" else far
    low = min(reach, far) if direction == "replace" else reach
    ends = loss_at(-low, rate, noise, direction), loss_at(high, rate, noise, direction)
    return min(ends), max(ends)


def _widest(levels: Levels, direction: Direction, reach: float) -> tuple[float, float]:
    """Ends that hold all levels' losses. When adding, noise 1/reach has the widest: more noise or less loses less."""
    rate, least, most = float(levels.rate.max()), float(levels.noise.min()), float(levels.noise.max())
    noises = {least, min(max(1 / max(reach, 1e-3), least), most)} if direction == "add" else {least}
    found = [loss_ends(rate, noise, direction, reach) for noise in noises]
    return min(low for low, _ in found), max(high for _, high in found)


def plan(
    levels: Levels,
    direction: Direction,
    *,
    delta: float | None = None,
    loss: float | None = None,
    rel: float = 1e-4,
    shares: Sequence[float] = NEGLIGIBLE,
) -> Grid:
    """Choose tilt, window and grid so that epsilon is at most about ``rel`` (relative) above the truth.

    Centred on ``loss`` if given, else on a guess of the epsilon of ``delta``. The choice affects only how tight the
    result is. At tiny rates the loss has a long thin tail, of which more is then cut off and charged to delta: the next
    of ``shares``.
    """
    best, wanted = _plan(levels, direction, delta, loss, rel, shares[0])
    for share in shares[1:]:
        if best.width <= 1.5 * wanted:
            break
        grid, wanted = _plan(levels, direction, delta, loss, rel, share)
        best = grid if grid.width < 0.7 * best.width else best
    return best


def _plan(
    levels: Levels, direction: Direction, delta: float | None, loss: float | None, rel: float, share: float
) -> tuple[Grid, float]:
    """The grid for one share of delta, and the width that it should have."""
    releases = float(levels.count.sum())
    log_delta = math.log(delta) if delta is not None else -30.0
    reach = -float(ndtri(max(math.exp(max(log_delta, -600.0)) * share / releases, 1e-290)))
    spread = math.sqrt(levels.moments(np.zeros(1), direction, reach)[2][0])
    ups = np.geomspace(1e-4, 1e6, 96) / max(spread, 1e-12)
    orders = np.concatenate([-ups[60::-5], [0.0], ups])
    k, slope, curve = levels.moments(orders, direction, reach)
    right = orders > 0
    guess = _saddle_delta(k[right], slope[right], curve[right], ups)
    falls = -np.minimum.accumulate(guess)
    if loss is not None:
        tilt = float(np.interp(loss, np.maximum.accumulate(slope[right]), ups))
        tilt = min(tilt, float(np.interp(_DEEPEST, falls, ups)))
    else:
        tilt = float(np.interp(-log_delta, falls, ups))
    tilts = min(tilt, float(ups[-2])) * np.array([1.0, 0.9, 0.8, 0.7])
    at, slopes, curves = levels.moments(tilts, direction, reach)
    centre = float(slopes[0]) if loss is None else loss
    if not centre < HUGE:
        return Grid(1 / HUGE, HUGE, HUGE, HUGE / 16, 64, 1 / HUGE, reach, rel), HUGE
    if delta is None:
        log_delta = min(float(np.interp(tilt, ups, guess)), math.log(0.5))
    scale = max(abs(centre), 0.1 * math.sqrt(curves[0]), 1e-12)
    wanted = math.sqrt(12 * rel * scale / (releases * (float(tilts[0]) + 1)))
    ends = _widest(levels, direction, reach)
    width = max(wanted, (ends[1] - ends[0]) / _MAX_SIZE)
    k = k + releases * orders * (orders + 1) * width**2 / 12  # what the grid itself adds
    tops = (k[right] - log_delta - math.log(share)) / ups
    top, tail_order = float(tops.min()), float(ups[np.argmin(tops)])
    parts = math.log(share) - np.log1p(tilts * (1 + tilts) * np.sqrt(curves))
    spans = []
    for candidate, log_k, part in zip(tilts, at, parts, strict=True):
        below, beyond = orders < candidate * (1 - 1e-9), orders > candidate * (1 + 1e-9)
        low = np.max((part + log_k - k[below]) / (candidate - orders[below]))
        wrap = np.min((k[beyond] - log_k - part) / (orders[beyond] - candidate))
        spans.append(float(max(top - min(low, centre - 2 * width), wrap - centre)))
    # The saddle point gives the sharpest table; a smaller tilt pays when tilted tails would wrap around.
    best = int(np.argmin(np.array(spans) * np.array([1.0, 1.1, 1.2, 1.3])))
    size = spans[best] / width
    while size > _MAX_SIZE:
        width, size = 2 * width, size / 2
    points = int(next_fast_len(max(int(size) + 8, 64), real=True))
    return Grid(float(tilts[best]), centre, top, width, points, tail_order, reach, rel), wanted


def invert(profile: Callable[[Array], Array], delta: float) -> float:
    """Smallest epsilon >= 0 with ``profile(epsilon) <= delta``, by bisection; infinite beyond HUGE."""
    if profile(np.array([0.0]))[0] <= delta:
        return 0.0
    high = 1.0
    while profile(np.array([high]))[0] > delta:
        high *= 2
        if high > HUGE:
            return math.inf
    low = 0.0 if high == 1.0 else high / 2
    while high - low > 1e-13 * high:
        grid = np.linspace(low, high, 33)
        index = int(np.argmax(profile(grid) <= delta))
        low, high = float(grid[index - 1]), float(grid[index])
    return high
