"""Bound epsilon from below by one run: of secret coins, some are guessed at, and so many guesses are right.

Canaries are put into the training data by fair coins that nobody sees, and an attacker who sees what the run releases
guesses at the coins. How many guesses can be right, if a promise holds, has two bounds:

* Steinke, Nasr and Jagielski (2023): for (epsilon, delta) and nothing else about the mechanism;
* Mahloujifar, Melis and Chaudhuri (2024): for a whole trade-off curve, which is tighter where the curve is known.

Neither assumes that the coins' scores are independent: canaries may disturb each other as much as they like. Both hold
for a number of guesses that was fixed before any score was seen; which coins are guessed at may depend on all scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom, norm

from evenhand.accounting.accountant import Composition
from evenhand.types import Event

Vector = NDArray[np.float64]

_LINES = 400
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Shares of the coins of which one is chosen to be guessed at, before the run."""
_USUAL = 0.2
"""The share where no choice promises to show anything."""
_FURTHEST = 7 * math.log(2)
"""Up to this factor more or less noise (its logarithm), the curve that the guesses contradict is searched."""


@dataclass(frozen=True)
class TradeOff:
    """A bound on every test of "in" against "out" by (epsilon, delta) pairs that hold for both directions.

    No event that has probability x under one hypothesis has more than ``most(x)`` under the other.
    """

    epsilons: Vector
    deltas: Vector

    def most(self, probability: float) -> float:
        """Return the largest probability of an event under one hypothesis that has this one under the other.

        Examples:
          >>> TradeOff.of_pair(math.log(3), 0.0).most(0.25)
          0.75
        """
        growth = np.exp(self.epsilons)
        above = float((growth * probability + self.deltas).min())
        below = float((1 - (1 - self.deltas - probability) / growth).min())
        return min(1.0, above, below)

    def least(self, probability: float) -> float:
        """Return the smallest probability of an event under one hypothesis that has this one under the other.

        Examples:
          >>> round(TradeOff.of_pair(math.log(3), 0.0).least(0.75), 12)
          0.25
        """
        growth = self._growth
        below = float(((probability - self.deltas) / growth).max())
        above = float((1 - self.deltas - growth * (1 - probability)).max())
        return max(0.0, below, above)

    @cached_property
    def _growth(self) -> Vector:
        return np.exp(self.epsilons)

    @classmethod
    def of_pair(cls, epsilon: float, delta: float) -> TradeOff:
        """Return the curve of a promise of which one pair is all that is known."""
        return cls(np.array([epsilon]), np.array([delta]))


@dataclass(frozen=True)
class Family:
    """The mechanisms that differ from a plan's own by a factor of the noise: within them a lower bound is searched.

    ``events`` are what a record of one owner class is exposed to. A factor above 1 is a more private mechanism.

    Examples:
      >>> family = Family(((1.0, 1.0, 1),), 1e-5)
      >>> round(family.epsilon(1.0), 2), round(family.epsilon(2.0), 2)
      (4.38, 1.99)
    """

    events: tuple[Event, ...]
    delta: float

    def epsilon(self, factor: float) -> float:
        """Return the epsilon of the mechanism with so many times the noise, at the family's delta."""
        return _composed(self.events, factor).epsilon(self.delta)

    def tradeoff(self, factor: float) -> TradeOff:
        """Return the curve of the mechanism with so many times the noise: each pair holds, so that their set does."""
        return _tradeoff(self.events, factor)


def _composed(events: tuple[Event, ...], factor: float) -> Composition:
    """Return the composition of releases with so many times the noise; without sampling it is a single one."""
    events = tuple((rate, noise * factor, count) for rate, noise, count in events)
    if all(rate == 1 for rate, _, _ in events):
        events = ((1.0, sum(count / noise**2 for _, noise, count in events) ** -0.5, 1),)
    return Composition(events)


@lru_cache(maxsize=512)
def _tradeoff(events: tuple[Event, ...], factor: float) -> TradeOff:
    """Compute the curve of a composition; several searches in one family look at the same factors."""
    composed = _composed(events, factor)
    largest = min(composed.epsilon(1e-12), 500.0)
    epsilons = largest * np.linspace(0.0, 1.0, _LINES) ** 1.5
    return TradeOff(epsilons, composed.profile(epsilons))


def contradicts(curve: TradeOff, coins: int, guesses: int, correct: int, miss: float) -> bool:
    """Return whether so many correct guesses have a probability of at most ``miss`` if the trade-off curve holds.

    The recursion of Mahloujifar et al. (2024), theorem 9, for coins with two sides. With p_j the probability of exactly
    j correct guesses, r_i sums ``j p_j / coins`` over j >= i, and h_i sums ``(guesses - j) p_j / coins``. Flipping one
    coin turns j correct guesses into j - 1, so that ``r_i <= most(h_(i-1))``: a lot of correct guesses need a lot of
    slightly fewer ones, and so on, until there is more probability than there is.

    Args:
      curve: of what is to be contradicted.
      coins: how many were tossed.
      guesses: how many of them were guessed at, fixed beforehand.
      correct: how many guesses were right.
      miss: the probability to contradict a curve that holds.

    Examples:
      >>> sure = TradeOff.of_pair(0.0, 0.0)
      >>> contradicts(sure, 100, 100, 75, 0.01), contradicts(sure, 100, 100, 55, 0.01)
      (True, False)
    """
    right, wrong, whole = miss * correct / coins, miss * (guesses - correct) / coins, guesses / coins
    for number in range(correct - 1, -1, -1):
        least = max(wrong, curve.least(right))
        if least == wrong:
            break
        right, wrong = right + number / (guesses - number) * (least - wrong), least
        if right + wrong > whole:
            return True
    return right + wrong > whole


def p_value(coins: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many correct guesses under (epsilon, delta), by Steinke et al. (2023).

    Args:
      coins: how many were tossed.
      guesses: how many of them were guessed at.
      correct: how many guesses were right, or more.
      epsilon: of the promise.
      delta: of the promise.

    Examples:
      >>> round(p_value(10, 10, 10, math.log(3), 0.0), 6) == round(0.75**10, 6)
      True
    """
    chance = 1 / (1 + math.exp(-epsilon))
    beyond = float(binom.sf(correct - 1, guesses, chance))
    if delta == 0 or correct == 0:
        return beyond
    fewer = np.arange(1, correct + 1)
    near = binom.sf(correct - fewer - 1, guesses, chance) - beyond
    return min(1.0, beyond + 2 * coins * delta * max(0.0, float((near / fewer).max())))


def largest_contradicted_epsilon(coins: int, guesses: int, correct: int, delta: float, miss: float) -> float:
    """Return the largest epsilon that so many correct guesses contradict, whatever the mechanism; 0 if none.

    Examples:
      >>> round(largest_contradicted_epsilon(1000, 200, 200, 1e-5, 0.05), 1)
      4.2
      >>> largest_contradicted_epsilon(1000, 200, 100, 1e-5, 0.05)
      0.0
    """

    def contradicted(epsilon: float) -> bool:
        return p_value(coins, guesses, correct, epsilon, delta) <= miss

    return _last(contradicted, 0.0, 40.0)


def family_bound(family: Family, coins: int, guesses: int, correct: int, miss: float) -> float:
    """Return the epsilon of the least noisy member of a family that so many correct guesses contradict; 0 if none.

    Guarantee:
      If the mechanism is a member of the family, the result exceeds its epsilon with probability at most ``miss``.

    Examples:
      >>> family = Family(((1.0, 1.0, 1),), 1e-5)
      >>> 1.9 < family_bound(family, 1000, 150, 125, 0.05) < 3.0, family_bound(family, 1000, 150, 75, 0.05)
      (True, 0.0)
    """
    if 2 * correct <= guesses:
        return 0.0

    def contradicted(privacy: float) -> bool:
        return contradicts(family.tradeoff(math.exp(-privacy)), coins, guesses, correct, miss)

    low, high = 0.0, 0.0
    while high < _FURTHEST and contradicted(high):  # outwards from the plan's own noise: curves far from it take long
        low, high = high, high + math.log(2)
    while low > -_FURTHEST and not contradicted(low):
        low, high = low - math.log(2), low
    return family.epsilon(math.exp(-_last(contradicted, low, high))) if contradicted(low) else 0.0


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the last point at which a condition holds that fails from some point on; ``low`` if it never does."""
    if not holds(low):
        return low
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def choose_guesses(coins: int, mu: float, miss: float) -> int:
    """Return how many of the coins to guess at, for the best bound if scores were Gaussian with a distance of ``mu``.

    It depends on what is promised and on the number of coins, not on any score.

    Args:
      coins: how many are tossed.
      mu: distance between the scores of "in" and "out" in standard deviations, if the attack is as good as it can be.
      miss: of the bound.

    Examples:
      >>> choose_guesses(1000, 1.0, 0.05)
      150
    """
    family = Family(((1.0, 1.0, 1),), 1e-5)

    def bound(guesses: int) -> float:
        share = guesses / coins / 2
        ends = np.linspace(-10.0, 10.0 + mu, 20_001)
        flagged = (ndtr(-ends) + ndtr(mu - ends)) / 2
        right = float(np.interp(-share, -flagged, ndtr(mu - ends)) / 2 / share)
        usual = guesses * right - math.sqrt(guesses * right * (1 - right))
        return family_bound(family, coins, guesses, math.floor(usual), miss)

    counts = sorted({max(1, round(share * coins)) for share in _SHARES})
    return max(counts, key=lambda guesses: (bound(guesses), -abs(guesses - _USUAL * coins)))


def gaussian_distance(epsilon: float | None, delta: float) -> float:
    """Return the mu of the Gaussian mechanism with this epsilon; 3 where nothing is promised.

    Examples:
      >>> round(gaussian_distance(4.38, 1e-5), 2), gaussian_distance(None, 1e-5)
      (1.0, 3.0)
    """
    if epsilon is None:
        return 3.0

    def spends_less(log_mu: float) -> bool:
        mu = math.exp(log_mu)
        excess = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return bool(excess <= delta)

    return math.exp(_last(spends_less, -6.0, 3.0))


@dataclass(frozen=True)
class Guesses:
    """Guesses at coins: which are said to be in, which out, by number; the others are not guessed at."""

    present: NDArray[np.int64]
    absent: NDArray[np.int64]

    @classmethod
    def by_score(cls, scores: Vector, count: int) -> Guesses:
        """Return guesses that the coins with the highest scores are in and those with the lowest out, half of each.

        Examples:
          >>> guesses = Guesses.by_score(np.array([0.1, 5.0, -3.0, 0.0]), 2)
          >>> guesses.present.tolist(), guesses.absent.tolist()
          ([1], [2])
        """
        order = np.argsort(np.nan_to_num(scores, nan=float(np.nanmedian(scores))), kind="stable")
        return cls(order[len(order) - (count - count // 2) :], order[: count // 2])

    def correct(self, coins: NDArray[np.bool_]) -> int:
        """Return how many of the guesses are right."""
        return int(coins[self.present].sum() + (~coins[self.absent]).sum())
