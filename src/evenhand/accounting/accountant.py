"""Privacy spent by a composition of subsampled Gaussian releases: near-exact, and never too small.

An event is ``(rate, noise, count)``: ``count`` releases with noise multiplier ``noise`` on Poisson samples of rate
``rate``; rate 1 is a plain Gaussian release. Both directions of add/remove are composed separately and the larger one
counts. Every number returned is an upper bound. Epsilon lies typically 0.01 to 0.02 % above the exact value at rates of
1e-4 and more; below, with deltas of 1e-9, up to a few per cent (measured: docs/proofs/accountant.md, section 9).
Deltas, ``mu`` and ``guess_rate`` may be looser there, never lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import get_args

import numpy as np

from evenhand._validate import any_delta, real
from evenhand.accounting.events import check_events, merged
from evenhand.accounting.gaussian_profile import Array, Direction, Relation, directions, excess, total_variation_gap
from evenhand.accounting.loss_distribution import HUGE, NEGLIGIBLE, Table, invert, plan
from evenhand.accounting.noise_levels import Levels
from evenhand.errors import UsageError
from evenhand.types import Event

__all__ = ["Composition", "compose", "curve", "delta", "epsilon", "merged"]

_LEAST_NOISE = 1e-5  # below this a release counts as made without noise: epsilon would be reported as infinite anyway
_FINE = 1e-4
_COARSE = 2e-3
_TINY = 1e-4  # rates below which rounding in the FFT may exceed the thin tail that decides epsilon
_CUTS = (1e-2, 0.1)  # shares of delta that cutting that tail off may then take
_ANCHORS = (0.3, 1e-2, 1e-4, 1e-7, 1e-10, 1e-13)


def _check_relation(relation: Relation) -> Relation:
    if relation not in get_args(Relation):
        raise UsageError(f"relation must be one of {', '.join(get_args(Relation))}, got {relation!r}.")
    return relation


class Composition:
    """The privacy profile of a composition: ask it for epsilon, delta, GDP mu or the best membership guess.

    Guarantee: every answer is an upper bound on the exact one for all pairs of neighbouring datasets.

    Example:
        >>> spent = compose([(0.01, 1.0, 1000)])
        >>> 1.826 < spent.epsilon(1e-5) < 1.829
        True
    """

    def __init__(self, events: Sequence[Event], relation: Relation = "add_remove", *, rel: float = _FINE) -> None:
        self.events = tuple(check_events(events))
        self.relation = _check_relation(relation)
        self._rel = rel
        released = [event for event in self.events if event[2] > 0]
        self._unbounded = any(noise < _LEAST_NOISE for _, noise, _ in released)
        self._levels = Levels.of([event for event in released if event[1] >= _LEAST_NOISE], relation)
        self._nothing = self._levels.rate.size == 0
        self._single = float(self._levels.count.sum()) == 1

    @property
    def _total_variation(self) -> float:
        """Sum of the releases' total variations: a bound on delta(0)."""
        levels = self._levels
        each = levels.rate * total_variation_gap(0.0, 1 / levels.noise, self.relation)
        return float((levels.count * each).sum()) * (1 + 1e-9)

    def _exact(self, eps: Array) -> Array:
        """Profile of a single release, from its closed form."""
        values = []
        for direction in directions(self.relation):
            g, error = excess(eps, float(self._levels.rate[0]), float(self._levels.noise[0]), direction)
            values.append(g + error + np.maximum(0.0, -np.expm1(np.minimum(eps, 0.0))))
        worst = np.max(values, axis=0)
        return np.where(np.isfinite(worst), np.minimum(worst, 1.0), 1.0)

    def epsilon(self, delta: float, *, near: float | None = None) -> float:
        """Smallest certified epsilon; infinity if a release has no noise or epsilon exceeds a million.

        Args:
            delta: strictly between 0 and 1; do not rely on values below 1e-12.
            near: about where the answer lies, if known; only saves time.
        """
        delta = any_delta(delta)
        if self._unbounded:
            return math.inf
        if self._nothing:
            return 0.0
        if self._single:
            return invert(self._exact, delta)
        if self._total_variation <= delta:
            return 0.0
        done = 0.0
        if self._rel >= _COARSE or near is None:
            found = {direction: self._solve(direction, delta, near, _COARSE) for direction in directions(self.relation)}
        else:
            first, *others = directions(self.relation)
            done = self._solve(first, delta, near, self._rel)
            found = {direction: self._solve(direction, delta, None, _COARSE) for direction in others}
        if self._rel >= _COARSE:
            return max(found.values())
        for direction in sorted(found, key=lambda d: -found[d]):
            # A coarse bound that is already below the larger direction needs no refinement.
            if found[direction] > done:
                done = max(done, min(self._solve(direction, delta, found[direction], self._rel), found[direction]))
        return done

    def _solve(self, direction: Direction, delta: float, loss: float | None, rel: float) -> float:
        """Epsilon of one direction; at tiny rates the best of several places to cut off the loss's long thin tail."""
        best = self._search(direction, delta, loss, rel, NEGLIGIBLE)
        cuts = _CUTS if rel <= self._rel and float(self._levels.rate.max()) < _TINY else ()
        return min([best, *(self._search(direction, delta, loss, rel, (share,)) for share in cuts)])

    def _search(
        self, direction: Direction, delta: float, loss: float | None, rel: float, shares: Sequence[float]
    ) -> float:
        """Epsilon of one direction; centres again on what it found when the first guess was off."""
        best = math.inf
        for _ in range(8):
            grid = plan(self._levels, direction, delta=delta, loss=loss, rel=rel, shares=shares)
            if grid.centre >= HUGE:
                return math.inf
            found = Table(self._levels, direction, grid).epsilon(delta)
            best = min(best, found)
            if math.isinf(found):
                rel, loss = rel / 4, grid.top
            elif abs(found - grid.centre) <= 0.03 * grid.centre or found == 0:
                break
            else:
                loss = found
        return best

    def delta(self, epsilon: float) -> float:
        """Smallest delta certified for this epsilon (>= 0)."""
        eps = real(epsilon, "epsilon")
        if eps < 0:
            raise UsageError(f"epsilon must not be negative, got {eps}.")
        if self._unbounded:
            return 1.0
        if self._nothing:
            return 0.0
        where = np.array([eps])
        if self._single:
            return min(1.0, float(self._exact(where)[0]))
        worst = 0.0
        for direction in directions(self.relation):
            # A table made for the larger direction's delta is enough to show that the other one is smaller.
            grid = plan(self._levels, direction, delta=worst or None, loss=None if worst else eps, rel=_COARSE)
            value = float(Table(self._levels, direction, grid).delta(where)[0])
            for _ in range(4 if value > worst else 0):
                grid = plan(self._levels, direction, delta=max(value, 1e-300), loss=eps, rel=self._rel)
                before, value = value, min(value, float(Table(self._levels, direction, grid).delta(where)[0]))
                if value > 0.98 * before:
                    break
            worst = max(worst, value)
        return min(worst, self._total_variation)

    @cached_property
    def _tables(self) -> dict[Direction, list[Table]]:
        """Tables centred on a ladder of deltas; together they cover the profile down to 1e-13."""
        return {
            direction: [Table(self._levels, direction, plan(self._levels, direction, delta=d)) for d in _ANCHORS]
            for direction in directions(self.relation)
        }

    def profile(self, epsilons: Sequence[float] | Array) -> Array:
        """Certified delta at every epsilon (>= 0), in one go.

        Example:
            >>> compose([(1.0, 1.0, 1)]).profile([0.0, 1.0]).round(4).tolist()
            [0.3829, 0.1269]
        """
        eps = np.asarray(epsilons, dtype=float)
        if eps.size and not np.all(eps >= 0):
            raise UsageError("epsilons must not be negative or NaN.")
        if self._unbounded:
            return np.ones_like(eps)
        if self._nothing:
            return np.zeros_like(eps)
        if self._single:
            return self._exact(eps)
        sides = [np.min([table.delta(eps) for table in tables], axis=0) for tables in self._tables.values()]
        return np.asarray(np.max(sides, axis=0))

    def mu(self, delta: float) -> float:
        """Smallest certified mu whose Gaussian profile covers this one wherever delta(epsilon) >= ``delta``.

        Exactly: for every epsilon in [0, epsilon(delta)] the profile of this composition is at most that of one
        Gaussian release with noise 1/mu (a delta above 1 - 1e-12 counts as that). Nothing is claimed below.

        Example:
            >>> round(compose([(1.0, 2.0, 4)]).mu(1e-5), 2)
            1.0
        """
        end = self.epsilon(delta)
        if math.isinf(end) or self._nothing:
            return end
        knots = end * np.linspace(0.0, 1.0, 4097) ** 2
        needed, where = np.minimum(self.profile(knots[:-1]), 1 - 1e-12), knots[1:]
        low, high = 1e-9, 1.0

        def covers(mu: float) -> bool:
            g, error = excess(where, 1.0, 1 / mu, "remove")
            return bool(np.all(g - error >= needed))

        while not covers(high):
            low, high = high, 2 * high
            if high > HUGE:
                return math.inf
        for _ in range(44):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if covers(middle) else (middle, high)
        return high

    def guess_rate(self, false_alarms: float = 0.01) -> float:
        """Largest share of members that any membership guess can flag while flagging ``false_alarms`` of non-members.

        Example:
            >>> round(compose([(1.0, 1.0, 1)]).guess_rate(0.01), 2)
            0.09
        """
        rate = real(false_alarms, "false_alarms")
        if not 0 <= rate <= 1:
            raise UsageError(f"false_alarms must lie in [0, 1], got {rate}.")
        if self._unbounded:
            return 1.0
        eps = np.concatenate([np.linspace(0, 4, 257), np.geomspace(4, 700, 256)])
        delta = self.profile(eps)
        bounds = np.minimum(np.exp(eps) * rate + delta, 1 - np.exp(-eps) * (1 - delta - rate))
        return float(np.clip(bounds.min(), 0.0, 1.0))


def compose(events: Sequence[Event], *, relation: Relation = "add_remove") -> Composition:
    """Compose events into one privacy profile.

    Example:
        >>> compose([]).epsilon(1e-5)
        0.0
    """
    return Composition(events, relation)


def epsilon(events: Sequence[Event], delta: float, *, relation: Relation = "add_remove") -> float:
    """Epsilon spent by the events at ``delta``: an upper bound, typically 0.01 to 0.02 % above the exact value.

    At rates below 1e-4 it may lie a few per cent above it, never below (docs/proofs/accountant.md, section 9).

    Args:
        events: (rate, noise, count) triples; rate in (0, 1], noise >= 0, count >= 0.
        delta: strictly between 0 and 1; do not rely on values below 1e-12.
        relation: neighbouring datasets differ by one record added or removed, or by one record replaced.

    Example:
        >>> 1.826 < epsilon([(0.01, 1.0, 1000)], 1e-5) < 1.829
        True
    """
    return Composition(events, relation).epsilon(delta)


def delta(events: Sequence[Event], epsilon: float, *, relation: Relation = "add_remove") -> float:
    """Delta of the events at ``epsilon``: an upper bound.

    Example:
        >>> round(delta([(1.0, 1.0, 1)], 1.0), 4)
        0.1269
    """
    return Composition(events, relation).delta(epsilon)


def curve(events_in_order: Sequence[Event], delta: float, points: int = 64) -> list[tuple[int, float]]:
    """Epsilon spent after so many releases of a schedule, at up to ``points`` places, for showing a running spend.

    Guarantee: non-decreasing, and each value is an upper bound for every number of releases up to its own; between two
    places take the upper one. The last equals ``epsilon`` of the whole. Above 40 distinct levels at most 24 places.

    Example:
        >>> steps, spent = curve([(0.01, 2.0, 60), (0.01, 1.0, 40)], 1e-5, points=4)[-1]
        >>> steps, spent == epsilon([(0.01, 2.0, 60), (0.01, 1.0, 40)], 1e-5)
        (100, True)
    """
    events = check_events(events_in_order)
    if isinstance(points, bool) or points < 1:
        raise UsageError(f"points must be a whole number >= 1, got {points!r}.")
    total = sum(count for _, _, count in events)
    points = min(points, 24) if len({event[:2] for event in events}) > 40 else points
    places = sorted({math.ceil(total * (i / points) ** 2) for i in range(1, points + 1)} - {0})
    spent: list[float] = []
    for place in places:
        left, prefix = place, []
        for rate, noise, count in events:
            prefix.append((rate, noise, min(count, left)))
            left -= prefix[-1][2]
            if left == 0:
                break
        rel = _FINE if place == total else _COARSE
        spent.append(Composition(prefix, rel=rel).epsilon(delta))
    # The exact spend never falls, so a later bound also covers every earlier place.
    for i in range(len(spent) - 2, -1, -1):
        spent[i] = min(spent[i], spent[i + 1])
    return list(zip(places, spent, strict=True))
