"""Privacy profile of one release in which each of a person's records is sampled by itself: at most ``cap`` of them.

With noise multiplier ``s`` for one record (so ``m = 1/s``) and rate ``q`` the worst pair is ``P = sum_k b_k N(k m, 1)``
against ``Q = N(0, 1)``, where ``b`` is binomial with ``cap`` trials of share ``q``; both directions count. With ``cap``
1 it is the pair of ``gaussian_profile.py``. That it dominates, whatever the directions of the records' gradients, and
how it is computed, is in docs/proofs/capped_persons.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from evenhand.accounting.gaussian_profile import Array, Direction, gaussian_profile
from evenhand.accounting.renyi import LogMoments

_UNIT = 2.0**-53
_REST = 1e-40  # mass of the mixture that counts as lost altogether
_TABLE = 4096  # outputs between which the output of a given loss is looked for
_FAR = 36.0  # deviations beyond which outputs hardly occur


@dataclass(frozen=True)
class Mixture:
    """The worst pair of one release: ``share[k]`` of its mass at distance ``k / noise``, and ``rest`` beyond them.

    ``slip`` bounds the relative error of each share; ``log_share`` keeps those that are too small for a float.

    Examples:
      >>> pair = Mixture.of(rate=0.5, noise=2.0, cap=2)
      >>> pair.share.tolist(), pair.step
      ([0.25, 0.5, 0.25], 0.5)
    """

    share: Array
    step: float
    rest: float
    slip: Array
    log_share: Array

    @classmethod
    def of(cls, rate: float, noise: float, cap: int) -> Mixture:
        """Return the pair for a sampling rate below 1."""
        log_share, rest, slip = _binomial(rate, cap)
        return cls(np.exp(log_share), 1 / noise, rest, slip, log_share)

    @property
    def shift(self) -> Array:
        """Return the distance of every part."""
        return np.asarray(self.step * np.arange(self.share.size), dtype=np.float64)

    def exponents(self, t: Array) -> Array:
        """Return the loss of every part alone at the outputs ``t``, one row for each part."""
        shift = self.shift[:, None]
        return np.asarray(shift * (t - shift / 2))

    def loss(self, t: Array) -> tuple[Array, Array]:
        """Return ``log P/Q`` at the outputs ``t``, where it rises, and a bound on the error."""
        alone = self.exponents(t)
        weighted = self.log_share[:, None] + alone
        top = weighted.max(axis=0)
        weight = np.exp(weighted - top)
        total = weight.sum(axis=0)
        value, weight = top + np.log(total), weight / total
        rounded = 4 * _UNIT * (np.abs(alone) + self.shift[:, None] ** 2) + self.slip[:, None]
        error = (weight * (rounded + 2 * _UNIT * np.abs(weighted))).sum(axis=0)
        error += 4 * _UNIT * (self.share.size + np.abs(value))
        near = np.abs(value) < 1.0
        if near.any():  # 1 + sum of share * (exp(loss) - 1) keeps the digits of a loss near 0
            grown = np.expm1(alone[1:, near])
            ratio = (self.share[1:, None] * grown).sum(axis=0) - self.rest
            value[near] = np.log1p(ratio)
            slip = self.slip[1:, None] + 4 * _UNIT * self.share.size
            wrong = np.abs(grown) * slip + (grown + 1) * rounded[1:, near]
            error[near] = (self.share[1:, None] * wrong).sum(axis=0) / (1 + ratio) + 4 * _UNIT * np.abs(value[near])
        return value, error

    def slope(self, t: Array) -> Array:
        """Return about how fast the loss rises at the outputs ``t``."""
        weighted = self.log_share[:, None] + self.exponents(t)
        weight = np.exp(weighted - weighted.max(axis=0))
        return np.asarray((self.shift[:, None] * weight).sum(axis=0) / weight.sum(axis=0))

    def outputs(self, eps: Array) -> Array:
        """Return outputs whose loss is about ``eps``: by a table, then by Newton's steps within its cells."""
        ends = -_FAR, float(self.shift[-1]) + _FAR
        table = np.linspace(*ends, _TABLE)
        losses = self.loss(table)[0]
        place = np.clip(np.searchsorted(losses, eps), 1, _TABLE - 1)
        low, high = table[place - 1], table[place]
        t = np.clip(np.interp(eps, losses, table), low, high)
        for _ in range(4):
            t = np.clip(t - (self.loss(t)[0] - eps) / np.maximum(self.slope(t), 1e-300), low, high)
        return np.asarray(t)


@lru_cache(maxsize=256)
def _binomial(rate: float, cap: int) -> tuple[Array, float, Array]:
    """Return logs of the shares of 0, 1, 2 ... sampled records, the mass left out, and errors of the shares."""
    log_rate, log_not = math.log(rate), math.log1p(-rate)
    count = np.arange(cap + 1)
    ways = np.cumsum(np.append(0.0, np.log((cap - count[:-1]) / (count[:-1] + 1))))
    log_share = ways + count * log_rate + (cap - count) * log_not
    share = np.exp(log_share)
    slip = 4 * _UNIT * (2 + count + np.abs(ways) + count * abs(log_rate) + (cap - count) * abs(log_not))
    above = np.append(np.cumsum(share[::-1])[::-1][1:], 0.0)
    last = max(1, int(np.argmax(above <= _REST)))
    return log_share[: last + 1], float(above[last]) * (1 + 1e-6), slip[: last + 1]


def _remove(eps: Array, pair: Mixture) -> tuple[Array, Array]:
    """Compute the excess of the remove direction and its error: at the output of loss ``eps`` it is a sum over parts.

    No difference of nearly equal numbers is taken: every part adds its own profile at its own loss.
    """
    t = pair.outputs(eps)
    reached, uncertain = pair.loss(t)
    alone, up = pair.exponents(t), eps >= 0
    value, error = np.zeros_like(eps), np.zeros_like(eps)
    for k in range(1, pair.share.size):
        x, distance = alone[k], float(pair.shift[k])
        outer, relative = gaussian_profile(np.abs(x), distance)
        # Outside of the record's own losses the profile and what it exceeds change places, both without cancelling.
        above, below = np.where(x >= 0, outer, -np.expm1(x) + np.exp(np.minimum(x, 0.0)) * outer), np.zeros_like(x)
        inner = x < 0
        below[inner] = np.exp(x[inner]) * outer[inner]
        below[~inner] = np.expm1(np.minimum(x[~inner], 700.0)) + outer[~inner]
        part = pair.share[k] * np.where(up, above, below)
        value += part
        error += part * (4 * relative + pair.slip[k] + 8 * _UNIT * (pair.share.size + np.abs(x)))
    moved = np.abs(reached - eps) + uncertain + 2 * _UNIT * np.abs(eps)
    steep = np.exp(np.minimum(eps + log_ndtr(np.where(up, -t, t)), 600.0))
    outside = (t <= -_FAR) | (t >= float(pair.shift[-1]) + _FAR)
    # Beyond the outputs that are looked at only the end's value is known: the excess falls towards both ends.
    error += np.where(outside, value, 2 * moved * steep) + np.where(up, pair.rest, 0.0)
    return np.where(outside, 0.0, value), error


def capped_excess(eps: Array, rate: float, noise: float, cap: int, direction: Direction) -> tuple[Array, Array]:
    """Compute the excess ``g`` of one release at every ``eps`` and a bound on the error of each value.

    Guarantee: the true excess lies within ``g +- error``; tested against 50-digit arithmetic.

    Args:
        eps: privacy losses, any sign.
        rate: sampling rate of each record, below 1.
        noise: noise multiplier for one record.
        cap: records of a person, at most.
        direction: ``remove`` or ``add``.

    Example:
        >>> from evenhand.accounting.gaussian_profile import excess
        >>> one, _ = capped_excess(np.array([0.5]), 0.1, 1.0, 1, "remove")
        >>> bool(abs(one / excess(np.array([0.5]), 0.1, 1.0, "remove")[0] - 1) < 1e-12)
        True
    """
    pair = Mixture.of(rate, noise, cap)
    if direction == "remove":
        return _remove(eps, pair)
    (value, error), factor = _remove(-eps, pair), np.exp(np.minimum(eps, 600.0))
    return value * factor, factor * (error + 2 * _UNIT * value * (1 + np.abs(eps)))


def capped_range(rate: float, noise: float, cap: int, direction: Direction, reach: float) -> tuple[float, float]:
    """Return smallest and largest loss within ``reach`` deviations, less where only a small share of mass differs."""
    pair = Mixture.of(rate, noise, cap)
    far = _upper_end(pair, reach)
    low, high = pair.loss(np.array([-reach, min(reach, far) if direction == "add" else far]))[0].tolist()
    return (low, high) if direction == "remove" else (-high, -low)


def _upper_end(pair: Mixture, reach: float) -> float:
    """Return the output beyond which as much mass of the person's part lies as beyond ``reach`` deviations of one."""
    low, high, wanted = 0.0, float(pair.shift[-1]) + reach, float(log_ndtr(-reach))
    while high - low > 1e-3 * max(1.0, high):
        middle = 0.5 * (low + high)
        mass = float(np.logaddexp.reduce(pair.log_share[1:] + log_ndtr(pair.shift[1:] - middle)))
        low, high = (middle, high) if mass > wanted else (low, middle)
    return high


def capped_moments(
    rate: float, noise: float, cap: int, orders: Array, direction: Direction, reach: float
) -> LogMoments:
    """Compute ``K``, ``K'`` and ``K''`` of the truncated loss at every order, to a few digits: for planning only."""
    pair = Mixture.of(rate, noise, cap)
    end = _upper_end(pair, reach)
    step = max(min(0.2, noise), (reach + end) / 4000)
    t = np.arange(-reach, end + step, step)
    log_p = pair.loss(t)[0]
    power = orders + 1 if direction == "remove" else -orders
    exponent = np.multiply.outer(power, log_p) - 0.5 * t * t
    top = exponent.max(axis=1)
    weight = np.exp(exponent - top[:, None])
    mass, loss = weight.sum(axis=1), log_p if direction == "remove" else -log_p
    mean = np.einsum("ij,j->i", weight, loss) / mass
    variance = np.maximum(np.einsum("ij,j->i", weight, loss * loss) / mass - mean * mean, 0.0)
    return LogMoments(top + np.log(mass * step / math.sqrt(2 * math.pi)), mean, variance)
