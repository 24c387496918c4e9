"""Claims, declared in the experiment's file before it runs with the smallest effect that matters, judged afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.comparison.measures import chance, series
from evenhand.errors import UsageError
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.replicas import Rows, paired
from evenhand.reporting.uncertainty import LEVEL, Split, of_values, replicas_for, verdict

HOLDS, FAILS, SMALL, OPEN = "holds", "does not hold", "too small to matter", "not decided"
MATTERS = 1.0
"""Points below which a difference does not matter, where a claim says nothing else."""
POWER = 0.85


@dataclass(frozen=True)
class Claim:
    """``left`` is higher (or lower) than ``factor`` times ``right`` in ``measure``, by more than ``margin`` points.

    ``right`` is another line of the comparison, or a number of points. A negative margin says "not worse by more than".
    ``matters`` is the smallest effect that matters, in points: 1 unless given, and 0 where the claim states a size
    itself, by a margin or by a number on its right.
    """

    text: str
    left: str
    right: str | float
    measure: str = "accuracy"
    direction: str = "higher"
    factor: float = 1.0
    margin: float = 0.0
    matters: float | None = None

    @property
    def smallest(self) -> float:
        """Return the smallest effect beyond what is claimed that matters, in points."""
        if self.matters is not None:
            return self.matters
        return MATTERS if self.margin == 0 and isinstance(self.right, str) else 0.0

    def judged(
        self, rows: Mapping[str, Rows], reference: Rows, split: Split | None = None, *, claims: int = 1
    ) -> Judgement:
        """Return the verdict on the claim, with what it rests on.

        Args:
          rows: evaluations by line and seed; pairs are of the same seed.
          reference: those of the non-private method.
          split: how replicas were split.
          claims: claims of the whole study, at all promises: their intervals hold all at once (Bonferroni).

        Examples:
          >>> rows = {name: {seed: {"accuracy": share + seed / 100, "records": 2000} for seed in range(3)}
          ...         for name, share in (("new", 0.8), ("old", 0.5))}
          >>> Claim("better", "new", "old").judged(rows, {}).verdict
          'holds'
          >>> Claim("worse", "new", 75, "accuracy", "lower").judged(rows, {}).verdict
          'does not hold'
        """
        used, level = split or Split(), 1 - (1 - LEVEL) / max(1, claims)
        left: Rows = rows.get(self.left, {})
        right: Rows = {}
        if isinstance(self.right, str):
            left, right = paired(left, rows.get(self.right, {}))
        values = self._differences(left, right, reference)
        variance = chance(self.measure, left, used, reference) if values else 0.0
        if isinstance(self.right, str) and values:
            variance += self.factor**2 * chance(self.measure, right, used, reference)
        estimate = of_values(values, variance, len(values), used, level=level)
        return Judgement(self._verdict(estimate), estimate, self._needed(values, variance, used, level))

    def _differences(self, left: Rows, right: Rows, reference: Rows) -> list[float]:
        mine = series(self.measure, left, reference)
        if not isinstance(self.right, str):
            return [value - float(self.right) for value in mine.values()]
        other = series(self.measure, right, reference)
        return [mine[seed] - self.factor * other[seed] for seed in sorted(set(mine) & set(other))]

    def _verdict(self, estimate: Estimate) -> str:
        """Return what the interval of the gain beyond the margin says; one training says nothing about others."""
        if not math.isfinite(estimate.low) or estimate.count < 2:
            return OPEN
        higher = self.direction == "higher"
        low, high = (estimate.low, estimate.high) if higher else (-estimate.high, -estimate.low)
        return verdict(low - self.margin, high - self.margin, self.smallest)

    def _needed(self, values: Sequence[float], variance: float, split: Split, level: float) -> str:
        """Return the power in words: how many trainings find the smallest effect that matters, by these deviations."""
        if len(values) < 2:
            return f"{len(values)} paired training{'' if len(values) == 1 else 's'}: too few to say how many are needed"
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        effect = self.smallest or MATTERS
        needed = replicas_for(effect, deviation, split, wanted=POWER, level=level, chance=variance)
        points = f"{effect:g} point{'' if effect == 1 else 's'}"
        if needed is None:
            return f"no number of trainings finds {points} on these records with probability {POWER:g}: more data would"
        return f"{needed} trainings find {points} with probability {POWER:g}; there are {len(values)}"


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, the difference in points that it rests on, and the power of the study in words.

    ``difference.count`` is the number of trainings; its interval holds together with those of all other claims.
    """

    verdict: str
    difference: Estimate
    power: str


def claims(tables: Sequence[Any], names: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims in the ``[[claim]]`` tables of an experiment with lines ``names``; mistakes raise UsageError.

    Examples:
      >>> claims([{"text": "A is better", "left": "a", "right": "b"}], ["a", "b"])[0].smallest
      1.0
    """
    return tuple(_claim(table, names) for table in tables)


def _claim(table: Any, names: Sequence[str]) -> Claim:
    wanted = "[[claim]] takes text, left, right, and where needed measure, direction, factor, margin, matters"
    if not isinstance(table, Mapping) or not {"text", "left", "right"} <= set(table):
        raise UsageError(f"{wanted}.")
    for key in table:
        _validate.known(key, Claim.__dataclass_fields__, "key of [[claim]]")
    claim = Claim(**table)
    numbers = (claim.factor, claim.margin, claim.smallest)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
        raise UsageError(f"{wanted}; factor and margin are numbers, and so is matters.")
    if claim.matters is not None:
        _validate.number(claim.matters, "matters", low=0, open_low=False)
    for name in (claim.left, claim.right):
        if isinstance(name, str):
            _validate.known(name, names, "method of a claim")
    _validate.known(claim.direction, ("higher", "lower"), "direction of a claim")
    series(claim.measure, {})
    return claim


def difference(
    left: Mapping[int, float],
    right: Mapping[int, float],
    factor: float = 1.0,
    *,
    chance: float = 0.0,
    split: Split | None = None,
    level: float = LEVEL,
) -> Estimate:
    """Return the mean of left - factor * right over the seeds that both have; ``count`` is their number.

    Errors and losses, which are no shares, stay in their own unit.

    Args:
      left: a measure by seed, in points.
      right: the measure to compare with.
      factor: what ``right`` is multiplied by.
      chance: the variance that the held-out records alone give the difference, in points squared.
      split: how replicas were split.
      level: how often such intervals hold the truth.

    Examples:
      >>> round(difference({0: 90.0, 1: 92.0}, {0: 80.0, 1: 82.5, 2: 0.0}).value, 2)
      9.75
    """
    values = [left[seed] - factor * right[seed] for seed in sorted(set(left) & set(right))]
    return of_values(values, chance, len(values), split or Split(), level=level)


def against(rows: Rows, baseline: Rows, split: Split | None = None, *, level: float = LEVEL) -> dict[str, Estimate]:
    """Return how a method differs from the baseline in points: all records, worst group, gap, and each owner.

    Examples:
      >>> mine, other = ({0: {"accuracy": share, "groups": {"a": share}}} for share in (0.75, 0.5))
      >>> {name: estimate.value for name, estimate in against(mine, other).items()}
      {'accuracy': 25.0, 'worst': 25.0}
    """
    used = split or Split()
    owners = dict.fromkeys(name for row in rows.values() for name in row.get("owners", {}))
    grouped = any(len(row.get("groups", {})) > 1 for row in rows.values())
    names = ["accuracy", "worst", *(["gap"] if grouped else []), *(["worst_owner"] if owners else [])]
    names += [f"owner:{name}" for name in owners]
    estimates = {}
    for name in names:
        left, right = series(name, rows), series(name, baseline)
        if set(left) & set(right):
            variance = chance(name, rows, used) + chance(name, baseline, used)
            estimates[name] = difference(left, right, chance=variance, split=used, level=level)
    return {name: estimate for name, estimate in estimates.items() if estimate.measured}
