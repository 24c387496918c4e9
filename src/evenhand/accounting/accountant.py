"""The epsilon that a composition of subsampled Gaussian releases spends: near-exact, and never too small.

An event is ``(rate, noise, count)``: ``count`` releases with noise multiplier ``noise`` on Poisson samples of rate
``rate``; rate 1 is a plain Gaussian release. Both directions of add/remove are composed separately and the larger one
counts. Every number returned is an upper bound. Epsilon lies typically 0.01 to 0.02 % above the exact value at rates of
1e-4 and more; below, with deltas of 1e-9, up to a few per cent (measured: docs/proofs/accountant.md, section 9).
Deltas, ``mu`` and ``guess_rate`` may be looser there, never lower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any, get_args

import numpy as np

from evenhand._validate import any_delta, real, whole
from evenhand.accounting.gaussian_profile import Array, Direction, Relation, directions, excess, total_variation_gap
from evenhand.accounting.loss_distribution import (
    LARGEST_LOSS,
    TRUNCATION_SHARES,
    LossDistribution,
    choose_grid,
    invert_profile,
    release_excess,
)
from evenhand.accounting.noise_levels import NoiseLevels
from evenhand.errors import UsageError
from evenhand.types import Event

__all__ = ["Composition", "compose", "curve", "delta", "epsilon"]


def _check_count(count: object, position: int) -> int:
    if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < 0:
        raise UsageError(f"event {position}: count must be a whole number of releases >= 0, got {count!r}.")
    if int(count) > 10**15:
        raise UsageError(f"event {position}: more than 10^15 releases cannot be accounted for.")
    return int(count)


def check_events(events: Iterable[Event]) -> list[Event]:
    """Return the events as plain triples, or raise naming the first one that cannot be used.

    Example:
        >>> check_events([(0.1, 2, 3)])
        [(0.1, 2.0, 3)]
    """
    checked: list[Event] = []
    for position, event in enumerate(events):
        try:
            rate, noise, count = event
        except (TypeError, ValueError):
            raise UsageError(f"event {position} must be a triple (rate, noise, count), got {event!r}.") from None
        q, s = real(rate, f"event {position}: rate"), real(noise, f"event {position}: noise")
        if not 0 < q <= 1:
            raise UsageError(f"event {position}: rate must lie in (0, 1], got {q}; leave out what is never sampled.")
        if s < 0:
            raise UsageError(f"event {position}: noise must not be negative, got {s}.")
        checked.append((q, s, count if type(count) is int and 0 <= count < 10**15 else _check_count(count, position)))
    return checked


def merged_noise(grad_noise: float, query_noises: Sequence[float]) -> float:
    """Return the noise multiplier of one Gaussian that costs what a gradient and its side queries cost together.

    All of them read the same Poisson sample, so together they are one subsampled Gaussian in more dimensions.
    Accounting them as separate samples gives an epsilon that is too small.

    Example:
        >>> round(merged_noise(1.0, [2.0]), 4)
        0.8944
    """
    noises = [real(value, "noise") for value in (grad_noise, *query_noises)]
    if min(noises) < 0:
        raise UsageError(f"noise must not be negative, got {min(noises)}.")
    if min(noises) == 0:
        return 0.0
    least = min(noises)
    if not 1e-100 < least < 1e100:  # squares would leave the range of floats
        return least if math.isinf(least) else least / math.sqrt(math.fsum((least / value) ** 2 for value in noises))
    return float(math.fsum(value**-2 for value in noises) ** -0.5)


def dp_event(events: Iterable[Event]) -> Any:
    """Return the composition as a ``dp_accounting.DpEvent``, for cross-checks and other tools.

    Needs the extra ``dp-accounting``; nothing else in this package does.

    Raises:
        UsageError: if dp-accounting is not installed; says what to type.

    Example:
        >>> dp_event([(1.0, 2.0, 1)])  # doctest: +ELLIPSIS
        ComposedDpEvent(events=[SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=1)])
    """
    try:
        import dp_accounting as dpa
    except ImportError:
        raise UsageError(
            "Exporting events needs dp-accounting, which is not installed: pip install 'evenhand[dp-accounting]'."
        ) from None
    composed = []
    for rate, noise, count in check_events(events):
        release: Any = dpa.GaussianDpEvent(noise)
        if rate < 1:
            release = dpa.PoissonSampledDpEvent(rate, release)
        composed.append(dpa.SelfComposedDpEvent(release, count))
    return dpa.ComposedDpEvent(composed)


MOST_RECORDS = 10_000
"""Largest cap of the records of a person."""
_LEAST_NOISE = 1e-5  # below this a release counts as made without noise: epsilon would be reported as infinite anyway
FINE = 1e-4
"""Relative accuracy of an epsilon, unless another is asked for."""
_COARSE = 2e-3
_TINY = 1e-4  # rates below which rounding in the FFT may exceed the thin tail that decides epsilon
_CUTS = (1e-2, 0.1)  # shares of delta that cutting that tail off may then take
_ANCHORS = (0.3, 1e-2, 1e-4, 1e-7, 1e-10, 1e-13)
_REMEMBERED = 256
"""Events of a composition whose epsilon is remembered, at most: a plan, its runs and their pages ask for the same."""


def _check_relation(relation: Relation) -> Relation:
    if relation not in get_args(Relation):
        raise UsageError(f"relation must be one of {', '.join(get_args(Relation))}, got {relation!r}.")
    return relation


def _check_caps(cap: int | Sequence[int], events: int) -> tuple[int, ...]:
    """Return the cap of every event."""
    caps = tuple(cap) if isinstance(cap, Sequence) else (cap,) * max(1, events)
    if max(whole(each, "cap") for each in set(caps)) > MOST_RECORDS:
        raise UsageError(f"cap={max(caps)} is more records of a person than are accounted for: at most {MOST_RECORDS}.")
    return caps[:events]


class Composition:
    """Privacy profile of a composition: gives epsilon, delta, GDP mu and the best membership guess.

    With a ``cap`` the unit is a person with at most so many records, each of which is sampled by itself and moves a
    release by at most 1 / noise (docs/proofs/capped_persons.md); there may be one for each event.

    Guarantee: every answer is an upper bound on the exact one for all pairs of neighbouring datasets.

    Example:
        >>> spent = compose([(0.01, 1.0, 1000)])
        >>> 1.826 < spent.epsilon(1e-5) < 1.829
        True
    """

    def __init__(
        self,
        events: Sequence[Event],
        relation: Relation = "add_remove",
        *,
        rel: float = FINE,
        cap: int | Sequence[int] = 1,
    ) -> None:
        self.events = tuple(check_events(events))
        self.relation, self.caps = _check_relation(relation), _check_caps(cap, len(self.events))
        if relation != "add_remove" and any(each > 1 for each in self.caps):
            raise UsageError("With a cap persons are added or removed: replacing one by another has no proof here.")
        self._rel = rel
        self._unbounded = any(noise < _LEAST_NOISE for _, noise, count in self.events if count > 0)
        noisy = [(event, each) for event, each in zip(self.events, self.caps, strict=True) if event[1] >= _LEAST_NOISE]
        self._levels = NoiseLevels.of([event for event, _ in noisy], relation, [each for _, each in noisy])
        self._nothing = self._levels.rate.size == 0
        self._single = float(self._levels.count.sum()) == 1

    @property
    def _total_variation(self) -> float:
        """Return the sum of the releases' total variations, those of a person's records added up: bounds delta(0)."""
        levels = self._levels
        each = levels.rate * levels.cap * total_variation_gap(0.0, 1 / levels.noise, self.relation)
        return float((levels.count * each).sum()) * (1 + 1e-9)

    def _exact(self, eps: Array) -> Array:
        """Compute the profile of a single release from its closed form."""
        values = []
        for direction in directions(self.relation):
            level = float(self._levels.rate[0]), float(self._levels.noise[0])
            g, error = release_excess(eps, *level, direction, int(self._levels.cap[0]))
            values.append(g + error + np.maximum(0.0, -np.expm1(np.minimum(eps, 0.0))))
        worst = np.max(values, axis=0)
        return np.where(np.isfinite(worst), np.minimum(worst, 1.0), 1.0)

    def epsilon(self, delta: float, *, near: float | None = None) -> float:
        """Return the smallest certified epsilon; infinity if a release has no noise or epsilon exceeds a million.

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
            return invert_profile(self._exact, delta)
        if self._total_variation <= delta:
            return 0.0
        if len(self.events) <= _REMEMBERED:
            return _epsilon(self.events, self.relation, self._rel, self.caps, delta, near)
        return self._largest_epsilon(delta, near)

    def _largest_epsilon(self, delta: float, near: float | None) -> float:
        """Compute the larger epsilon of the directions."""
        pairs = directions(self.relation)
        largest = 0.0
        if self._rel >= _COARSE or near is None:
            coarse = {direction: self._direction_epsilon(direction, delta, near, _COARSE) for direction in pairs}
        else:
            largest = self._direction_epsilon(pairs[0], delta, near, self._rel)
            coarse = {direction: self._direction_epsilon(direction, delta, None, _COARSE) for direction in pairs[1:]}
        if self._rel >= _COARSE:
            return max(coarse.values())
        for direction in sorted(coarse, key=lambda d: -coarse[d]):
            # A coarse bound that is already below the larger direction needs no refinement.
            if coarse[direction] > largest:
                fine = self._direction_epsilon(direction, delta, coarse[direction], self._rel)
                largest = max(largest, min(fine, coarse[direction]))
        return largest

    def _direction_epsilon(self, direction: Direction, delta: float, loss: float | None, rel: float) -> float:
        """Compute epsilon of one direction, on a grid centred on ``loss`` if that is given.

        At tiny rates several places to cut off the loss's long thin tail are tried, and the least epsilon is returned.
        """
        best = self._recentred_epsilon(direction, delta, loss, rel, TRUNCATION_SHARES)
        cuts = _CUTS if rel <= self._rel and float(self._levels.rate.max()) < _TINY else ()
        return min([best, *(self._recentred_epsilon(direction, delta, loss, rel, (share,)) for share in cuts)])

    def _recentred_epsilon(
        self, direction: Direction, delta: float, loss: float | None, rel: float, shares: Sequence[float]
    ) -> float:
        """Compute epsilon of one direction; centre the grid again on the result while the centre was far from it."""
        best = math.inf
        for _ in range(8):
            grid = choose_grid(self._levels, direction, delta=delta, loss=loss, rel=rel, shares=shares)
            if grid.centre >= LARGEST_LOSS:
                return math.inf
            epsilon = LossDistribution(self._levels, direction, grid).epsilon(delta)
            best = min(best, epsilon)
            if math.isinf(epsilon):
                rel, loss = rel / 4, grid.top
            elif abs(epsilon - grid.centre) <= 0.03 * grid.centre or epsilon == 0:
                break
            else:
                loss = epsilon
        return best

    def delta(self, epsilon: float) -> float:
        """Return the smallest delta certified for this epsilon (>= 0)."""
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
            # A distribution made for the larger direction's delta is enough to show that the other one is smaller.
            grid = choose_grid(self._levels, direction, delta=worst or None, loss=None if worst else eps, rel=_COARSE)
            value = float(LossDistribution(self._levels, direction, grid).delta(where)[0])
            for _ in range(4 if value > worst else 0):
                grid = choose_grid(self._levels, direction, delta=max(value, 1e-300), loss=eps, rel=self._rel)
                before, value = (
                    value,
                    min(value, float(LossDistribution(self._levels, direction, grid).delta(where)[0])),
                )
                if value > 0.98 * before:
                    break
            worst = max(worst, value)
        return min(worst, self._total_variation)

    @cached_property
    def _distributions(self) -> dict[Direction, list[LossDistribution]]:
        """Compute distributions centred on a ladder of deltas; together they cover the profile down to 1e-13."""
        levels = self._levels
        return {
            direction: [LossDistribution(levels, direction, choose_grid(levels, direction, delta=d)) for d in _ANCHORS]
            for direction in directions(self.relation)
        }

    def profile(self, epsilons: Sequence[float] | Array) -> Array:
        """Return the certified delta at every epsilon (>= 0), in one go.

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
        by_direction = [np.min([each.delta(eps) for each in some], axis=0) for some in self._distributions.values()]
        return np.asarray(np.max(by_direction, axis=0))

    def mu(self, delta: float) -> float:
        """Return the smallest certified mu whose Gaussian profile covers this one wherever delta(epsilon) >= ``delta``.

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
            if high > LARGEST_LOSS:
                return math.inf
        for _ in range(44):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if covers(middle) else (middle, high)
        return high

    def guess_rate(self, false_alarms: float = 0.01) -> float:
        """Return the largest share of members that a membership guess can flag at this rate of false alarms.

        Args:
            false_alarms: share of non-members that the guess flags too.

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


@lru_cache(maxsize=512)
def _epsilon(
    events: tuple[Event, ...], relation: Relation, rel: float, cap: tuple[int, ...], delta: float, near: float | None
) -> float:
    """Return the epsilon of checked events: it depends on nothing but the arguments, so each is computed once."""
    return Composition(events, relation, rel=rel, cap=cap)._largest_epsilon(delta, near)


def compose(events: Sequence[Event], *, relation: Relation = "add_remove", cap: int | Sequence[int] = 1) -> Composition:
    """Compose events into one privacy profile.

    Example:
        >>> compose([]).epsilon(1e-5)
        0.0
    """
    return Composition(events, relation, cap=cap)


def epsilon(
    events: Sequence[Event], delta: float, *, relation: Relation = "add_remove", cap: int | Sequence[int] = 1
) -> float:
    """Compute the epsilon of the events at ``delta``: an upper bound, typically 0.01 to 0.02 % above the exact value.

    At rates below 1e-4 it may lie a few per cent above it, never below (docs/proofs/accountant.md, section 9).

    Args:
        events: (rate, noise, count) triples; rate in (0, 1], noise >= 0, count >= 0.
        delta: strictly between 0 and 1; do not rely on values below 1e-12.
        relation: neighbouring datasets differ by one record added or removed, or by one record replaced.
        cap: above 1, they differ by one person with at most so many records, each of which is sampled by itself; or
            one number for each of the events.

    Example:
        >>> 1.826 < epsilon([(0.01, 1.0, 1000)], 1e-5) < 1.829
        True
        >>> 6.3 < epsilon([(0.01, 2.0, 1000)], 1e-5, cap=8) < 6.5
        True
    """
    return Composition(events, relation, cap=cap).epsilon(delta)


def delta(events: Sequence[Event], epsilon: float, *, relation: Relation = "add_remove") -> float:
    """Compute the delta of the events at ``epsilon``: an upper bound.

    Example:
        >>> round(delta([(1.0, 1.0, 1)], 1.0), 4)
        0.1269
    """
    return Composition(events, relation).delta(epsilon)


def curve(events_in_order: Sequence[Event], delta: float, points: int = 64, *, cap: int = 1) -> list[tuple[int, float]]:
    """Compute (releases, epsilon spent by then) at up to ``points`` places of a schedule, to show a running spend.

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
        rel = FINE if place == total else _COARSE
        spent.append(Composition(prefix, rel=rel, cap=cap).epsilon(delta))
    # The exact spend never falls, so a later bound also covers every earlier place.
    for i in range(len(spent) - 2, -1, -1):
        spent[i] = min(spent[i], spent[i + 1])
    return list(zip(places, spent, strict=True))
