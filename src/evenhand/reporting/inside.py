"""The research part of a comparison's page: what happened to each group's gradients on the training records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evenhand.reporting.dots import dots
from evenhand.reporting.elements import figure, notes, table
from evenhand.reporting.entries import Entry
from evenhand.reporting.frames import Estimate


def inside(entries: Sequence[Entry], numbers: Mapping[str, int], room: int) -> str:
    """Mean gradient norm per group as a chart, with training accuracy and the share above the clip bound in a table.

    Args:
        entries: methods with ``training`` values, all at one promise or not private.
        numbers: the page's number of each group, in the order shown.
        room: groups that are drawn.

    Examples:
        >>> one = Estimate(2.0, 1.0, 3.0, 3)
        >>> made = Entry("dpsgd", 3.0, training={"a": {"norm": one, "accuracy": one, "clipped": one}})
        >>> inside([made], {"a": 0}, 40).count("<svg")
        2
    """
    shown = [entry for entry in entries if entry.training]
    if not shown:
        return ""
    rows = [
        (name, {f"{e.method} ({e.promise})": e.training[name]["norm"] for e in shown if name in e.training})
        for name in numbers
    ]
    title = "Mean gradient norm per group at the end of training"
    chart = figure(lambda size: dots(rows[:room], title=title, unit="gradient norm", numbers=numbers, size=size))
    head = ["group"]
    for entry in shown:
        head += [f"{entry.method}: norm", "above bound, %", "correct, %"]
    cells = [[name, *(cell for entry in shown for cell in _cells(entry.training.get(name, {})))] for name in numbers]
    remark = "Training records, at most 5,000; means and 95 % intervals over seeds. What is above the bound is cut."
    return chart + notes([remark]) + f'<div class="wide">{table(head, cells)}</div>'


def _cells(found: Mapping[str, Estimate]) -> list[str]:
    norm, clipped, accuracy = (found.get(name) for name in ("norm", "clipped", "accuracy"))
    return [
        "" if norm is None else f"{norm.value:.3g}",
        "" if clipped is None else f"{100 * clipped.value:.0f}",
        "" if accuracy is None else f"{100 * accuracy.value:.1f}",
    ]
