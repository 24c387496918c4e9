"""Draw the frontier of a run on its page: whom other decisions of the same training would serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand import untrusted
from evenhand.reporting.charts import lines
from evenhand.reporting.page import Commands, Section, Table, Words, figure

_FRONTIER: untrusted.Shape = [{"tau": (int, float), "accuracy": (int, float)}]
_ENDS = {"accuracy": "overall", "balanced": "mean of all classes", "worst": "worst class"}


def frontier_section(curves: Sequence[Mapping[str, Any]]) -> Section | None:
    """Return the part of a page on whom other decisions of the same training would serve; None without counts.

    Examples:
        >>> rows = [{"tau": tau, "accuracy": 0.9, "balanced": 0.8, "worst": tau / 10} for tau in (0.0, 1.0)]
        >>> section = frontier_section([{"goal": "overall", "tau": 0.0, "frontier": rows}])
        >>> section.blocks[2].rows[1]
        ['1', '90.0', '80.0', '10.0']
    """
    last = curves[-1] if curves else {}
    rows = last.get("frontier")
    if not rows or not untrusted.fits(rows, _FRONTIER):
        return None

    def points(key: str) -> list[tuple[float, float]]:
        return [(float(row["tau"]), _hundred(row.get(key))) for row in rows]

    goal, tau = last.get("goal"), last.get("tau")
    words = Words(
        f"Answers of this run serve the goal {goal} (tau {_number(tau)}). tau is the strength of an offset that lifts "
        "rare labels; it can be moved without training anew and at no further cost. Measured on the held-out records "
        "as they are."
    )
    offset = isinstance(tau, int | float) and not str(goal).startswith("parity")
    chart = figure(
        lambda size: lines(
            {name: points(key) for key, name in _ENDS.items()},
            title="Accuracy overall, of the mean class and of the worst class over tau",
            x_label="tau",
            y_label="correct, %",
            highlight=_ENDS["worst"],
            band=(float(tau), float(tau), f"chosen: tau {_number(tau)}") if offset else None,
            size=size,
        )
    )
    cells = [[_number(row["tau"]), *(f"{_hundred(row.get(key)):.1f}" for key in _ENDS)] for row in rows]
    table = Table(["tau", *(f"{name}, %" for name in _ENDS.values())], cells, "One training, other decisions.")
    move = Commands("evenhand adjust RUN --goal balanced      # or --goal worst, or --tau NUMBER")
    return Section("Whom other decisions would serve", [words, chart, table, move])


def _hundred(value: Any) -> float:
    return 100 * float(value) if isinstance(value, int | float) else math.nan


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "chosen on held-out records"
