"""Stages of a plan: steps that share rates and relative bounds. A change of budgets begins a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from evenhand.accounting import accountant
from evenhand.accounting.owners import owner_epsilons
from evenhand.accounting.settling import FEW
from evenhand.errors import UsageError
from evenhand.types import Event

ONE_BY_ONE = 64
"""Distinct owner classes whose spend is computed one by one where no single number orders them."""


@dataclass(frozen=True)
class PlannedLevel:
    """A stretch of steps with the calibrated noise multipliers of the gradient and of each side query."""

    count: int
    noise: float
    bound: float
    queries: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Steps under the same budgets: rate and relative bound per owner class, then the levels in order.

    ``plan`` is the digest of the plan that fixed them, for stages that are over. A rate of 0 means that the class was
    left out.
    """

    rates: tuple[float, ...]
    scales: tuple[float, ...]
    levels: tuple[PlannedLevel, ...]
    plan: str = ""

    @property
    def steps(self) -> int:
        """Number of its steps."""
        return sum(level.count for level in self.levels)

    def first(self, steps: int) -> Stage:
        """Its first ``steps`` steps."""
        return replace(self, levels=cut(self.levels, 0, steps))

    def events(self, rate: float, scale: float) -> list[Event]:
        """What a record with this rate and relative bound is exposed to."""
        if rate == 0:
            return []
        return [(rate, accountant.merged(level.noise / scale, level.queries), level.count) for level in self.levels]


def cut(levels: Sequence[PlannedLevel], begin: int, end: int) -> tuple[PlannedLevel, ...]:
    """The levels of steps ``begin .. end - 1``.

    Examples:
      >>> cut([PlannedLevel(3, 1.0, 1.0), PlannedLevel(3, 2.0, 1.0)], 2, 5)
      (PlannedLevel(count=1, noise=1.0, bound=1.0, queries=()), PlannedLevel(count=2, noise=2.0, bound=1.0, queries=()))
    """
    found, position = [], 0
    for level in levels:
        count = min(position + level.count, end) - max(position, begin)
        if count > 0:
            found.append(replace(level, count=count))
        position += level.count
    return tuple(found)


def until(stages: Sequence[Stage], steps: int) -> tuple[Stage, ...]:
    """The first ``steps`` steps of stages that follow each other."""
    found = []
    for stage in stages:
        part = stage.first(steps)
        steps -= part.steps
        if part.levels:
            found.append(part)
    return tuple(found)


@lru_cache(maxsize=16)
def spent(stages: tuple[Stage, ...], delta: float, tries: tuple[float | None, ...]) -> tuple[float, ...]:
    """Epsilon of every owner class after all these stages, composed step by step: an upper bound.

    Exact for a few distinct classes. For many, classes must be ordered: who is exposed more in one stage is exposed at
    least as much in every other; then one number along that order certifies them all (see ``owner_epsilons``).

    Examples:
      >>> level = PlannedLevel(100, 1.0, 1.0)
      >>> one = Stage((0.01, 0.02), (1.0, 1.0), (level,))
      >>> once, twice = (spent((one,) * n, 1e-5, (None, None)) for n in (1, 2))
      >>> twice[0] == accountant.epsilon([(0.01, 1.0, 200)], 1e-5) > once[0]
      True
    """
    by_rate = all(len(set(stage.scales)) == 1 for stage in stages)
    if not by_rate and any(len(set(stage.rates)) > 1 for stage in stages):
        raise UsageError("Owners differ in their sampling rate or in their clip bound, not in both.")
    columns = [stage.rates if by_rate else stage.scales for stage in stages]
    rows, place = np.unique(np.array(columns).T, axis=0, return_inverse=True)

    def events(row: Sequence[float]) -> list[Event]:
        return [
            event
            for stage, value in zip(stages, row, strict=True)
            for event in (stage.events(value, stage.scales[0]) if by_rate else stage.events(stage.rates[0], value))
        ]

    ordered = bool((np.diff(rows, axis=0) >= 0).all() and (rows > 0).all())
    if len(rows) <= FEW or (not ordered and len(rows) <= ONE_BY_ONE):
        found = [accountant.epsilon(events(row.tolist()), delta) for row in rows]
        return tuple(found[index] for index in place.reshape(-1).tolist())
    if not ordered:
        raise UsageError(
            f"The budgets of {len(rows)} owner classes changed in different orders, which cannot be certified. "
            f"Keep their order (who had more has at least as much), or use at most {ONE_BY_ONE} classes."
        )
    along = np.exp(np.log(rows).mean(axis=1)) if len(stages) > 1 else rows[:, 0]
    points = along[place.reshape(-1)].tolist()
    return tuple(owner_epsilons(points, lambda t: events(_at(t, along, rows)), delta, by_rate=by_rate, tries=tries))


def _at(point: float, along: np.ndarray, rows: np.ndarray) -> list[float]:
    """The class at a point of the order, between two classes the mixture of both in every stage."""
    return [float(np.interp(point, along, column)) for column in rows.T] if rows.shape[1] > 1 else [point]
