"""Draws charts that compare methods: estimates group by group, and accuracy of all and of the worst over promises.

Methods differ by the shape of their mark as well as by colour; a legend names them above the chart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand._numbers import interval, quantity
from evenhand.reporting.charts import WIDE, blank, wrapped
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out.small_cells import instead
from evenhand.reporting.svg import (
    COLOURS,
    PAGE,
    SIZE,
    STRONG,
    Point,
    domain,
    drawing,
    hover,
    line,
    text,
    tick_text,
    ticks,
)
from evenhand.reporting.text import fit, label, width

_SHAPES = (
    "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "m-4.5 -4.5h9v9h-9z",
    "m0 -6.5l6 6.5l-6 6.5l-6 -6.5z",
    "m0 -6l6 10.5h-12z",
    "m0 6l6 -10.5h-12z",
    "m-6 -2h4v-4h4v4h4v4h-4v4h-4v-4h-4z",
)


@dataclass(frozen=True)
class MethodLine:
    """One line of ``accuracy_by_promise``: estimates of one method; ``worst`` draws it dashed, marks hollow."""

    name: str
    values: Mapping[str, Estimate]
    method: int
    worst: bool = False


def mark(x: float, y: float, number: int, *, hollow: bool = False) -> str:
    """Return the mark of the method with this number.

    Examples:
        >>> mark(0, 0, 1).startswith('<path d="M0.0 0.0m-4.5')
        True
    """
    colour = _colour(number)
    route = f"M{x:.1f} {y:.1f}{_SHAPES[number % len(_SHAPES)]}"
    inside, edge = (PAGE, colour) if hollow else (colour, PAGE)
    return f'<path d="{route}" fill="{inside}" stroke="{edge}" stroke-width="{2 if hollow else 1}"/>'


def dots(
    rows: Sequence[tuple[str, Mapping[str, Estimate]]],
    *,
    title: str,
    unit: str,
    numbers: Mapping[str, int] | None = None,
    worst: Collection[str] = (),
    size: int = WIDE,
) -> str:
    """Return a chart with one row per group, a mark and an interval for each method; no name is cut.

    Args:
        rows: group and its estimates by method.
        title: what the chart shows, for screen readers.
        unit: ``"%"`` when the values are shares, otherwise printed after the value.
        numbers: by which number the page's script knows each group.
        worst: groups that are named as worst, in the colour that stands for it on the whole page.
        size: width of the drawing; below 520, or where names are long, names stand above their rows.

    Examples:
        >>> drawing = dots([("class 8", {"dpsgd": Estimate(41.0, 30.0, 52.0, 3)})], title="Cost", unit="points")
        >>> "class 8" in drawing and "dpsgd" in drawing
        True
    """
    known = numbers or {}
    methods = list(dict.fromkeys(name for _, estimates in rows for name in estimates))
    scale = 100 if unit == "%" else 1
    ends = [scale * end for _, estimates in rows for e in estimates.values() for end in (e.low, e.value, e.high)]
    finite = [end for end in ends if math.isfinite(end)] or [0.0, 1.0]
    marks = ticks(*(domain(finite) if unit == "%" else (min(0.0, *finite), max(1.0, *finite))))
    names = max((width(label(name), SIZE * 1.1) for name, _ in rows), default=0.0)
    stacked = size < 520 or names + 14 > 0.3 * size
    left = 16.0 if stacked else names + 14
    right = size - (12.0 if stacked else 24.0)
    deep = max((len(wrapped(label(name), SIZE * 1.1, size - 12)) for name, _ in rows), default=1) if stacked else 1
    above, pitch = (5.0 + 15 * deep if stacked else 4.0), 16.0
    tall = above + pitch * max(1, len(methods)) + 6
    key, top = legend(methods, size)
    bottom = top + tall * len(rows)

    def at(value: float) -> float:
        return left + (min(max(value, marks[0]), marks[-1]) - marks[0]) / (marks[-1] - marks[0]) * (right - left)

    parts = list(key)
    for tick in marks:
        strong = 0.5 if tick == 0 else 0.13
        parts.append(line([(at(tick), top), (at(tick), bottom + 4)], "currentColor", faint=strong))
        parts.append(text(at(tick), bottom + 19, tick_text(tick, marks), "middle", muted=True))
    parts.append(text((left + right) / 2, bottom + 38, "correct, %" if unit == "%" else unit, "middle", muted=True))
    for place, (name, estimates) in enumerate(rows):
        y = top + tall * place
        inner = [line([(0, y), (size, y)], "currentColor", faint=0.08)]
        middle = y + (14 if stacked else tall / 2 + SIZE * 0.36)
        shown = wrapped(label(name), SIZE * 1.1, size - 12) if stacked else [label(name)]
        look: dict[str, Any] = {"bold": True, "colour": STRONG} if name in worst else {}
        inner += [text(1, middle + 15 * row, words, **look) for row, words in enumerate(shown)]
        told = []
        missing = [e for e in estimates.values() if not e.measured]
        if missing and len(missing) == len(estimates):
            told.append(instead(missing[0]))
            inner.append(text(left + 8, y + above + 13 if stacked else middle, blank(missing[0]), muted=True))
        for row, method in enumerate(methods):
            if method not in estimates or not estimates[method].measured:
                continue
            e, line_y = estimates[method], y + above + pitch * (row + 0.5) + 1
            if math.isfinite(e.low):
                ends_at = [(at(scale * e.low), line_y), (at(scale * e.high), line_y)]
                inner.append(line(ends_at, _colour(row), thick=2, faint=0.75))
            inner.append(mark(at(scale * e.value), line_y, row))
            told.append(f"{label(method, 40)} {quantity(e.value, unit)}{_interval(e, unit)}")
        parts.append(hover(f"{label(name)}: {'; '.join(told)}", inner, label(name, 60), known.get(name)))
    first = "; ".join(f"{label(name, 60)}" for name, _ in rows[:12])
    return drawing(size, bottom + 46, title, f"{len(rows)} groups, {len(methods)} methods: {first}.", parts)


def accuracy_by_promise(climbs: Sequence[MethodLine], places: Sequence[str], *, title: str, size: int = WIDE) -> str:
    """Return accuracy over the promises, equally spaced: each method's line of all records and of the worst group.

    Args:
        climbs: the lines.
        places: the promises in order, as they are written under the axis.
        title: what the chart shows, for screen readers.
        size: width of the drawing.

    Examples:
        >>> line = MethodLine("dpsgd, overall", {"epsilon 3": Estimate(0.9, 0.8, 1.0, 3)}, 0)
        >>> "epsilon 3" in accuracy_by_promise([line], ["epsilon 3"], title="Accuracy")
        True
    """
    key, top = legend([climb.name for climb in climbs], size, climbs)
    left, right, bottom = 42.0, size - 12.0, top + (230 if size < 520 else 300)
    gap = (right - left) / len(places)
    ends = [100 * end for climb in climbs for e in climb.values.values() for end in (e.low, e.value, e.high)]
    marks = ticks(*domain([end for end in ends if math.isfinite(end)] or [0.0, 100.0]))

    def at(place: int, number: int, value: float) -> Point:
        aside = (number - (len(climbs) - 1) / 2) * min(9.0, 0.5 * gap / max(1, len(climbs)))
        up = (100 * value - marks[0]) / (marks[-1] - marks[0])
        return left + gap * (place + 0.5) + aside, bottom - (bottom - top - 8) * up

    parts = list(key)
    for tick in marks:
        y = at(0, 0, tick / 100)[1]
        parts.append(line([(left, y), (right, y)], "currentColor", faint=0.13))
        parts.append(text(left - 8, y + 4, tick_text(tick, marks), "end", muted=True))
    for place, name in enumerate(places):
        rows = [name] if width(name, SIZE) < gap else name.split(" ", 1)
        for row, words in enumerate(rows):
            shown = fit(label(words), SIZE, gap - 4)
            parts.append(text(left + gap * (place + 0.5), bottom + 20 + 16 * row, shown, "middle", muted=True))
    for number, climb in enumerate(climbs):
        values = [(i, climb.values[name]) for i, name in enumerate(places) if name in climb.values]
        measured = [(i, e) for i, e in values if e.measured]
        route = [at(i, number, e.value) for i, e in measured]
        if len(route) > 1:
            parts.append(line(route, _colour(climb.method), thick=2, dash="5 4" if climb.worst else ""))
        for (i, e), (x, y) in zip(measured, route, strict=True):
            reach = [(x, at(i, number, end)[1]) for end in (e.low, e.high)] if math.isfinite(e.low) else []
            inner = [line(reach, _colour(climb.method), thick=1.5, faint=0.8)] if reach else []
            inner.append(mark(x, y, climb.method, hollow=climb.worst))
            words = f"{label(climb.name, 60)}, {places[i]}: {quantity(e.value, '%')}{_interval(e, '%')}"
            parts.append(hover(words, inner, label(climb.name, 60)))
    told = "; ".join(label(climb.name, 60) for climb in climbs)
    return drawing(size, bottom + 42, title, f"Correct, %, at {', '.join(places)}: {told}.", parts)


def legend(names: Sequence[str], size: int, climbs: Sequence[MethodLine] = ()) -> tuple[list[str], float]:
    """Return marks with their names in as many lines as needed, and the height at which the chart may start.

    Examples:
        >>> legend(["dpsgd"], 760)[1]
        34.0
    """
    parts, x, y = [], 8.0, 12.0
    for number, name in enumerate(names):
        shown = fit(label(name), SIZE, size - 40)
        wide = width(shown, SIZE) + 38
        if x > 8 and x + wide > size:
            x, y = 8.0, y + 20
        climb = climbs[number] if climbs else None
        parts.append(mark(x, y, climb.method if climb else number, hollow=climb is not None and climb.worst))
        parts.append(text(x + 12, y + SIZE * 0.36, shown))
        x += wide
    return parts, y + 22


def _colour(number: int) -> str:
    return COLOURS[1:][number % (len(COLOURS) - 1)]


def _interval(estimate: Estimate, unit: str) -> str:
    return f" ({interval(estimate.low, estimate.high, unit)})" if math.isfinite(estimate.low) else ""
