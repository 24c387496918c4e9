"""Leaves figures of small groups out of what may be shared: held-out records are people too, and nothing protects them.

A group with fewer held-out records than a stated number shows no figure, only that it has fewer. If those left out have
together fewer records than that number, the next smallest group is left out as well: otherwise their figure would
follow from the total and the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from evenhand.reporting.group_metrics import Estimate

LEAST = 10
"""Held-out records that a group needs for a figure of it to be shared."""
_BY_GROUP = ("groups", "group_records", "group_log_loss")
_BY_OWNER = ("owners", "owner_records")


def left_out(sizes: Mapping[str, int], least: int = LEAST) -> list[str]:
    """Return the groups whose figures are not shared.

    Args:
        sizes: held-out records by group; a group without any has nothing to leave out.
        least: records that a figure needs; 0 or 1 leaves out nothing.

    Examples:
        >>> left_out({"a": 500, "b": 30, "c": 4}), left_out({"a": 500, "b": 7, "c": 4}), left_out({"a": 500, "b": 30})
        (['b', 'c'], ['b', 'c'], [])
    """
    present = sorted((name for name in sizes if sizes[name]), key=lambda name: sizes[name])
    chosen = [name for name in present if sizes[name] < least]
    for name in present[len(chosen) :]:
        if not chosen or sum(sizes[one] for one in chosen) >= least:
            break
        chosen.append(name)
    return [name for name in sizes if name in chosen]


def suppress(estimates: Mapping[str, Estimate], names: Collection[str], least: int = LEAST) -> dict[str, Estimate]:
    """Return the estimates without the figures of ``names``; ``count`` of these is ``least``, and nothing is measured.

    Examples:
        >>> suppress({"a": Estimate(0.5, 0.1, 0.9, 4)}, ["a"])
        {'a': Estimate(value=nan, low=nan, high=nan, count=10)}
    """
    hidden = Estimate(math.nan, math.nan, math.nan, least)
    return {name: hidden if name in names else estimate for name, estimate in estimates.items()}


def by_size(estimates: Mapping[str, Estimate], least: int = LEAST) -> dict[str, Estimate]:
    """Return estimates per group without the figures of those that are too small, whose ``count`` says how small.

    Examples:
        >>> by_size({"a": Estimate(0.5, 0.4, 0.6, 400), "b": Estimate(0.9, 0.8, 1.0, 90)})["b"].value
        0.9
    """
    sizes = {name: estimate.count for name, estimate in estimates.items()}
    return suppress(estimates, left_out(sizes, least), least)


def hidden(estimate: Estimate) -> bool:
    """Return whether the estimate was left out because of few records.

    Examples:
        >>> hidden(Estimate(math.nan, math.nan, math.nan, 10)), hidden(Estimate(math.nan, 0.0, 1.0, 0))
        (True, False)
    """
    return not estimate.measured and estimate.count > 0


def words(least: int = LEAST) -> str:
    """Return what stands in place of a figure that was left out.

    Examples:
        >>> words(10)
        'fewer than 10 records'
    """
    return f"fewer than {least} records"


def without(row: Mapping[str, Any], groups: Collection[str], owners: Collection[str] = ()) -> dict[str, Any]:
    """Return an evaluation without the figures of these groups and owners.

    Examples:
        >>> without({"accuracy": 0.9, "groups": {"a": 1.0, "b": 0.5}}, ["b"])
        {'accuracy': 0.9, 'groups': {'a': 1.0}}
    """

    def rest(table: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name not in names}

    shown = dict(row)
    for keys, names in ((_BY_GROUP, groups), (_BY_OWNER, owners)):
        shown |= {key: rest(row[key], names) for key in keys if isinstance(row.get(key), Mapping)}
    if isinstance(row.get("group_metrics"), Mapping):
        shown["group_metrics"] = {metric: rest(table, groups) for metric, table in row["group_metrics"].items()}
    return shown
