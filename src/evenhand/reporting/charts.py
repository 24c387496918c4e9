"""Draws bar and line charts as SVG: readable without colour, script or network.

Every chart has a title and a description for screen readers, and its parts carry hover texts. A chart is drawn for a
width (``WIDE`` for pages and print, ``NARROW`` for phones) and scales from there, so its letters stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evenhand._numbers import count, interval, promised, quantity
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out.small_cells import hidden, instead
from evenhand.reporting.svg import (
    BAR,
    COLOURS,
    DASHES,
    SIZE,
    STRONG,
    Plane,
    Point,
    box,
    domain,
    drawing,
    hover,
    in_group,
    line,
    shaded,
    spread,
    text,
    thin,
    tick_text,
    ticks,
    whisker,
)
from evenhand.reporting.text import fit, label, width

WIDE, NARROW = 760, 340
LABELLED = 11  # series with a look and a label of their own; the others are drawn in grey
_TAG = "worst"
_ASIDE = 130  # room beside a name that stands above its bar, for value and number of records
_NAMED = 12  # names read out in a description; the table under the chart has all


@dataclass(frozen=True)
class _Rows:
    """Layout of the rows of a bar chart; ``stacked`` puts each name above its bar."""

    size: int
    unit: str
    stacked: bool
    tall: float
    thick: float
    left: float
    right: float
    marks: Sequence[float]
    reference: float
    baseline: float = math.nan

    @property
    def left_for_names(self) -> float:
        return self.size - _ASIDE - _tag_width()

    @property
    def scale(self) -> int:
        return 100 if self.unit == "%" else 1

    def at(self, value: float) -> float:
        share = (self.scale * value - self.marks[0]) / (self.marks[-1] - self.marks[0])
        return self.left + share * (self.right - self.left)

    def draw(self, name: str, estimate: Estimate, top: float, tagged: bool, number: int | None) -> str:
        """Return one row: track, bar, whisker, name and numbers."""
        value, counted = quantity(estimate.value, self.unit, estimate.count), count(estimate.count)
        ends = interval(estimate.low, estimate.high, self.unit, estimate.count)
        upper = top + (self.tall - self.thick - 8 if self.stacked else (self.tall - self.thick) / 2)
        words = top + 15 if self.stacked else top + self.tall / 2 + SIZE * 0.36
        across = (upper - 5, upper + self.thick + 5) if self.stacked else (top, top + self.tall)
        parts = [box(self.left, upper, self.right - self.left, self.thick, "currentColor", faint=0.06)]
        if estimate.measured:
            start, end = sorted((self.at(0), self.at(estimate.value)))
            parts.append(box(start, upper, end - start, self.thick, STRONG if tagged else BAR))
            parts.append(whisker(self.at(estimate.low), self.at(estimate.high), upper + self.thick / 2))
        if math.isfinite(self.baseline):
            parts.append(line([(self.at(self.baseline), end) for end in across], "currentColor", thick=2, dash="1 3"))
        if math.isfinite(self.reference):
            parts.append(line([(self.at(self.reference), end) for end in across], "currentColor", dash="4 3"))
        missing = instead(estimate, "not measured: no held-out records")
        numbers = f"{value} ({ends}), {counted} records" if estimate.measured else missing
        aside = f"{value} of {counted}" if estimate.measured else blank(estimate)
        if self.stacked:
            *above, shown = wrapped(label(name), SIZE * 1.1, self.left_for_names)
            words = upper - 7
            first = words - 15 * len(above)
            parts += [text(1, first + 15 * place, row, bold=tagged) for place, row in enumerate(above)]
        else:
            shown = label(name)
        parts.append(text(1, words, shown, bold=tagged))
        if tagged:
            parts.append(text(width(shown, SIZE * 1.05) + 6, words, _TAG, muted=True))
        if self.stacked:
            parts.append(text(self.size, words, aside, "end", bold=tagged))
        elif estimate.measured:
            parts.append(text(self.size - 166, words, value, "end", bold=tagged))
            parts.append(text(self.size - 66, words, ends, "end", muted=True))
            parts.append(text(self.size, words, counted, "end", muted=True))
        else:
            parts.append(text(self.size, words, aside, "end", muted=True))
        return hover(f"{label(name)}: {numbers}", parts, label(name, 60), number)


def wrapped(words: str, size: float, room: float) -> list[str]:
    """Return a name on as many lines as it needs; a word that is longer than a line is broken.

    Examples:
        >>> wrapped("race = Native American", 13, 110)
        ['race = Native', 'American']
    """
    lines: list[str] = [""]
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if width(longer, size) <= room:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and width(lines[-1] + character, size) > room:
                lines.append("")
            lines[-1] += character
    return lines


def blank(estimate: Estimate) -> str:
    """Return the short form of what stands in place of a figure; hovering and the remarks give the reason.

    Examples:
        >>> blank(Estimate(math.nan, math.nan, math.nan, 10)), blank(Estimate(math.nan, 0.0, 1.0, 0))
        ('left out', 'not measured')
    """
    return "left out" if hidden(estimate) else "not measured"


def _tag_width() -> float:
    return width(_TAG, SIZE) + 12


def bars(
    rows: Sequence[tuple[str, Estimate]],
    *,
    title: str,
    unit: str = "%",
    reference: tuple[str, Estimate] | None = None,
    numbers: Mapping[str, int] | None = None,
    worst: str | None = None,
    baseline: tuple[str, float] | None = None,
    size: int = WIDE,
) -> str:
    """Return horizontal bars in the given order with intervals, values and counts; no name is cut.

    Args:
        rows: name and estimate of each bar.
        title: what the chart shows, for screen readers and hovering.
        unit: ``"%"`` when the values are shares, otherwise printed after the value.
        reference: name and estimate of a line across all bars, such as the overall accuracy.
        numbers: by which number the page's script knows each group.
        worst: the row that is marked as worst, in the colour that stands for it on the whole page.
        baseline: name and value of a dotted line across all bars, such as the share of the largest class.
        size: width of the drawing; below 520, or where names are long, names stand above their bars.

    Examples:
        >>> drawing = bars([("class 0", Estimate(0.98, 0.93, 0.99, 45))], title="Accuracy")
        >>> drawing.startswith("<svg") and "class 0" in drawing
        True
    """
    many = len(rows) > 20
    names = max((width(label(name), SIZE * 1.1) for name, _ in rows), default=0.0)
    stacked = size < 520 or names + _tag_width() + 14 > 0.34 * size
    room = size - _ASIDE - _tag_width()
    deep = max((len(wrapped(label(name), SIZE * 1.1, room)) for name, _ in rows), default=1) if stacked else 1
    tall = 42.0 + 15 * (deep - 1) if stacked else 22.0 if many else 30.0
    left = 0.0 if stacked else min(0.34 * size, names + _tag_width() + 14)
    ends = [end for _, e in rows if e.measured for end in (e.low, e.value, e.high)]
    marks = [0.0, 20, 40, 60, 80, 100] if unit == "%" else ticks(min([0.0, *ends]), max([0.0, *ends]))
    thick = 12.0 if stacked else tall - (8 if many else 14)
    across = math.nan if reference is None else reference[1].value
    constant = math.nan if baseline is None else baseline[1]
    layout = _Rows(size, unit, stacked, tall, thick, left, size - (0 if stacked else 224), marks, across, constant)
    top = 24.0
    bottom = top + tall * len(rows)
    parts = []
    for mark in marks:
        x = layout.at(mark / layout.scale)
        side = "start" if stacked and mark == marks[0] else "end" if stacked and mark == marks[-1] else "middle"
        parts.append(line([(x, top), (x, bottom + 4)], "currentColor", faint=0.13))
        parts.append(text(x, bottom + 19, tick_text(mark, marks) + ("%" if unit == "%" else ""), side, muted=True))
    if not stacked:
        parts.append(text(size - 66, 14, "95 % interval", "end", muted=True))
        parts.append(text(size, 14, "records", "end", muted=True))
    known = numbers or {}
    parts += [layout.draw(name, e, top + tall * i, name == worst, known.get(name)) for i, (name, e) in enumerate(rows)]
    if reference and math.isfinite(across):
        words = f"{label(reference[0], 20)} {quantity(across, unit, reference[1].count)}"
        half = width(words, SIZE) / 2
        parts.append(text(min(max(layout.at(across), left + half), layout.right - half), 14, words, "middle"))
    below = 26
    if baseline and math.isfinite(constant):
        words = f"dotted: {label(baseline[0])} {quantity(constant, unit)}"
        parts.append(text(left, bottom + 38, words, muted=True))
        below = 46
    told = [f"{label(name, 60)} {quantity(e.value, unit)}" for name, e in rows[:_NAMED]]
    more = f"; and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return drawing(
        size, bottom + below, title, f"{len(rows)} bars with 95 % intervals: {'; '.join(told)}{more}.", parts
    )


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    highlight: str | None = None,
    limits: Mapping[str, float] | None = None,
    band: tuple[float, float, str] | None = None,
    numbers: Mapping[str, int] | None = None,
    printed: Callable[[float], str] = "{:.3g}".format,
    size: int = WIDE,
) -> str:
    """Return lines with their names at their ends, told apart by dashes as well as by colour.

    The highlighted series and the first ones (``LABELLED`` in all) get a look and a label, the others are grey context.

    Args:
        series: points (x, y) by name; points that are not finite are left out.
        title: what the chart shows, for screen readers and hovering.
        x_label: what the horizontal axis measures.
        y_label: what the vertical axis measures, with its unit.
        highlight: name of the series that is drawn on top and thicker.
        limits: values that a series must not exceed, by series name or by any other words: dashed horizontal lines.
        band: a stretch of the horizontal axis to shade, and the words for it; a stretch of no length becomes a line.
        numbers: by which number the page's script knows each series.
        printed: how a value of the vertical axis is written in words.
        size: width of the drawing.

    Examples:
        >>> drawing = lines({"all": [(0, 0.0), (10, 2.9)]}, title="T", x_label="step", y_label="e", limits={"all": 3.0})
        >>> "all: at most 3" in drawing
        True
    """
    drawn = {name: points for name, given in series.items() if (points := thin(given))}
    if not drawn:
        return drawing(size, 40, title, "Nothing to draw.", [text(0, 24, "Nothing was recorded.", muted=True)])
    limits, known = limits or {}, numbers or {}
    order = sorted(drawn, key=lambda name: name != highlight)
    looks = _looks(order[:LABELLED], highlight, dashed=not limits)
    xs, ys = ([point[axis] for points in drawn.values() for point in points] for axis in (0, 1))
    x_range = (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 1, xs[0] + 1)
    x_marks = [mark for mark in ticks(*x_range, 4 if size < 520 else 8) if x_range[0] <= mark <= x_range[1]]
    y_marks = ticks(*domain([*ys, *limits.values()]))
    beside = max(width(label(name), SIZE * 1.1) for name in looks) + 40
    below = beside > (0.35 if size < 520 else 0.27) * size
    beside = 6 + max((width(tick_text(mark, x_marks), SIZE) / 2 for mark in x_marks), default=8.0) if below else beside
    left = 12 + max(width(tick_text(mark, y_marks), SIZE) for mark in y_marks)
    plane = Plane(
        left, size - beside, 42 if limits or band else 30, 290 if size < 520 else 350, x_range, x_marks, y_marks
    )
    parts = [*shaded(plane, band), *plane.grid(x_label, y_label)]
    for name in order[LABELLED:]:
        parts.append(_curve(plane, name, drawn[name], ("currentColor", "", 1), 0.22, known.get(name), printed))
    for name, limit in limits.items():
        colour, (_, y) = looks.get(name, ("currentColor",))[0], plane.at((0.0, limit))
        parts.append(line([(plane.left, y), (plane.right, y)], colour, thick=1.5, dash="6 4"))
    for name, look in reversed(looks.items()):
        parts.append(_curve(plane, name, drawn[name], look, 1.0, known.get(name), printed))
    places = {name: plane.at(drawn[name][-1])[1] for name in looks}
    if below:
        key, bottom = _key_below(looks, highlight, known, plane, places, size)
    else:
        key, bottom = _key_beside(looks, highlight, known, plane, places), plane.bottom + 46
    parts += key
    told_limits = list(limits.items())[:LABELLED]
    heights = [plane.at((0.0, limit))[1] - 6 for _, limit in told_limits]
    for (name, limit), y in zip(told_limits, spread(heights, SIZE + 3, plane.top - 6, plane.bottom), strict=True):
        parts.append(
            text(plane.right - 4, y, f"{fit(label(name), SIZE, 0.4 * size)}: at most {promised(limit)}", "end")
        )
    told = "; ".join(f"{label(name, 60)} ends at {printed(drawn[name][-1][1])}" for name in order[:_NAMED])
    rest = f"; {len(order) - LABELLED} more in grey" if len(order) > LABELLED else ""
    described = f"{y_label} over {x_label}, {min(xs):g} to {max(xs):g}: {told}{rest}."
    return drawing(size, bottom, title, described, parts, plane.scale(x_label))


_Look = tuple[str, str, float]


def _key_beside(
    looks: Mapping[str, _Look],
    highlight: str | None,
    known: Mapping[str, int],
    plane: Plane,
    ends: Mapping[str, float],
) -> list[str]:
    """Return the name of each series at its end."""
    parts = []
    places = spread(list(ends.values()), SIZE + 3, plane.top, plane.bottom)
    for (name, (colour, dash, thick)), place in zip(looks.items(), places, strict=True):
        x = plane.right
        key = [
            line([(x + 2, ends[name]), (x + 12, place)], colour, faint=0.6),
            line([(x + 12, place), (x + 32, place)], colour, thick=thick, dash=dash),
            text(x + 37, place + SIZE * 0.36, label(name), bold=name == highlight),
        ]
        parts.append(in_group(key, known.get(name)))
    return parts


def _key_below(
    looks: Mapping[str, _Look],
    highlight: str | None,
    known: Mapping[str, int],
    plane: Plane,
    ends: Mapping[str, float],
    size: int,
) -> tuple[list[str], float]:
    """Return the names of all series under the chart, on as many lines as they need, and how far down they reach."""
    parts, x, y = [], 0.0, plane.bottom + 62
    for name, (colour, dash, thick) in looks.items():
        rows = wrapped(label(name), SIZE * 1.1, size - 32)
        wide = max(width(row, SIZE * 1.1) for row in rows) + 44
        if x and x + wide - 12 > size:
            x, y = 0.0, y + 20
        key = [
            line([(plane.right, ends[name]), (plane.right + 5, ends[name])], colour, faint=0.6),
            line([(x, y - 4), (x + 20, y - 4)], colour, thick=thick, dash=dash),
        ]
        key += [text(x + 26, y + 16 * place, row, bold=name == highlight) for place, row in enumerate(rows)]
        parts.append(in_group(key, known.get(name)))
        x, y = x + wide, y + 16 * (len(rows) - 1)
    return parts, y + 10


def multiples(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    whole: str,
    highlight: str | None = None,
    numbers: Mapping[str, int] | None = None,
    printed: Callable[[float], str] = "{:.3g}".format,
    size: int = WIDE,
) -> str:
    """Return one small panel per series, all with the same axes, and the series ``whole`` as a grey line in each.

    No name is cut. The highlighted series has the colour that stands for the worst group on the whole page.

    Examples:
        >>> curves = {"overall": [(0, 10.0), (1, 90.0)], "a": [(0, 5.0), (1, 70.0)]}
        >>> drawing = multiples(curves, title="T", x_label="epoch", y_label="correct, %", whole="overall")
        >>> drawing.count("<polyline"), "overall in grey" in drawing
        (4, True)
    """
    drawn = {name: points for name, given in series.items() if (points := thin(given))}
    panels = [name for name in drawn if name != whole]
    across = 2 if size < 520 else 4
    points = [point for given in drawn.values() for point in given]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    x_range = (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 1, xs[0] + 1)
    y_marks = ticks(*domain(ys), 2)
    wide = size / across
    names = {name: wrapped(label(name), SIZE * 1.1, wide - 16) for name in panels}
    deep, known = 16.0 * max(map(len, names.values()), default=1), numbers or {}
    left = 8 + max(width(tick_text(mark, y_marks), SIZE) for mark in y_marks)
    tall, parts = deep + 112, [text(0, 13, f"{y_label} over {x_label}; {whole} in grey", muted=True)]
    for place, name in enumerate(panels):
        top, start = 26 + tall * (place // across), wide * (place % across)
        over = top + deep + 12
        plane = Plane(start + left, start + wide - 10, over, over + 68, x_range, list(x_range), y_marks)
        inside = [
            *(text(start, top + 12 + 16 * row, words, bold=name == highlight) for row, words in enumerate(names[name])),
            *_axes(plane),
        ]
        if whole in drawn:
            inside.append(line([plane.at(point) for point in drawn[whole]], "currentColor", faint=0.35))
        look = (STRONG, "", 3.0) if name == highlight else (BAR, "", 2.0)
        inside.append(_curve(plane, name, drawn[name], look, 1.0, None, printed))
        parts.append(in_group(inside, known.get(name)))
    told = "; ".join(f"{label(name, 60)} ends at {printed(drawn[name][-1][1])}" for name in panels[:_NAMED])
    rows = -(-len(panels) // across)
    return drawing(size, 26 + tall * rows, title, f"{len(panels)} panels: {told}.", parts)


def _axes(plane: Plane) -> list[str]:
    """Return the ends of both axes of a small panel."""
    parts = []
    for mark in (plane.y_marks[0], plane.y_marks[-1]):
        _, y = plane.at((plane.x_range[0], mark))
        parts.append(line([(plane.left, y), (plane.right, y)], "currentColor", faint=0.2))
        parts.append(text(plane.left - 4, y + 4, tick_text(mark, plane.y_marks), "end", muted=True))
    for mark, side in zip(plane.x_range, ("start", "end"), strict=True):
        x, _ = plane.at((mark, plane.y_marks[0]))
        parts.append(text(x, plane.bottom + 15, f"{mark:.3g}", side, muted=True))
    return parts


def _looks(names: Sequence[str], highlight: str | None, dashed: bool) -> dict[str, _Look]:
    """Return colour, dashes and thickness of each labelled series; no two alike unless dashes are kept for limits."""
    looks = {name: (STRONG, "", 3.0) for name in names if name == highlight}
    for i, name in enumerate(name for name in names if name != highlight):
        dash = DASHES[(i // len(COLOURS) + i % 2) % len(DASHES)] if dashed else ""
        looks[name] = (COLOURS[i % len(COLOURS)], dash, 2.0 if i == 0 else 1.5)
    return looks


def _curve(
    plane: Plane,
    name: str,
    points: Sequence[Point],
    look: _Look,
    faint: float,
    number: int | None,
    printed: Callable[[float], str],
) -> str:
    """Return one series with its hover text; a single point becomes a short dash."""
    colour, dash, thick = look
    placed = [plane.at(point) for point in points]
    if len(placed) == 1:
        placed = [(placed[0][0] - 4, placed[0][1]), (placed[0][0] + 4, placed[0][1])]
    told = f"{label(name)}: {printed(points[0][1])} to {printed(points[-1][1])}"
    return hover(told, [line(placed, colour, thick=thick, dash=dash, faint=faint)], label(name, 60), number)
