"""Whether a method gives more to owners with small budgets: their change against the baseline, over their budgets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand.reporting.svg import Point

LEAST = 3
"""Owners that a correlation needs: through two points there is always a line."""


@dataclass(frozen=True)
class Trend:
    """The straight line through an owner's change in points over its budget, and how sure its direction is."""

    method: str
    owners: int
    slope: float
    r: float
    p: float


def changes(table: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Budget and change in points of every owner, by method; strictest owner first, nothing without budgets.

    An owner's budget is what the comparison promises it, also where a method promises it more privacy.
    """
    budgets: Mapping[str, float] = table["setting"].get("budgets", {})
    found = {}
    for entry in table["entries"]:
        known = {name: entry["against_baseline"].get(f"owner:{name}", {}).get("value") for name in budgets}
        points = sorted((budgets[name], value) for name, value in known.items() if value is not None)
        if points:
            found[entry["method"]] = points
    return found


def trends(table: Mapping[str, Any]) -> list[Trend]:
    """One trend per method with owners enough, whose budgets and changes differ."""
    return [trend(method, points) for method, points in changes(table).items() if _varies(points)]


def trend(method: str, points: Sequence[Point]) -> Trend:
    """Slope, Pearson's r and its two-sided p."""
    from scipy.stats import pearsonr

    across, up = zip(*points, strict=True)
    found = pearsonr(across, up)
    slope = statistics.linear_regression(across, up).slope
    return Trend(method, len(points), slope, float(found.statistic), float(found.pvalue))


def _varies(points: Sequence[Point]) -> bool:
    return len(points) >= LEAST and all(len(set(column)) > 1 for column in zip(*points, strict=True))
