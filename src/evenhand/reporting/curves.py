"""The section of a run's page that shows how each group learned, and where a small one fell behind first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.reporting.dynamics import Drop, initial_drops
from evenhand.reporting.elements import figure, notes, section, table
from evenhand.reporting.svg import LABELLED, lines
from evenhand.reporting.text import label


def while_training(curves: Sequence[Mapping[str, Any]], ranked: Sequence[str], numbers: Mapping[str, int]) -> str:
    """The section on learning: a curve per group, the longest initial drop shaded, the values as a table.

    Args:
        curves: evaluations in order: {"epoch", "accuracy", "groups": {name: accuracy}}.
        ranked: groups from the lowest accuracy to the highest.
        numbers: by which number the page's script knows each group.

    Examples:
        >>> "no curve to draw" in while_training([], [], {})
        True
    """
    if not curves:
        words = "<p>No evaluation was recorded during training, so there is no curve to draw.</p>"
        return section("While training", words)
    drops = initial_drops(curves)
    names = list(dict.fromkeys([*ranked, *(name for row in curves for name in row.get("groups", {}))]))
    whole = next(key for key in ("overall", "all records", "all held-out records together") if key not in names)
    series = {whole: [(float(row["epoch"]), 100 * float(row["accuracy"])) for row in curves]}
    for name in names:
        known = [row for row in curves if name in row.get("groups", {})]
        series[name] = [(float(row["epoch"]), 100 * float(row["groups"][name])) for row in known]
    title = "Accuracy per group on held-out records while training"
    marked = drops[0] if drops else None
    shown = marked.group if marked else ranked[0] if len(ranked) > 1 else None
    chart = figure(
        lambda size: lines(
            series,
            title=title,
            x_label="epoch",
            y_label="correct, %",
            highlight=shown,
            band=None if marked is None else (marked.start, marked.end, f"{label(marked.group, 40)}: initial drop"),
            numbers=numbers,
            size=size,
        )
    )
    last = len(curves) - 1
    picked = [curves[i] for i in sorted({last * part // 4 for part in range(5)})]
    head = ["group", *(f"{float(row['epoch']):g}" for row in picked)]
    cells = [[whole, *(_share(row.get("accuracy")) for row in picked)]]
    cells += [[name, *(_share(row.get("groups", {}).get(name)) for row in picked)] for name in names]
    grey = len(series) - LABELLED
    remarks = [f"{grey} more groups are drawn in grey without a label; the table names them."] if grey > 0 else []
    remarks += _dropped(drops)
    intro = "<p>Accuracy on the same held-out records after each evaluation, per group.</p>"
    values = table(head, cells, "Correct, %, after this many epochs.")
    return section("While training", intro + chart + notes(remarks) + values)


def _dropped(drops: Sequence[Drop]) -> list[str]:
    """Initial drops in words, the longest three."""
    found = [
        f"{label(drop.group, 40)} stayed {'at zero' if drop.depth == 0 else 'below its start'} "
        + (f"until epoch {drop.end:.3g}" if drop.recovered else "to the end")
        + (f", at most {100 * drop.depth:.0f} points" if drop.depth else "")
        for drop in drops[:3]
    ]
    if not found:
        return []
    rest = f"; and {len(drops) - 3} more groups" if len(drops) > 3 else ""
    what = "Initial drop: a group falls below its first value, or stays at zero, while the overall value rises."
    return [f"{what} {'; '.join(found)}{rest}."]


def _share(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{100 * value:.0f}"
