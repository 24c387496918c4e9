"""Reads evaluations of several trainings: shares per group, how many held-out records are behind them, who is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from evenhand.reporting import metrics
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out import effective_records
from evenhand.reporting.uncertainty import (
    FEWEST,
    LEVEL,
    Split,
    distinct,
    named_group,
    over_replicas,
    share_variance,
)

Rows = Mapping[int, Mapping[str, Any]]
"""The last evaluation of every training, by seed."""
_COUNTS = {"groups": "group_records", "owners": "owner_records"}


def names(rows: Rows, table: str = "groups") -> list[str]:
    """Return the groups (or ``owners``) that occur, in order."""
    return list(dict.fromkeys(name for row in rows.values() for name in row.get(table, {})))


def size(rows: Rows, name: str | None = None, table: str = "groups") -> int:
    """Return how many held-out records of a group a training has on average, or of all; 0 if that is not known.

    Examples:
        >>> rows = {0: {"records": 50, "groups": {"a": 1.0}, "group_records": {"a": 4}}, 1: {"records": 50}}
        >>> size(rows), size(rows, "a")
        (50, 2)
    """
    counts = [
        row.get("records", 0) if name is None else row.get(_COUNTS[table], {}).get(name, 0) for row in rows.values()
    ]
    return round(sum(counts) / len(counts)) if counts else 0


def independent(rows: Rows, name: str | None = None, table: str = "groups") -> int:
    """Return how many independent held-out records of a group a training has on average, or of all; 0 if not known.

    They are fewer than ``size`` where a person has several.

    Examples:
        >>> rows = {seed: {"records": 50, "effective_records": 20} for seed in range(3)}
        >>> size(rows), independent(rows)
        (50, 20)
    """
    counts = [
        effective_records.size(row) if name is None else effective_records.sizes(row, table).get(name, 0)
        for row in rows.values()
    ]
    return round(sum(counts) / len(counts)) if counts else 0


def large(rows: Rows, table: str = "groups", fewest: int = FEWEST) -> list[str]:
    """Return the groups with enough held-out records to be called worst; all of them if no numbers are known.

    Examples:
        >>> row = {"groups": {"a": 1.0, "b": 0.5}, "group_records": {"a": 4, "b": 500}}
        >>> large({0: row}), large({0: {"groups": {"a": 1.0}}})
        (['b'], ['a'])
    """
    known = any(row.get(_COUNTS[table]) for row in rows.values())
    return [name for name in names(rows, table) if not known or independent(rows, name, table) >= fewest]


def small(rows: Rows, fewest: int = FEWEST) -> dict[str, int]:
    """Return the groups with too few held-out records to tell, and how many they have.

    Examples:
        >>> small({0: {"groups": {"a": 1.0, "b": 0.5}, "group_records": {"a": 4, "b": 500}}})
        {'a': 4}
    """
    enough = large(rows, fewest=fewest)
    return {name: independent(rows, name) for name in names(rows) if name not in enough}


def shares(rows: Rows, name: str | None = None, table: str = "groups") -> list[float]:
    """Return accuracy by training, of a group or of all records; NaN where a training had no such record."""
    values = [row.get("accuracy") if name is None else row.get(table, {}).get(name) for row in rows.values()]
    return [math.nan if value is None else float(value) for value in values]


def variance(rows: Rows, split: Split, name: str | None = None, table: str = "groups") -> float:
    """Return the variance that the held-out records alone give the mean share; 0 if their number is not known."""
    known = [value for value in shares(rows, name, table) if math.isfinite(value)]
    records = distinct(independent(rows, name, table), len(known), split)
    return share_variance(sum(known) / len(known), records) if known and records else 0.0


def share(
    rows: Rows, split: Split, name: str | None = None, table: str = "groups", *, level: float = LEVEL
) -> Estimate:
    """Return the mean accuracy over trainings with its interval; ``count`` is the held-out records of one training.

    Examples:
        >>> rows = {seed: {"records": 4, "accuracy": 1.0} for seed in range(3)}
        >>> estimate = share(rows, Split())
        >>> estimate.value, round(estimate.low, 2), estimate.count
        (1.0, 0.33, 4)
    """
    values = [value for value in shares(rows, name, table) if math.isfinite(value)]
    records = size(rows, name, table)
    if not values or not records:
        mean = sum(values) / len(values) if values else math.nan
        return Estimate(mean, math.nan, math.nan, records)
    behind = distinct(independent(rows, name, table), len(values), split)
    estimate = over_replicas(values, behind, split, level=level)
    worth = independent(rows, name, table)
    return dataclasses.replace(estimate, count=records, effective=None if worth == records else worth)


def served_worst(rows: Rows, split: Split, *, level: float = LEVEL) -> str:
    """Return the group that is served worse than every other by these trainings; empty if none can be told.

    Guarantee:
        Where no group differs, one is named with probability at most ``1 - level``, if the trainings are at least two.
    """
    groups = _known(rows)
    if len(rows) < 2 or len(groups) < 2:
        return ""
    values = {name: shares(rows, name) for name in groups}
    chances = {name: variance(rows, split, name) for name in groups}
    return named_group(values, dict.fromkeys(groups, FEWEST), split, level=level, chances=chances) or ""


def pays_most(rows: Rows, reference: Rows, split: Split, *, level: float = LEVEL) -> str:
    """Return the group that loses more against ``reference`` than every other, paired by seed; empty if none can be told.

    Guarantee:
        Where no group's loss differs, one is named with probability at most ``1 - level``, if pairs are at least two.
    """  # noqa: E501
    before, after = paired(reference, rows)
    groups = [name for name in _known(after) if name in _known(before)]
    if len(after) < 2 or len(groups) < 2:
        return ""
    values = {name: [a - b for a, b in zip(shares(before, name), shares(after, name), strict=True)] for name in groups}
    chances = {name: variance(before, split, name) + variance(after, split, name) for name in groups}
    return named_group(values, dict.fromkeys(groups, FEWEST), split, lowest=False, level=level, chances=chances) or ""


def paired(left: Rows, right: Rows) -> tuple[Rows, Rows]:
    """Return the rows of the seeds that both sides have, in the same order.

    Examples:
        >>> paired({0: {}, 1: {}}, {1: {}, 2: {}})
        ({1: {}}, {1: {}})
    """
    common = sorted(set(left) & set(right))
    return {seed: left[seed] for seed in common}, {seed: right[seed] for seed in common}


def better_method(
    entries: Mapping[str, Rows], split: Split, groups: Iterable[str] = (), *, level: float = LEVEL
) -> str:
    """Return the method that is more accurate than every other; empty if none can be told.

    With ``groups``, what counts is the accuracy of the worst of these groups in each training.

    Guarantee:
        Where methods do not differ, one is named with probability at most ``1 - level``, if seeds are at least two.
    """
    common = sorted(set.intersection(*(set(rows) for rows in entries.values()))) if entries else []
    if len(common) < 2 or len(entries) < 2:
        return ""
    same = {method: {seed: rows[seed] for seed in common} for method, rows in entries.items()}
    chosen = list(groups)
    if any(independent(rows) < FEWEST for rows in same.values()):
        return ""
    values = {method: lowest(rows, chosen) if chosen else shares(rows) for method, rows in same.items()}
    chances = {
        method: lowest_variance(rows, split, chosen) if chosen else variance(rows, split)
        for method, rows in same.items()
    }
    sizes = dict.fromkeys(values, FEWEST)
    return named_group(values, sizes, split, lowest=False, level=level, chances=chances) or ""


def best_by(metric: str, entries: Mapping[str, Rows], split: Split, *, level: float = LEVEL) -> str:
    """Return the method that is better than every other in a metric, over the same seeds; empty if none can be told.

    Where all trainings hold out the same records, how far these stand for others is not known for an arbitrary metric,
    so that no method is named.
    """
    common = sorted(set.intersection(*(set(rows) for rows in entries.values()))) if entries else []
    if split.ratio is None or len(common) < 2:
        return ""
    values = {
        method: [_or_nan(metrics.value(rows[seed], metric)) for seed in common] for method, rows in entries.items()
    }
    sizes = {method: independent(rows) for method, rows in entries.items()}
    chances = dict.fromkeys(values, 0.0)
    lower = not metrics.higher_is_better(metric)
    return named_group(values, sizes, split, lowest=lower, level=level, chances=chances) or ""


def worst_by(metric: str, rows: Rows, split: Split, *, level: float = LEVEL) -> str:
    """Return the group that fares worse in a metric than every other; empty if none can be told.

    See ``best_by``; a metric of which neither more nor less is better has no worst group.
    """
    known = metrics.METRICS.get(metric)
    if split.ratio is None or len(rows) < 2 or known is None or known.higher is None:
        return ""
    groups = _known(rows)
    values = {name: [_or_nan(metrics.value(row, metric, name)) for row in rows.values()] for name in groups}
    sizes = {name: independent(rows, name) for name in groups}
    chances = dict.fromkeys(groups, 0.0)
    return named_group(values, sizes, split, lowest=known.higher, level=level, chances=chances) or ""


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def lowest(rows: Rows, groups: Iterable[str], table: str = "groups") -> list[float]:
    """Return the accuracy of the worst of these groups by training; NaN where a training has none of them."""
    columns = [shares(rows, name, table) for name in groups]
    return [
        min((value for value in values if math.isfinite(value)), default=math.nan)
        for values in zip(*columns, strict=True)
    ]


def lowest_variance(rows: Rows, split: Split, groups: Iterable[str], table: str = "groups") -> float:
    """Return the variance by records of the worst group: the largest of those that are worst in some training."""
    chosen = list(groups)
    floor = lowest(rows, chosen, table)
    worst = [
        name
        for name in chosen
        if any(value == least for value, least in zip(shares(rows, name, table), floor, strict=True))
    ]
    return max((variance(rows, split, name, table) for name in worst), default=0.0)


def _known(rows: Rows) -> list[str]:
    """Return the groups with enough held-out records, of which the number must be known."""
    return [name for name in large(rows) if size(rows, name) >= FEWEST]
