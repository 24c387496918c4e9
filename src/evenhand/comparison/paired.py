"""Differences paired by seed: the same start and the same split on both sides, so that less is left to chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evenhand.errors import UsageError
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.intervals import over_seeds

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
    """A measure of every training in points, by seed; seeds in which it is not defined are left out.

    Args:
      measure: accuracy, balanced, auc, worst (group), gap (between groups), worst_owner, group:NAME, owner:NAME; and
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
    if colon and kind in _NAMED:
        return _defined(rows, lambda row: row[_NAMED[kind]][name])
    if measure not in _PLAIN:
        raise UsageError(f"There is no measure called {measure!r}. Choose one of: {', '.join(MEASURES)}.")
    return _defined(rows, _PLAIN[measure])


def difference(left: Mapping[int, float], right: Mapping[int, float], factor: float = 1.0) -> Estimate:
    """Mean of left - factor * right over the seeds that both have, with its 95 % t-interval.

    Examples:
      >>> round(difference({0: 90.0, 1: 92.0}, {0: 80.0, 1: 82.5, 2: 0.0}).value, 2)
      9.75
    """
    return over_seeds([left[seed] - factor * right[seed] for seed in sorted(set(left) & set(right))])


def against(rows: Rows, baseline: Rows) -> dict[str, Estimate]:
    """How a method differs from the baseline in points: all records, worst group, gap, and each owner.

    Examples:
      >>> mine, other = ({0: {"accuracy": share, "groups": {"a": share}}} for share in (0.75, 0.5))
      >>> {name: found.value for name, found in against(mine, other).items()}
      {'accuracy': 25.0, 'worst': 25.0}
    """
    owners = dict.fromkeys(name for row in rows.values() for name in row.get("owners", {}))
    grouped = any(len(row.get("groups", {})) > 1 for row in rows.values())
    names = ["accuracy", "worst", *(["gap"] if grouped else []), *(["worst_owner"] if owners else [])]
    names += [f"owner:{name}" for name in owners]
    found = {name: difference(series(name, rows), series(name, baseline)) for name in names}
    return {name: estimate for name, estimate in found.items() if estimate.measured}


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
    """Who pays least and who pays most for privacy on average; empty names where that is not known."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row.get("groups", {})))
    costs = {name: over_seeds(list(_cost("cost", name, rows, reference).values())) for name in names}
    ranked = sorted((name for name in costs if costs[name].measured), key=lambda name: costs[name].value)
    return (ranked[0], ranked[-1]) if len(ranked) > 1 else ("", "")


def _defined(rows: Rows, value: Callable[[Mapping[str, Any]], float | None]) -> dict[int, float]:
    found = {}
    for seed, row in rows.items():
        try:
            known = value(row)
        except (KeyError, ValueError):
            continue
        if known is not None:
            found[seed] = 100 * float(known)
    return found
