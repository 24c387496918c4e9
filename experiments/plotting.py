"""The pictures of docs/results, drawn from the figures in a table and from nothing else.

Built of the report's own parts: methods differ by the shape of their mark as well as by colour, names stand beside the
marks. A picture is a file of its own: it brings colours and a background for light and for dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import correlating
import judging

from evenhand._numbers import interval, quantity
from evenhand.reporting.charts import WIDE, lines
from evenhand.reporting.comparison_charts import mark
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.svg import (
    COLOURS,
    SIZE,
    Plane,
    Point,
    domain,
    drawing,
    hover,
    line,
    spread,
    standalone,
    text,
    tick_text,
    ticks,
)
from evenhand.reporting.text import fit, label, width

MOST = 20
"""Groups that can still be told apart in a picture."""
ROW, HEAD, FOOT, GAP = 18.0, 24.0, 30.0, 26.0


@dataclass(frozen=True)
class Picture:
    """A drawing, and what it shows in words for those who do not see it."""

    words: str
    drawing: str


@dataclass(frozen=True)
class _Mark:
    """One method at one promise: its number among the methods, and where it lies."""

    name: str
    number: int
    across: Estimate
    up: Estimate


def pictures(table: Mapping[str, Any]) -> dict[str, Picture]:
    """Every picture that the figures of an experiment allow, by the end of its file's name."""
    found = {"accuracy": accuracy(table), "groups": groups(table), "budgets": budgets(table)}
    return {name: picture for name, picture in found.items() if picture is not None}


def accuracy(table: Mapping[str, Any]) -> Picture | None:
    """All records against the worst group: a panel per promise, a mark and a cross of two intervals per method."""
    found = [
        (entry, *(_estimate(entry["metrics"].get(name), 100) for name in ("accuracy", "accuracy_group_min")))
        for entry in table["entries"]
        if len(entry["groups"]) > 1
    ]
    known = [(entry, across, up) for entry, across, up in found if across.measured and up.measured]
    if not known:
        return None
    numbers = _numbers(table)
    x_marks, y_marks = (ticks(*domain([end for row in known for end in _ends(row[axis])])) for axis in (1, 2))
    parts, top = [], 0.0
    for at in judging.promises(table):
        marks = [
            _Mark(_named(entry), numbers[entry["method"]], across, up)
            for entry, across, up in known
            if not entry["private"] or judging.promise(entry) == at
        ]
        inner, high = _cross(marks, x_marks, y_marks, at)
        parts.append(f'<g transform="translate(0 {top:g})">{"".join(inner)}</g>')
        top += high
    words = "Accuracy over all records against accuracy of the worst group, with 95 % intervals over seeds"
    told = "; ".join(f"{_named(e)} ({judging.promise(e)}) {a.value:.1f} and {u.value:.1f}" for e, a, u in known)
    return Picture(words, standalone(drawing(WIDE, top, words, f"All records and worst group, in %: {told}.", parts)))


def _cross(
    marks: Sequence[_Mark], x_marks: Sequence[float], y_marks: Sequence[float], at: str
) -> tuple[list[str], float]:
    """One panel with the names at its right, each tied to its mark; also how high it is."""
    beside = min(0.34 * WIDE, max(width(label(each.name), SIZE) for each in marks) + 44)
    bottom = max(290.0, 34 + (SIZE + 5) * len(marks))
    left = 14 + max(width(tick_text(tick, y_marks), SIZE) for tick in y_marks)
    plane = Plane(left, WIDE - beside, 30, bottom, (x_marks[0], x_marks[-1]), x_marks, y_marks)
    parts = [*plane.grid("all records, % correct", "worst group, % correct"), text(plane.right, 13, at, "end")]
    places = spread([plane.at((0.0, each.up.value))[1] for each in marks], SIZE + 5, plane.top, plane.bottom)
    for each, place in zip(marks, places, strict=True):
        x, y = plane.at((each.across.value, each.up.value))
        parts.append(line([(x, y), (plane.right + 8, place)], "currentColor", faint=0.3))
    for each, place in zip(marks, places, strict=True):
        colour, inner = _colour(each.number), []
        x, y = plane.at((each.across.value, each.up.value))
        if math.isfinite(each.across.low):
            ends = [plane.at((end, each.up.value)) for end in (each.across.low, each.across.high)]
            inner.append(line(ends, colour, thick=1.5, faint=0.7))
        if math.isfinite(each.up.low):
            ends = [plane.at((each.across.value, end)) for end in (each.up.low, each.up.high)]
            inner.append(line(ends, colour, thick=1.5, faint=0.7))
        inner += [mark(x, y, each.number), mark(plane.right + 16, place, each.number)]
        inner.append(text(plane.right + 28, place + SIZE * 0.36, fit(label(each.name), SIZE, beside - 32)))
        told = f"{label(each.name)}: all records {_told(each.across)}, worst group {_told(each.up)}"
        parts.append(hover(told, inner))
    return parts, plane.bottom + 54


def groups(table: Mapping[str, Any]) -> Picture | None:
    """What privacy costs every group, a panel per method and promise; without a reference, how accurate it is."""
    costed = any("privacy_cost_groups" in entry for entry in table["entries"])
    key, scale = ("privacy_cost_groups", 1) if costed else ("groups", 100)
    panels = [
        (entry, {name: _estimate(found, scale) for name, found in entry[key].items()})
        for entry in table["entries"]
        if entry.get(key)
    ]
    names = list(dict.fromkeys(name for _, found in panels for name in found))
    if not 1 < len(names) <= MOST:
        return None
    what, unit = ("points lost to privacy", "points") if costed else ("% correct", "%")
    several = len(judging.promises(table)) > 1
    heads = [f"{e['method']}, {judging.promise(e)}" if several else str(e["method"]) for e, _ in panels]
    left = min(170.0, max(width(label(name), SIZE) for name in names) + 16)
    room = max(104.0, *(width(head, SIZE) for head in heads)) + GAP
    columns = max(1, min(len(panels), 5, int((WIDE - left + GAP) // room)))
    wide = (WIDE - left - 14 - GAP * (columns - 1)) / columns
    ends = [end for _, found in panels for each in found.values() if each.measured for end in _ends(each)]
    reach = (min([0.0, *ends]), max([0.0, *ends])) if costed else domain(ends)
    numbers, high, parts = _numbers(table), HEAD + ROW * len(names) + FOOT, []
    for place, ((entry, found), head) in enumerate(zip(panels, heads, strict=True)):
        start, top = left + (place % columns) * (wide + GAP), (place // columns) * high
        if place % columns == 0:
            parts += [
                text(0, top + HEAD + ROW * (row + 0.5) + SIZE * 0.36, fit(label(name), SIZE, left - 8))
                for row, name in enumerate(names)
            ]
        parts.append(text(start, top + 13, fit(label(head), SIZE, wide + GAP), bold=True))
        rows = [found.get(name) for name in names]
        parts.append(hover(_list(head, found), _dots(rows, reach, start, wide, top, numbers[entry["method"]])))
    bottom = high * math.ceil(len(panels) / columns)
    parts.append(text((left + WIDE) / 2, bottom + 10, what, "middle", muted=True))
    words = "Points of accuracy that privacy costs each group" if costed else "Accuracy of each group"
    words = f"{words}, by method, with 95 % intervals over seeds"
    told = " ".join(f"{_list(head, found)} {unit}." for (_, found), head in zip(panels, heads, strict=True))
    return Picture(words, standalone(drawing(WIDE, bottom + 18, words, told, parts)))


def _dots(
    rows: Sequence[Estimate | None], reach: Point, start: float, wide: float, top: float, number: int
) -> list[str]:
    """The grid of one panel, and a mark with its interval in every row."""
    low, high = reach[0], max(reach[1], reach[0] + 1e-9)
    marks = [tick for tick in ticks(low, high, 3 if wide < 200 else 5) if low <= tick <= high]

    def at(value: float) -> float:
        return start + (0.05 + 0.9 * (value - low) / (high - low)) * wide

    parts, bottom = [], top + HEAD + ROW * len(rows)
    for tick in marks:
        strong = 0.5 if tick == 0 else 0.13
        parts.append(line([(at(tick), top + HEAD - 4), (at(tick), bottom)], "currentColor", faint=strong))
        parts.append(text(at(tick), bottom + 15, tick_text(tick, marks), "middle", muted=True))
    for row, found in enumerate(rows):
        if found is None or not found.measured:
            continue
        y = top + HEAD + ROW * (row + 0.5)
        if math.isfinite(found.low):
            parts.append(line([(at(found.low), y), (at(found.high), y)], _colour(number), thick=2, faint=0.75))
        parts.append(mark(at(found.value), y, number))
    return parts


def budgets(table: Mapping[str, Any]) -> Picture | None:
    """What every owner gains over the baseline, by its budget; a line per method."""
    series = correlating.changes(table)
    if not series or not table["baseline"]:
        return None
    words = f"Change in the accuracy of each owner against {table['baseline']}, by the owner's budget"
    drawn = lines(series, title=words, x_label="budget of the owner (epsilon)", y_label="change, points")
    return Picture(words, standalone(drawn))


def _numbers(table: Mapping[str, Any]) -> dict[str, int]:
    """The look of every method: the same on all pictures of a page."""
    return {name: number for number, name in enumerate(dict.fromkeys(entry["method"] for entry in table["entries"]))}


def _named(entry: Mapping[str, Any]) -> str:
    return str(entry["method"]) if entry["private"] else f"{entry['method']} (not private)"


def _colour(number: int) -> str:
    return COLOURS[1:][number % (len(COLOURS) - 1)]


def _estimate(found: Mapping[str, Any] | None, scale: float) -> Estimate:
    """A figure of a table; what is null there was not measured."""
    ends = [None if found is None else found[key] for key in ("value", "low", "high")]
    value, low, high = (math.nan if end is None else scale * end for end in ends)
    return Estimate(value, low, high, 0)


def _ends(found: Estimate) -> list[float]:
    return [end for end in (found.low, found.value, found.high) if math.isfinite(end)]


def _told(found: Estimate) -> str:
    ends = f" ({interval(found.low, found.high, 'points')})" if math.isfinite(found.low) else ""
    return f"{quantity(found.value, '')}{ends}"


def _list(head: str, found: Mapping[str, Estimate]) -> str:
    return f"{label(head)}: " + ", ".join(f"{label(name)} {each.value:.1f}" for name, each in found.items())
