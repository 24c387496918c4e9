"""Writes the SVG elements that charts are made of, and places them: ticks, labels, points, the plane of a line chart.

Colours are the Okabe-Ito palette through CSS variables with fallbacks, so a chart follows the page into dark mode and
still stands on its own. Presentation attributes only: a page whose content policy forbids styles can show them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evenhand.reporting.text import escape, fit, width

STRONG = "var(--eh-strong,#d55e00)"
BAR = "var(--eh-bar,#0072b2)"
PAGE = "var(--eh-page,#fff)"
COLOURS = (
    "currentColor",
    "var(--eh-blue,#0072b2)",
    "var(--eh-green,#009e73)",
    "var(--eh-purple,#cc79a7)",
    "var(--eh-orange,#e69f00)",
    "var(--eh-sky,#56b4e9)",
)
DASHES = ("", "7 3", "2 3", "9 3 2 3")
SIZE = 13
_LIGHT = (
    "color:#1d2329;--eh-page:#fff;--eh-strong:#d55e00;--eh-blue:#0072b2;--eh-green:#009e73;--eh-purple:#b8558b;"
    "--eh-orange:#c78500;--eh-sky:#2f93cf"
)
_DARK = (
    "color:#e4e8ec;--eh-page:#14181c;--eh-strong:#f5803e;--eh-blue:#3f9bd8;--eh-green:#1fbf92;--eh-purple:#dd9cc1;"
    "--eh-orange:#f0b23a;--eh-sky:#8accf2"
)
_COLOURS_OF_ITS_OWN = f"<style>svg{{{_LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{_DARK}}}}}</style>"

Point = tuple[float, float]


def drawing(width: float, height: float, title: str, description: str, parts: Sequence[str], scale: str = "") -> str:
    """Return a whole drawing that scales to its window; ``scale`` lets the script read values off it.

    Examples:
        >>> drawing(10, 5, "T", "D", []).endswith("<title>T</title><desc>D</desc></svg>")
        True
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"{scale} '
        f'font-family="system-ui,sans-serif" font-size="{SIZE}" fill="currentColor" stroke="{PAGE}" stroke-width="3" '
        'stroke-linejoin="round" paint-order="stroke">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def standalone(drawn: str) -> str:
    """Return a drawing as a file: with a margin, a background, and colours that follow a light or dark screen.

    Examples:
        >>> 'viewBox="-16 -12 42 29"' in standalone(drawing(10, 5, "T", "D", []))
        True

    Raises:
        ValueError: for anything but what ``drawing`` returns.
    """
    area = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    if area is None:
        raise ValueError("not a drawing of evenhand.reporting")
    wide, high = float(area[1]) + 32, float(area[2]) + 24
    behind = f'<rect x="-16" y="-12" width="{wide:g}" height="{high:g}" fill="var(--eh-page)" stroke="none"/>'
    framed = drawn.replace(area[0], f'viewBox="-16 -12 {wide:g} {high:g}"', 1)
    return framed.replace("</desc>", f"</desc>{_COLOURS_OF_ITS_OWN}{behind}", 1) + "\n"


def text(
    x: float, y: float, words: str, anchor: str = "start", *, muted: bool = False, bold: bool = False, colour: str = ""
) -> str:
    """Return one line of text; the stroke it inherits is a halo in the page's colour, readable on top of lines.

    Examples:
        >>> "&lt;b&gt;" in text(0, 0, "<b>")
        True
    """
    look = (' fill-opacity=".7"' if muted else "") + (' font-weight="650"' if bold else "")
    look += f' fill="{colour}"' if colour else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{place}{look}>{escape(words)}</text>'


def line(points: Sequence[Point], colour: str, *, thick: float = 1.0, dash: str = "", faint: float = 1.0) -> str:
    """Return a line through the points.

    Examples:
        >>> line([(0, 0), (1, 2)], "currentColor")
        '<polyline points="0,0 1,2" fill="none" stroke="currentColor" stroke-width="1"/>'
    """
    route = " ".join(f"{round(x, 1):g},{round(y, 1):g}" for x, y in points)
    look = (f' stroke-dasharray="{dash}"' if dash else "") + (f' stroke-opacity="{faint:g}"' if faint < 1 else "")
    return f'<polyline points="{route}" fill="none" stroke="{colour}" stroke-width="{thick:g}"{look}/>'


def whisker(low: float, high: float, y: float) -> str:
    """Return an interval with ends, on a halo.

    Examples:
        >>> whisker(1, 3, 9).count("<p")
        2
    """
    route = f"M{low:.1f} {y - 4:g}v8m0-4H{high:.1f}m0-4v8"
    ends = f'<path d="{route}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return line([(low, y), (high, y)], PAGE, thick=3.5) + ends


def box(x: float, y: float, width: float, height: float, colour: str, *, faint: float = 1.0) -> str:
    """Return a filled rectangle with slightly rounded corners.

    Examples:
        >>> box(0, 0, 2, 1, "red")
        '<rect x="0.0" y="0.0" width="2.0" height="1.0" rx="2" stroke="none" fill="red"/>'
    """
    look = f' fill-opacity="{faint:g}"' if faint < 1 else ""
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {where} rx="2" stroke="none" fill="{colour}"{look}/>'


def hover(words: str, parts: Sequence[str], name: str = "", number: int | None = None) -> str:
    """Return parts that show these words under the pointer; ``number`` is the group that they belong to.

    Examples:
        >>> hover("74 %", [], "class 8", 3)
        '<g data-n="class 8" data-g="3"><title>74 %</title></g>'
    """
    named = f' data-n="{escape(name)}"' if name else ""
    return f"<g{named}{_group(number)}><title>{escape(words)}</title>{''.join(parts)}</g>"


def in_group(parts: Sequence[str], number: int | None) -> str:
    """Return parts that are shown and hidden with a group.

    Examples:
        >>> in_group(["<path/>"], 3), in_group(["<path/>"], None)
        ('<g data-g="3"><path/></g>', '<path/>')
    """
    return "".join(parts) if number is None else f"<g{_group(number)}>{''.join(parts)}</g>"


def _group(number: int | None) -> str:
    return "" if number is None else f' data-g="{number}"'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) that enclose ``low`` to ``high`` in about ``count`` steps.

    Examples:
        >>> ticks(0, 2.98)
        [0.0, 1.0, 2.0, 3.0]
        >>> ticks(0.5, 98)
        [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
        >>> len(set(ticks(65.71428571428571, 65.71428571428572))) > 1
        True
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, but for rounding
        low, high = low - 0.5, low + 0.5
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, all_ticks: Sequence[float]) -> str:
    """Return a tick with as many decimals as its neighbours need.

    Examples:
        >>> tick_text(1000.0, [0.0, 1000.0]), tick_text(0.5, [0.0, 0.5, 1.0])
        ('1,000', '0.5')
    """
    step = min((b - a for a, b in pairwise(all_ticks)), default=1.0)
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def domain(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis: from zero, unless all values are positive and lie in the upper half of that range.

    Examples:
        >>> domain([5.0, 98.0]), domain([90.0, 98.0])
        ((0.0, 98.0), (90.0, 98.0))
    """
    low, high = min(values), max(values)
    return (min(0.0, low), high) if low < high / 2 or low == high else (low, high)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions moved as little as possible so that any two are ``gap`` apart and inside ``low`` to ``high``.

    Least squares under an order constraint: isotonic regression of ``wanted[i] - i * gap`` by pooling neighbours.

    Examples:
        >>> spread([10, 11, 50], 4, 0, 100)
        [8.5, 12.5, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        total, size = wanted[i] - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / size:
            previous = pools.pop()
            total, size = total + previous[0], size + previous[1]
        pools.append((total, size))
    centres = [total / size for total, size in pools for _ in range(size)]
    top = max(low, high - gap * (len(wanted) - 1))
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        placed[i] = min(max(centres[rank], low), top) + rank * gap
    return placed


def thin(points: Sequence[Point], limit: int = 160) -> list[Point]:
    """Return at most about ``limit`` finite points; the first and the last stay.

    Examples:
        >>> thin([(float(i), 0.0) for i in range(1000)], 4)
        [(0.0, 0.0), (333.0, 0.0), (666.0, 0.0), (999.0, 0.0)]
    """
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= limit:
        return finite
    return [finite[i * (len(finite) - 1) // (limit - 1)] for i in range(limit)]


@dataclass(frozen=True)
class Plane:
    """The area between the axes of a line chart.

    Examples:
        >>> Plane(0, 100, 0, 50, (0, 10), [0, 10], [0, 1]).at((5, 1))
        (50.0, 0.0)
    """

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    x_marks: Sequence[float]
    y_marks: Sequence[float]

    def at(self, point: Point) -> Point:
        """Return the place of a point on the drawing."""
        across = (point[0] - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (point[1] - self.y_marks[0]) / (self.y_marks[-1] - self.y_marks[0])
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def scale(self, x_label: str) -> str:
        """Return the attributes by which a script can turn a place back into values."""
        ends = (self.left, self.right, *self.x_range, self.bottom, self.top, self.y_marks[0], self.y_marks[-1])
        return f' data-axes="{" ".join(f"{end:g}" for end in ends)}" data-x="{escape(x_label)}"'

    def grid(self, x_label: str, y_label: str) -> list[str]:
        """Return grid, ticks and axis labels."""
        parts = []
        for mark in self.y_marks:
            _, y = self.at((0.0, mark))
            parts.append(line([(self.left, y), (self.right, y)], "currentColor", faint=0.13))
            parts.append(text(self.left - 8, y + 4, tick_text(mark, self.y_marks), "end", muted=True))
        for mark in self.x_marks:
            x, _ = self.at((mark, self.y_marks[0]))
            parts.append(line([(x, self.bottom), (x, self.bottom + 5)], "currentColor", faint=0.4))
            parts.append(text(x, self.bottom + 19, tick_text(mark, self.x_marks), "middle", muted=True))
        parts.append(text((self.left + self.right) / 2, self.bottom + 38, x_label, "middle", muted=True))
        parts.append(text(0, 13, y_label, muted=True))
        return parts


def shaded(plane: Plane, band: tuple[float, float, str] | None) -> list[str]:
    """Return a shaded stretch of the horizontal axis with its words above it; nothing without a band.

    A stretch of no length becomes a dashed line.
    """
    if band is None:
        return []
    start, end = (plane.at((min(max(x, plane.x_range[0]), plane.x_range[1]), 0.0))[0] for x in band[:2])
    shown = fit(band[2], SIZE, plane.right - plane.left - 8)
    middle = min(max((start + end) / 2, plane.left + width(shown, SIZE) / 2), plane.right - width(shown, SIZE) / 2)
    shade = (
        line([(start, plane.top), (start, plane.bottom)], "currentColor", thick=1.5, dash="4 3")
        if start == end
        else box(start, plane.top, end - start, plane.bottom - plane.top, STRONG, faint=0.13)
    )
    return [hover(band[2], [shade]), text(middle, plane.top - 6, shown, "middle")]
