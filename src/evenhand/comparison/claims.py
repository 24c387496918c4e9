"""Claims of a paper, declared in the experiment's file before it runs, and judged by code afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.comparison import paired
from evenhand.errors import UsageError
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.intervals import over_seeds

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided by these intervals"


@dataclass(frozen=True)
class Claim:
    """``left`` is higher (or lower) than ``factor`` times ``right`` in ``measure``, by more than ``margin`` points.

    ``right`` is another line of the comparison, or a number of points. A negative margin says "not worse by more than".
    """

    text: str
    left: str
    right: str | float
    measure: str = "accuracy"
    direction: str = "higher"
    factor: float = 1.0
    margin: float = 0.0

    def judged(self, rows: Mapping[str, paired.Rows], reference: paired.Rows) -> tuple[str, Estimate]:
        """The verdict, and the difference in points that it rests on, over the seeds that both sides have.

        Examples:
          >>> rows = {name: {seed: {"accuracy": share + seed / 100} for seed in range(3)}
          ...         for name, share in (("new", 0.8), ("old", 0.5))}
          >>> Claim("better", "new", "old").judged(rows, {})[0], Claim("worse", "new", 75, "accuracy", "lower").judged(
          ...     rows, {})[0]
          ('holds', 'does not hold')
        """
        left = paired.series(self.measure, rows.get(self.left, {}), reference)
        if isinstance(self.right, str):
            right = paired.series(self.measure, rows.get(self.right, {}), reference)
            found = paired.difference(left, right, self.factor)
        else:
            found = over_seeds([value - self.right for value in left.values()])
        return self._verdict(found), found

    def _verdict(self, found: Estimate) -> str:
        if not math.isfinite(found.low):
            return OPEN
        low, high = (
            (found.low, found.high) if self.direction == "higher" else (-found.high, -found.low)
        )  # always asks: above the margin?
        return HOLDS if low > self.margin else FAILS if high <= self.margin else OPEN


def claims(tables: Sequence[Any], names: Sequence[str]) -> tuple[Claim, ...]:
    """The ``[[claim]]`` tables of an experiment over the lines called ``names``; mistakes are named.

    Examples:
      >>> claims([{"text": "A is better", "left": "a", "right": "b"}], ["a", "b"])[0].direction
      'higher'
    """
    return tuple(_claim(table, names) for table in tables)


def _claim(table: Any, names: Sequence[str]) -> Claim:
    wanted = "[[claim]] takes text, left, right, and where needed measure, direction, factor, margin"
    if not isinstance(table, Mapping) or not {"text", "left", "right"} <= set(table):
        raise UsageError(f"{wanted}.")
    for key in table:
        _validate.known(key, Claim.__dataclass_fields__, "key of [[claim]]")
    made = Claim(**table)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (made.factor, made.margin)):
        raise UsageError(f"{wanted}; factor and margin are numbers.")
    for name in (made.left, made.right):
        if isinstance(name, str):
            _validate.known(name, names, "method of a claim")
    _validate.known(made.direction, ("higher", "lower"), "direction of a claim")
    paired.series(made.measure, {})
    return made
