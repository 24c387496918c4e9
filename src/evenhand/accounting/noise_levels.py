"""Distinct (rate, noise) levels of a composition, and their reduction to few knots when there are many.

A profile is convex in the total variation ``u`` of its noise level and in its rate, so a level between knots is
dominated by the mixture of those knots that is matched in ``u`` (and linearly in the rate).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenhand.accounting.gaussian_profile import Array, Direction, Relation, total_variation_gap
from evenhand.accounting.renyi import LogMoments, log_moments
from evenhand.types import Event

Counts: TypeAlias = NDArray[np.int64]
Knot: TypeAlias = tuple[float, float, int]
"""(rate, noise, cap) of a release."""

_EXACT = 40  # levels that are composed one by one
_FINE = 128  # candidate knots along the noise axis
_KNOTS = 96  # at most, per rate
_RATES = 12
_ROUNDED_RATES, _ROUNDED_NOISES = 4, 96  # distinct values to which many levels with a cap are rounded
_ROUNDING = 1e-11  # added to weights on the dearer knot; far above the rounding error of a weight


@dataclass(frozen=True)
class MixtureCell:
    """Releases that mix the same knots.

    ``corners`` are positions of knots; row ``i`` of ``weights`` mixes them for ``counts[i]`` releases.
    """

    corners: tuple[int, ...]
    weights: Array
    counts: Array


class _MixingLimit(NamedTuple):
    """Limit on how much mixing may raise epsilon (``cost``), at order ``tilt``, with the loss cut off at ``reach``."""

    tilt: float
    cost: float
    reach: float


@dataclass(frozen=True)
class NoiseLevels:
    """Distinct (rate, noise) levels and their counts, sorted; releases without sampling are merged into one, exactly.

    ``cap`` has one number for each level: above 1 each of up to so many records of a person is sampled by itself, see
    ``capped_profile.py``. Of releases without sampling the noise is that for all of them together, and the number is 1.

    Example:
        >>> NoiseLevels.of([(1.0, 3.0, 9), (0.1, 2.0, 5), (0.1, 2.0, 5)], "add_remove").noise.round(6).tolist()
        [2.0, 1.0]
    """

    rate: Array
    noise: Array
    count: Array
    relation: Relation
    cap: Counts

    @classmethod
    def of(cls, events: Sequence[Event], relation: Relation, cap: int | Sequence[int] = 1) -> NoiseLevels:
        """Merge equal levels of the events; drop those that release nothing. There may be a cap for each event.

        Many levels with a cap are rounded here, so that grids are chosen for the levels that are composed.
        """
        merged: dict[tuple[float, float, int], float] = {}
        precisions: list[float] = []
        for (q, s, n), most in zip(events, repeat(cap) if isinstance(cap, int) else cap, strict=False):
            if n == 0 or math.isinf(s):
                continue
            if q == 1.0:
                precisions.append(n * most * most / (s * s))
            else:
                merged[q, s, most] = merged.get((q, s, most), 0.0) + n
        if math.fsum(precisions) > 0:
            merged[1.0, math.fsum(precisions) ** -0.5 * (1 - 1e-15), 1] = 1.0  # rounded towards more loss
        keys = sorted(merged)
        levels = cls(
            np.array([q for q, _, _ in keys]),
            np.array([s for _, s, _ in keys]),
            np.array([merged[key] for key in keys]),
            relation,
            np.array([most for _, _, most in keys], dtype=np.int64),
        )
        return levels._rounded() if levels.largest_cap > 1 and len(keys) > _ROUNDED_NOISES else levels

    @property
    def largest_cap(self) -> int:
        """Return the largest cap of all levels."""
        return int(self.cap.max(initial=1))

    def events(self) -> list[tuple[float, float, float]]:
        """Return the levels as plain triples (rate, noise, count)."""
        return list(zip(self.rate.tolist(), self.noise.tolist(), self.count.tolist(), strict=True))

    @cached_property
    def _planning_sample(self) -> list[tuple[float, float, float, int]]:
        """Return at most a few dozen levels that cost a little more, each with its cap, to choose grids with.

        A sample that costs less would end the window of a grid too low, and then no epsilon is found.
        """
        columns = self.rate, self.noise, self.count, self.cap
        if self.rate.size <= 24:
            return list(zip(*map(np.ndarray.tolist, columns), strict=True))
        sampled = self.rate < 1
        log_q, log_s = np.log(self.rate[sampled]), np.log(self.noise[sampled])
        wide_q, wide_s = max(0.1, float(np.ptp(log_q)) / 4), max(0.02, float(np.ptp(log_s)) / 12)
        keys = np.stack([np.floor((log_q.max() - log_q) / wide_q), np.floor((log_s - log_s.min()) / wide_s)])
        bins, index = np.unique(keys, axis=1, return_inverse=True)
        q, s = np.exp(log_q.max() - bins[0] * wide_q), np.exp(log_s.min() + bins[1] * wide_s)
        n = np.bincount(index.ravel(), weights=self.count[sampled])
        rest = zip(*(column[~sampled].tolist() for column in columns), strict=True)
        return [*zip(q.tolist(), s.tolist(), n.tolist(), [self.largest_cap] * q.size, strict=True), *rest]

    def moments(self, orders: Array, direction: Direction, reach: float) -> Array:
        """Return rows ``K``, ``K'``, ``K''`` of the composed, truncated loss at every order; see ``log_moments``.

        Approximate: only for choosing grids.
        """
        total = np.zeros((3, orders.size))
        for q, s, n, cap in self._planning_sample:
            total += n * np.array(_log_moments(q, s, cap, orders, direction, reach))
        return total

    def reduce(self, tilt: float, cost: float, reach: float) -> tuple[list[Knot], list[MixtureCell]]:
        """Choose knots (rate, noise, cap) that stand for all levels, and the cells that mix them.

        Few levels are knots themselves, each with a cell of its own.

        Args:
            tilt: order at which the cost of mixing is judged.
            cost: by how much mixing may raise epsilon, about.
            reach: where the loss is truncated, in deviations of the noise.
        """
        if self.largest_cap > 1 or self.rate.size <= _EXACT:
            return self._one_by_one()
        rates = np.unique(self.rate)
        if rates.size > _RATES:
            sampled = rates[rates < 1]
            grid = np.geomspace(sampled[0], sampled[-1], 2 * _RATES)
            grid[[0, -1]] = sampled[0], sampled[-1]
            rates = np.append(grid, rates[rates == 1])
        place: dict[tuple[float, float], int] = {}
        cells: list[MixtureCell] = []
        upper = np.searchsorted(rates, self.rate)
        for column in np.unique(upper):
            rows = np.flatnonzero(upper == column)
            high = float(rates[column])
            low = float(rates[column - 1]) if np.any(self.rate[rows] < high) else high
            part = np.ones(rows.size)
            if low < high:
                part = np.minimum((self.rate[rows] - low) / (high - low) + _ROUNDING, 1.0)
            cells += self._cells_between_rates(rows, low, high, part, place, _MixingLimit(tilt, cost, reach))
        return [(q, s, 1) for q, s in place], cells

    def _one_by_one(self) -> tuple[list[Knot], list[MixtureCell]]:
        """Return all levels as knots, each with a cell of its own."""
        knots = list(zip(self.rate.tolist(), self.noise.tolist(), self.cap.tolist(), strict=True))
        return knots, [MixtureCell((i,), np.ones((1, 1)), self.count[i : i + 1]) for i in range(len(knots))]

    def _rounded(self) -> NoiseLevels:
        """Return fewer levels, each with less noise, a larger rate and a larger cap than those that it stands for.

        A profile grows with rate, distance and cap. With a cap its convexity, by which levels are mixed, is not proved.
        """
        sampled = self.rate < 1
        rate, distance = self.rate.copy(), 1 / self.noise
        for column, count in ((rate, _ROUNDED_RATES), (distance, _ROUNDED_NOISES)):
            values = np.unique(column[sampled])
            if values.size > count:
                knots = np.geomspace(values[0], values[-1], count)
                knots[-1] = values[-1]
                column[sampled] = knots[np.searchsorted(knots, column[sampled])]
        pairs, place = np.unique(rate + 1j * distance, return_inverse=True)
        total = np.bincount(place, weights=self.count)
        cap = np.where(pairs.real < 1, self.largest_cap, 1)
        return NoiseLevels(pairs.real, 1 / pairs.imag, total.astype(float), self.relation, cap)

    def _cells_between_rates(
        self,
        rows: np.ndarray[tuple[int], np.dtype[np.intp]],
        low: float,
        high: float,
        part: Array,
        place: dict[tuple[float, float], int],
        limit: _MixingLimit,
    ) -> list[MixtureCell]:
        """Return the cells of the levels whose rates lie between two rate knots.

        Args:
            rows: positions of these levels.
            low: lower rate knot.
            high: upper rate knot.
            part: weight of each level on the upper knot.
            place: position of every knot so far; new knots are added to it.
            limit: what mixing may cost.
        """
        distance = 1 / self.noise[rows]
        knots = self._noise_knots(high, distance, self.count[rows], limit)
        upper = np.searchsorted(knots, distance)
        cells = []
        for j in np.unique(upper):
            chosen = np.flatnonzero(upper == j)
            top, m = float(knots[j]), distance[chosen]
            bottom = float(knots[j - 1]) if j and np.any(m < top) else top
            weight = np.ones(chosen.size)
            gap = float(total_variation_gap(bottom, top, self.relation))
            if gap > 1e-200:
                weight = np.minimum(total_variation_gap(bottom, m, self.relation) / gap + _ROUNDING, 1.0)
            pairs = [(high, top, part[chosen] * weight), (high, bottom, part[chosen] * (1 - weight))]
            pairs += [(low, top, (1 - part[chosen]) * weight), (low, bottom, (1 - part[chosen]) * (1 - weight))]
            mixed: dict[int, Array] = {}
            for q, m_knot, w in pairs:
                if np.any(w > 0):
                    index = place.setdefault((q, 1 / m_knot), len(place))
                    mixed[index] = mixed.get(index, 0.0) + w
            cells.append(MixtureCell(tuple(mixed), np.stack(list(mixed.values()), axis=1), self.count[rows][chosen]))
        return cells

    def _noise_knots(self, rate: float, distance: Array, count: Array, limit: _MixingLimit) -> Array:
        """Return knots of ``distance`` (1/noise): split where mixing costs most, until it costs less than ``limit``."""
        fine = np.unique(distance)
        if fine.size <= 3:
            return fine
        if fine.size > _FINE:
            fine = np.unique(np.append(np.geomspace(fine[0], fine[-1], _FINE)[1:-1], fine[[0, -1]]))
        direction: Direction = "remove" if self.relation == "add_remove" else "replace"
        log_m = np.array(
            [log_moments(rate, 1 / m, np.array([limit.tilt]), direction, reach=limit.reach)[0][0] for m in fine]
        )
        moment = np.expm1(np.minimum(log_m, 600.0))
        releases = np.bincount(np.searchsorted(fine, distance), weights=count, minlength=fine.size)

        def cost(i: int, j: int) -> float:
            inner = slice(i, j + 1)
            whole = float(total_variation_gap(fine[i], fine[j], self.relation))
            part = total_variation_gap(fine[i], fine[inner], self.relation) / max(whole, 1e-300)
            over = moment[i] + part * (moment[j] - moment[i]) - moment[inner]
            return float(releases[inner] @ np.maximum(over / (1 + moment[inner]), 0.0))

        last = fine.size - 1
        heap = [(-cost(0, last), 0, last)]
        unsplit: list[tuple[float, int, int]] = []
        total = -heap[0][0]
        while heap and len(heap) + len(unsplit) < _KNOTS and total > limit.cost * limit.tilt:
            over, i, j = heapq.heappop(heap)
            if j - i < 2:
                unsplit.append((over, i, j))
                continue
            middle = (i + j) // 2
            parts = [(-cost(i, middle), i, middle), (-cost(middle, j), middle, j)]
            total += over - parts[0][0] - parts[1][0]
            for part in parts:
                heapq.heappush(heap, part)
        return fine[np.unique([i for _, i, _ in heap + unsplit] + [last])]


def _log_moments(rate: float, noise: float, cap: int, orders: Array, direction: Direction, reach: float) -> LogMoments:
    """Return the moments of one release with this cap, see ``NoiseLevels``."""
    if cap > 1:
        from evenhand.accounting.capped_profile import capped_moments

        return capped_moments(rate, noise, cap, orders, direction, reach)
    return log_moments(rate, noise, orders, direction, reach=reach)
