"""Bound epsilon from below by how often an attack was right.

Two ways lead from hits and false alarms to an epsilon. The direct one assumes nothing. The other assumes that the
mechanism belongs to the plan's own family: the accounted events with all noise multiplied by one unknown factor. It
asks for the largest factor under which the attack could still have been so good, and reads epsilon off there. A
Gaussian trade-off curve is such a family only where nothing is sampled (rate 1), so it is used nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainccinv, betaincinv, ndtri

from evenhand.accounting.accountant import compose
from evenhand.accounting.trade_off import largest_power
from evenhand.types import Event

Scores = NDArray[np.float64]
_THRESHOLDS = 200
_ALARMS = (1e-3, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4)
_USUAL = (0.003, 0.03, 0.3)
"""Rates of false alarms at which a threshold is tried: few where steps are few and rows seldom drawn, else many."""
CHOOSING = 4
"""One trial in so many chooses a threshold, and gives no bound."""
_STEP, _FARTHEST, _PRECISION = 0.15, 7.0, 1e-3
"""How the logarithm of the factor is sought; the bound errs to the safe side by the precision."""
LARGEST = 1e6
"""Epsilon that is reported where not even a member of the family without noise explains what the attack saw."""


@dataclass(frozen=True)
class Counts:
    """Count what an attack did: hits among trials with the record, false alarms among as many without it."""

    hits: int
    alarms: int
    members: int
    others: int

    @classmethod
    def of(cls, members: Scores, others: Scores, threshold: float) -> Counts:
        """Return the counts of an attack that says "in" above the threshold."""
        return cls(int((members > threshold).sum()), int((others > threshold).sum()), members.size, others.size)

    def rates(self, miss: float) -> Rates:
        """Return what holds of the true rates together, but for a chance of ``2 * miss``."""
        return Rates(share_at_least(self.hits, self.members, miss), share_at_most(self.alarms, self.others, miss))


@dataclass(frozen=True)
class Rates:
    """Bound an attack's rates: it hits at least with ``power`` and raises a false alarm at most with ``alarms``."""

    power: float
    alarms: float

    @property
    def mu(self) -> float:
        """Return the distance of two Gaussians that such an attack needs at least; it only ranks thresholds.

        Examples:
          >>> round(Rates(0.69146, 0.30854).mu, 3)
          1.0
        """
        return float(ndtri(self.power) - ndtri(self.alarms))


def share_at_least(hits: int, trials: int, miss: float) -> float:
    """Return a lower bound of a probability by its hits, wrong with probability at most ``miss`` (Clopper-Pearson).

    Examples:
      >>> share_at_least(0, 10, 0.01), round(share_at_least(10, 10, 0.01), 4) == round(0.01 ** 0.1, 4)
      (0.0, True)
    """
    return float(betaincinv(hits, trials - hits + 1, miss)) if hits else 0.0


def share_at_most(hits: int, trials: int, miss: float) -> float:
    """Return an upper bound of a probability by its hits, wrong with probability at most ``miss`` (Clopper-Pearson).

    Examples:
      >>> share_at_most(10, 10, 0.01), round(share_at_most(0, 10, 0.01), 4) == round(1 - 0.01 ** 0.1, 4)
      (1.0, True)
    """
    return float(betainccinv(hits + 1, trials - hits, miss)) if hits < trials else 1.0


def direct_epsilon(rates: Rates, delta: float) -> float:
    """Return the epsilon that every mechanism has under which an attack is so good; nothing else is assumed.

    Examples:
      >>> round(direct_epsilon(Rates(0.5, 0.01), 1e-5), 3)
      3.912
    """
    ratios = ((rates.power - delta, rates.alarms), (1 - rates.alarms - delta, 1 - rates.power))
    return max([0.0, *(math.log(chance / other) for chance, other in ratios if chance > 0 and other > 0)])


def family_epsilon(events: Sequence[Event], rates: Rates, delta: float) -> float:
    """Return the epsilon of the most private member of the plan's family under which an attack can be so good.

    Guarantee:
      Of the accounted events with all noise multiplied by a common factor, every member with a smaller epsilon is
      refuted by these rates: its best test has less power at so few false alarms. 0 if none is refuted, at most
      ``LARGEST``.

    Examples:
      >>> round(family_epsilon([(1.0, 1.0, 1)], Rates(0.69146, 0.30854), 1e-5), 2)  # one Gaussian, mu = 1
      4.37
    """
    if rates.power <= rates.alarms:
        return 0.0
    factor = _refuted_factor(tuple(events), rates)
    return 0.0 if factor is None else min(LARGEST, compose(scale_noise(events, factor)).epsilon(delta))


def scale_noise(events: Sequence[Event], factor: float) -> list[Event]:
    """Return the events with their noise multiplied."""
    return [(rate, noise * factor, count) for rate, noise, count in events]


@lru_cache(maxsize=256)
def _refuted_factor(events: tuple[Event, ...], rates: Rates) -> float | None:
    """Return about the least factor of the noise that is refuted, and with it all larger ones; None if none is."""
    from scipy.optimize import brentq

    def surplus(log_factor: float) -> float:
        scaled = scale_noise(events, math.exp(log_factor))
        return largest_power(scaled, rates.alarms, near=rates.power) - rates.power

    low, high, step = -_STEP, _STEP, _STEP  # most mechanisms have about the noise that they claim
    while surplus(high) >= 0:
        low, high, step = high, high + step, 2 * step
        if high > _FARTHEST:
            return None
    step = _STEP
    while surplus(low) < 0:
        low, high, step = low - step, low, 2 * step
        if low < -_FARTHEST:
            return 0.0
    high = float(brentq(surplus, low, high, xtol=_PRECISION))
    while surplus(high) >= 0:
        high += _PRECISION
    return math.exp(high)


def family_threshold(members: Scores, others: Scores, events: Sequence[Event], miss: float, delta: float) -> float:
    """Return a threshold that promises much for the family bound, by these trials; see ``direct_threshold``.

    It is the one that needs the largest distance of two Gaussians, or one at a usual rate of false alarms: where rows
    are sampled, that distance alone would favour so few false alarms that chance decides.
    """
    candidates = _candidates(members, others)
    furthest = max(candidates, key=lambda threshold: Counts.of(members, others, threshold).rates(miss).mu)
    usual: list[float] = np.quantile(others, 1 - np.array(_USUAL), method="higher").tolist()

    def bound(threshold: float) -> float:
        return family_epsilon(events, Counts.of(members, others, threshold).rates(miss), delta)

    return max([furthest, *usual], key=bound)


def direct_threshold(members: Scores, others: Scores, miss: float, delta: float) -> float:
    """Return the threshold that promises most for the direct bound, by these trials.

    Use it on other trials: those that chose a threshold must not give the bound.
    """

    def bound(threshold: float) -> float:
        return direct_epsilon(Counts.of(members, others, threshold).rates(miss), delta)

    return max(_candidates(members, others), key=bound)


def _candidates(members: Scores, others: Scores) -> list[float]:
    """Return scores of all trials that are worth looking at as thresholds, more of them at both ends."""
    pooled = np.unique(np.concatenate([members, others]))
    ranks = np.concatenate(
        [np.linspace(0, 1, _THRESHOLDS), 1 - np.geomspace(1e-6, 0.1, 60), np.geomspace(1e-6, 0.1, 60)]
    )
    chosen: list[float] = pooled[np.unique((ranks * (len(pooled) - 1)).astype(int))].tolist()
    return chosen


@dataclass(frozen=True)
class Certified:
    """Hold the two lower bounds of one attack."""

    family: float
    direct: float


def certify(members: Scores, others: Scores, events: Sequence[Event], delta: float, miss: float) -> Certified:
    """Return the lower bounds that scores of trials with and without the record give, high for "in".

    A quarter of the trials chooses the thresholds, the others give the bounds.

    Args:
      members: scores of trials with the record, independent of each other.
      others: scores of trials without it.
      events: what is accounted for the record.
      delta: of the epsilons.
      miss: probability with which any of the bounds may be wrong.
    """
    first = members.size // CHOOSING, others.size // CHOOSING
    choosing = members[: first[0]], others[: first[1]]
    thresholds = (
        family_threshold(*choosing, events, miss / 4, delta),
        direct_threshold(*choosing, miss / 4, delta),
    )
    counted = [Counts.of(members[first[0] :], others[first[1] :], threshold) for threshold in thresholds]
    family, direct = (counts.rates(miss / 4) for counts in counted)
    return Certified(family_epsilon(events, family, delta), direct_epsilon(direct, delta))


def ceiling(events: Sequence[Event], trials: int, delta: float, miss: float) -> Certified:
    """Return what ``certify`` gives at most after so many trials on either side, if the sampler is the accounted one.

    Nobody can flag a record that no step drew: about so many hits are missing even where no noise is added. That
    fewer are missing, so that more is certified, has a chance of less than one in a million.

    Examples:
      >>> most = ceiling([(1.0, 1.0, 1)], 10_000, 1e-5, 0.01)
      >>> round(most.family, 1), round(most.direct, 1)
      (46.1, 7.1)
    """
    left = trials - trials // CHOOSING
    never = math.exp(math.fsum(count * math.log1p(-rate) for rate, _, count in events if rate < 1))
    never = 0.0 if any(rate == 1 and count for rate, _, count in events) else never
    lucky = left * (1 - never) + 5 * math.sqrt(left * never * (1 - never)) + 1
    best = Counts(min(left, math.floor(lucky)), 0, left, left).rates(miss / 4)
    return Certified(family_epsilon(events, best, delta), direct_epsilon(best, delta))


def expected(events: Sequence[Event], trials: int, delta: float, miss: float) -> float:
    """Return about what ``certify`` gives after so many trials, if the mechanism is what is accounted.

    Examples:
      >>> 4.0 < expected([(1.0, 1.0, 1)], 50_000, 1e-5, 0.01) < 4.3  # of 4.38
      True
    """
    left = trials - trials // CHOOSING

    def after(alarms: float) -> Rates:
        hits = largest_power(events, alarms, near=min(1.0, 2 * alarms))
        return Counts(math.floor(left * hits), math.ceil(left * alarms), left, left).rates(miss / 4)

    return family_epsilon(events, max(map(after, _ALARMS), key=lambda rates: rates.mu), delta)
