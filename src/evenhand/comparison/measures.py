"""Measures of trainings, in points: by seed, with the variance that the held-out records give their mean.

A claim, a difference to the baseline and the best method of a study are all about one of these measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from evenhand.errors import UsageError
from evenhand.reporting import metrics, replicas
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.replicas import Rows
from evenhand.reporting.uncertainty import LEVEL, Split, distinct, of_values

_PLAIN: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "accuracy": lambda row: row["accuracy"],
    "balanced": lambda row: row["balanced_accuracy"],
    "auc": lambda row: row["roc_auc"],
}
_TABLES = {"worst": "groups", "gap": "groups", "worst_owner": "owners"}
_NAMED = {"group": "groups", "owner": "owners"}
_SCORED = ("accuracy", "balanced", "auc", "mcc")
"""Measures of all records whose variance by records is known."""
_OVER_OWNERS = ("worst_owners", "cvar_owners", "owa_owners")
"""Objectives over the owners sorted from the worst served: see ``owner_weights``."""
MEASURES = (
    *(*_PLAIN, *_TABLES, "cost", "cost_gap", "group:NAME", "owner:NAME", "cost:NAME"),
    *("worst_owners:K", "cvar_owners:SHARE", "owa_owners:W1,W2"),
)


def series(measure: str, rows: Rows, reference: Rows | None = None) -> dict[int, float]:
    """Return a measure of every training in points, by seed, without seeds in which it is not defined.

    Args:
      measure: accuracy, balanced, auc, worst (group), gap (between groups), worst_owner, group:NAME, owner:NAME; and
        against the non-private reference cost, cost:GROUP, and cost_gap, between the groups that pay most and least.
        Groups with too few held-out records count neither for worst nor for gap. Over several owners: worst_owners:K,
        cvar_owners:SHARE, owa_owners:W1,W2 (see ``owner_weights``).
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
    if kind in _OVER_OWNERS:
        return _over_owners(measure, rows)
    if measure in _TABLES:
        table = _TABLES[measure]
        groups = compared(rows, table)
        inside = {
            seed: [row[table][name] for name in groups if row.get(table, {}).get(name) is not None]
            for seed, row in rows.items()
        }
        spans = {
            seed: max(values) - min(values) if measure == "gap" else min(values)
            for seed, values in inside.items()
            if values
        }
        return {seed: 100 * float(value) for seed, value in spans.items()}
    if measure not in _PLAIN and _is_metric(measure):
        return _defined(rows, lambda row: metrics.value(row, measure), _unit(measure))
    if measure not in _PLAIN:
        raise UsageError(
            f"There is no measure called {measure!r}. Choose one of: {', '.join(MEASURES)}; or a metric: "
            f"{', '.join(metrics.METRICS)}, with _difference or _ratio for how groups differ, or group:NAME:METRIC."
        )
    return _defined(rows, _PLAIN[measure])


def owner_weights(measure: str, owners: int) -> list[float]:
    """Return the weight of every owner in an objective, from the worst served to the best; they add up to 1.

    ``worst_owners:K`` is the mean of the K worst; ``cvar_owners:SHARE`` the mean of the worst share of the owners, of
    which one may count in part; ``owa_owners:W1,W2,...`` an ordered weighted average (with weights that do not rise, a
    mixture of such means), whose weights are scaled to add up to 1 and are 0 for the owners after the last.

    Examples:
      >>> owner_weights("worst_owners:2", 4), owner_weights("cvar_owners:0.375", 4), owner_weights("owa_owners:3,1", 2)
      ([0.5, 0.5, 0.0, 0.0], [0.6666666666666666, 0.3333333333333333, 0.0, 0.0], [0.75, 0.25])
    """
    kind, _, text = measure.partition(":")
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError:
        given = []
    usable = given and all(math.isfinite(value) and value >= 0 for value in given) and sum(given) > 0
    if not usable or (kind != "owa_owners" and len(given) > 1) or (kind == "cvar_owners" and given[0] > 1):
        raise UsageError(
            f"The measure {measure!r} needs numbers of at least 0: worst_owners:2 (how many), cvar_owners:0.25 (which "
            "share of the owners), or owa_owners:3,2,1 (weights from the worst served owner on)."
        )
    if kind == "owa_owners":
        weights = [*given, *[0.0] * owners][:owners]
    else:
        many = min(given[0], owners) if kind == "worst_owners" else given[0] * owners
        weights = [max(0.0, min(1.0, many - place)) for place in range(owners)]
    return [weight / sum(weights) for weight in weights] if sum(weights) > 0 else weights


def _over_owners(measure: str, rows: Rows) -> dict[int, float]:
    """Return the objective of every training: its owners' values from the worst on, by their weights."""
    names = compared(rows, "owners")
    points = {}
    for seed, row in rows.items():
        values = sorted(row["owners"][name] for name in names if row.get("owners", {}).get(name) is not None)
        if values:
            pairs = zip(owner_weights(measure, len(values)), values, strict=True)
            points[seed] = 100 * sum(weight * float(value) for weight, value in pairs)
    return points


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


def _unit(metric: str) -> float:
    """Return 100 for shares, which are counted in points, and 1 for what has a unit of its own (errors, losses)."""
    return 100.0 if math.isfinite(metrics.bounds(metric)[1]) else 1.0


def chance(measure: str, rows: Rows, split: Split, reference: Rows | None = None) -> float:
    """Return the variance in points squared that the held-out records alone give the mean of ``series``.

    It is 0 where the number of records is not known, and of metrics for which no formula is at hand. Of balanced
    accuracy and the area under the curve it is approximate: the smaller side is taken to hold all records that are not
    of the most common label.

    Examples:
      >>> rows = {seed: {"accuracy": 0.8, "records": 100} for seed in range(3)}
      >>> round(chance("accuracy", rows, Split()) ** 0.5, 1)
      4.1
    """
    kind, colon, name = measure.partition(":")
    if kind == "cost_gap":
        both = [name for name in payers(rows, reference or {}) if name]
        return sum(chance(f"cost:{name}", rows, split, reference) for name in both)
    if kind == "cost":
        measure = f"group:{name}" if name else "accuracy"
        return chance(measure, rows, split) + chance(measure, reference or {}, split)
    if measure not in _SCORED and (_is_metric(measure) or (kind == "group" and _of_group(name))):
        return 0.0
    if colon and kind in _NAMED:
        return 1e4 * replicas.variance(rows, split, name, _NAMED[kind])
    if kind in _OVER_OWNERS:
        means = {name: series(f"owner:{name}", rows) for name in compared(rows, "owners")}
        order = sorted((name for name in means if means[name]), key=lambda name: sum(means[name].values()))
        shares = zip(owner_weights(measure, len(order)), order, strict=True)
        return 1e4 * sum(share**2 * replicas.variance(rows, split, name, "owners") for share, name in shares)
    if measure == "gap":
        return 1e4 * gap_variance(rows, split)
    if measure in _TABLES:
        table = _TABLES[measure]
        return 1e4 * replicas.lowest_variance(rows, split, compared(rows, table), table)
    if measure == "accuracy":
        return 1e4 * replicas.variance(rows, split)
    return 1e4 * score_variance(measure, rows, split)


def estimate(
    measure: str, rows: Rows, split: Split, reference: Rows | None = None, *, level: float = LEVEL
) -> Estimate:
    """Return the mean of a measure in points with its interval; ``count`` is the number of trainings.

    Examples:
      >>> rows = {seed: {"accuracy": 0.8, "records": 100} for seed in range(3)}
      >>> points = estimate("accuracy", rows, Split())
      >>> round(points.value), round(points.low), round(points.high), points.count
      (80, 72, 88, 3)
    """
    values = list(series(measure, rows, reference).values())
    return of_values(values, chance(measure, rows, split, reference), len(values), split, level=level)


def compared(rows: Rows, table: str) -> list[str]:
    """Return the groups that count for the worst and the gap: those with enough held-out records."""
    return replicas.large(rows, table)


def payers(rows: Rows, reference: Rows) -> tuple[str, str]:
    """Return the group that pays least and the one that pays most for privacy on average; empty names if not known."""
    costs = {name: list(_cost("cost", name, rows, reference).values()) for name in compared(rows, "groups")}
    means = {name: sum(values) / len(values) for name, values in costs.items() if values}
    ranked = sorted(means, key=lambda name: means[name])
    return (ranked[0], ranked[-1]) if len(ranked) > 1 else ("", "")


def gap_variance(rows: Rows, split: Split) -> float:
    """Return the variance by records of the distance between the best and the worst group."""
    groups = compared(rows, "groups")
    means = {name: replicas.share(rows, split, name).value for name in groups}
    ranked = sorted((name for name in groups if math.isfinite(means[name])), key=lambda name: means[name])
    return sum(replicas.variance(rows, split, name) for name in {*ranked[:1], *ranked[-1:]})


def score_variance(measure: str, rows: Rows, split: Split) -> float:
    """Return the variance by records of a score over all records: balanced accuracy, area under the curve, or MCC.

    The area: Hanley and McNeil 1982. MCC: that of a correlation. Balanced accuracy: a share of the smaller side.
    """
    values = {"balanced": "balanced_accuracy", "auc": "roc_auc", "mcc": "mcc"}[measure]
    known = [float(row[values]) for row in rows.values() if row.get(values) is not None]
    records = distinct(replicas.independent(rows), len(known), split)
    if not known or not records:
        return 0.0
    mean = sum(known) / len(known)
    common = [float(row["majority"]) for row in rows.values() if row.get("majority") is not None]
    most = min(sum(common) / len(common) if common else 0.5, 1 - 1 / records)
    few = max(1.0, records * (1 - max(most, 0.5)))
    if measure == "mcc":
        return (1 - min(mean**2, 0.99)) ** 2 / records
    inside = min(max(mean, 1 / (records + 2)), 1 - 1 / (records + 2))
    if measure == "balanced":
        return inside * (1 - inside) / few
    many, first, second = max(1.0, records - few), inside / (2 - inside), 2 * inside**2 / (1 + inside)
    spread = inside * (1 - inside) + (few - 1) * (first - inside**2) + (many - 1) * (second - inside**2)
    return spread / (few * many)


def _cost(kind: str, name: str, rows: Rows, reference: Rows) -> dict[int, float]:
    if kind == "cost_gap":
        low, high = payers(rows, reference)
        if not low:
            return {}
        less, more = _cost("cost", low, rows, reference), _cost("cost", high, rows, reference)
        return {seed: more[seed] - less[seed] for seed in more if seed in less}
    measure = f"group:{name}" if name else "accuracy"
    before, after = series(measure, reference), series(measure, rows)
    return {seed: before[seed] - after[seed] for seed in after if seed in before}


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
