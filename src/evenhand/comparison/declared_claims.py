"""Claims of a paper, declared in the experiment's file before it runs, and judged by code afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.reporting import metrics
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

    def judged(self, rows: Mapping[str, Rows], reference: Rows) -> tuple[str, Estimate]:
        """Return the verdict, and the difference in points that it rests on, over the seeds that both sides have.

        Examples:
          >>> rows = {name: {seed: {"accuracy": share + seed / 100} for seed in range(3)}
          ...         for name, share in (("new", 0.8), ("old", 0.5))}
          >>> Claim("better", "new", "old").judged(rows, {})[0], Claim("worse", "new", 75, "accuracy", "lower").judged(
          ...     rows, {})[0]
          ('holds', 'does not hold')
        """
        left = series(self.measure, rows.get(self.left, {}), reference)
        if isinstance(self.right, str):
            right = series(self.measure, rows.get(self.right, {}), reference)
            estimate = difference(left, right, self.factor)
        else:
            estimate = over_seeds([value - self.right for value in left.values()])
        return self._verdict(estimate), estimate

    def _verdict(self, estimate: Estimate) -> str:
        if not math.isfinite(estimate.low):
            return OPEN
        low, high = (
            (estimate.low, estimate.high) if self.direction == "higher" else (-estimate.high, -estimate.low)
        )  # always asks: above the margin?
        return HOLDS if low > self.margin else FAILS if high <= self.margin else OPEN


def claims(tables: Sequence[Any], names: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims in the ``[[claim]]`` tables of an experiment with lines ``names``; mistakes raise UsageError.

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
    claim = Claim(**table)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (claim.factor, claim.margin)):
        raise UsageError(f"{wanted}; factor and margin are numbers.")
    for name in (claim.left, claim.right):
        if isinstance(name, str):
            _validate.known(name, names, "method of a claim")
    _validate.known(claim.direction, ("higher", "lower"), "direction of a claim")
    series(claim.measure, {})
    return claim


Rows = Mapping[int, Mapping[str, Any]]
"""The last evaluation of every training, by seed."""


def _worst(table: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda row: min(row[table].values())


_PLAIN: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "accuracy": lambda row: row["accuracy"],
    "balanced": lambda row: row["balanced_accuracy"],
    "auc": lambda row: row["roc_auc"],
    "worst": _worst("groups"),
    "gap": lambda row: max(row["groups"].values()) - min(row["groups"].values()),
    "worst_owner": _worst("owners"),
}
_NAMED = {"group": "groups", "owner": "owners"}
MEASURES = (*_PLAIN, "cost", "cost_gap", "group:NAME", "owner:NAME", "cost:NAME")


def series(measure: str, rows: Rows, reference: Rows | None = None) -> dict[int, float]:
    """Return a measure of every training in points, by seed, without seeds in which it is not defined.

    Errors and losses, which are no shares, stay in their own unit.

    Args:
      measure: accuracy, balanced, auc, worst (group), gap (between groups), worst_owner, group:NAME, owner:NAME, any
        metric (``reporting.metrics``) by its name, ``fpr_difference`` and so on, group:NAME:METRIC; and
        against the non-private reference cost, cost:GROUP, and cost_gap, between the groups that pay most and least.
      rows: the last evaluations of one method.
      reference: those of the non-private method.

    Examples:
      >>> rows = {0: {"accuracy": 0.75, "groups": {"a": 1.0, "b": 0.5}}}
      >>> series("gap", rows), series("group:b", rows), series("worst_owner", rows)
      ({0: 50.0}, {0: 50.0}, {})
    """
    kind, colon, name = measure.partition(":")
    if kind.startswith("cost"):
        return _cost(kind, name, rows, reference or {})
    if kind == "group" and _of_group(name):
        group, _, metric = name.rpartition(":")
        return _defined(rows, lambda row: metrics.value(row, metric, group), _unit(metric))
    if colon and kind in _NAMED:
        return _defined(rows, lambda row: row[_NAMED[kind]][name])
    if measure not in _PLAIN and _is_metric(measure):
        return _defined(rows, lambda row: metrics.value(row, measure), _unit(measure))
    if measure not in _PLAIN:
        raise UsageError(
            f"There is no measure called {measure!r}. Choose one of: {', '.join(MEASURES)}; or a metric: "
            f"{', '.join(metrics.METRICS)}, with _difference or _ratio for how groups differ, or group:NAME:METRIC."
        )
    return _defined(rows, _PLAIN[measure])


def _is_metric(name: str) -> bool:
    """Return whether a name is that of a metric."""
    try:
        return bool(metrics.known(name))
    except UsageError:
        return False


def _of_group(name: str) -> bool:
    """Return whether what follows ``group:`` is a group and a metric."""
    group, _, metric = name.rpartition(":")
    return bool(group) and _is_metric(metric)


def difference(left: Mapping[int, float], right: Mapping[int, float], factor: float = 1.0) -> Estimate:
    """Return the mean of left - factor * right over the seeds that both have, with its 95 % t-interval.

    Examples:
      >>> round(difference({0: 90.0, 1: 92.0}, {0: 80.0, 1: 82.5, 2: 0.0}).value, 2)
      9.75
    """
    return over_seeds([left[seed] - factor * right[seed] for seed in sorted(set(left) & set(right))])


def against(rows: Rows, baseline: Rows) -> dict[str, Estimate]:
    """Return how a method differs from the baseline in points: all records, worst group, gap, and each owner.

    Examples:
      >>> mine, other = ({0: {"accuracy": share, "groups": {"a": share}}} for share in (0.75, 0.5))
      >>> {name: estimate.value for name, estimate in against(mine, other).items()}
      {'accuracy': 25.0, 'worst': 25.0}
    """
    owners = dict.fromkeys(name for row in rows.values() for name in row.get("owners", {}))
    grouped = any(len(row.get("groups", {})) > 1 for row in rows.values())
    names = ["accuracy", "worst", *(["gap"] if grouped else []), *(["worst_owner"] if owners else [])]
    names += [f"owner:{name}" for name in owners]
    estimates = {name: difference(series(name, rows), series(name, baseline)) for name in names}
    return {name: estimate for name, estimate in estimates.items() if estimate.measured}


def _cost(kind: str, name: str, rows: Rows, reference: Rows) -> dict[int, float]:
    if kind == "cost_gap":
        low, high = payers(rows, reference)
        if not low:
            return {}
        less, more = _cost("cost", low, rows, reference), _cost("cost", high, rows, reference)
        return {seed: more[seed] - less[seed] for seed in more}
    measure = f"group:{name}" if name else "accuracy"
    before, after = series(measure, reference), series(measure, rows)
    return {seed: before[seed] - after[seed] for seed in after if seed in before}


def payers(rows: Rows, reference: Rows) -> tuple[str, str]:
    """Return the group that pays least and the one that pays most for privacy on average; empty names if not known."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row.get("groups", {})))
    costs = {name: over_seeds(list(_cost("cost", name, rows, reference).values())) for name in names}
    ranked = sorted((name for name in costs if costs[name].measured), key=lambda name: costs[name].value)
    return (ranked[0], ranked[-1]) if len(ranked) > 1 else ("", "")


def _unit(metric: str) -> float:
    """Return 100 for shares, which are counted in points, and 1 for what has a unit of its own (errors, losses)."""
    return 100.0 if math.isfinite(metrics.bounds(metric)[1]) else 1.0


def _defined(rows: Rows, value: Callable[[Mapping[str, Any]], float | None], unit: float = 100.0) -> dict[int, float]:
    points = {}
    for seed, row in rows.items():
        try:
            known = value(row)
        except (KeyError, ValueError, TypeError):  # not measured, or None in some group
            continue
        if known is not None:
            points[seed] = unit * float(known)
    return points
