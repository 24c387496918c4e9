"""The few SVG elements that the charts are made of, and their colours.

Colours are the Okabe-Ito palette through CSS variables with fallbacks, so a chart follows the page into dark mode and
still stands on its own. Presentation attributes only: a page whose content policy forbids styles can show them.
"""

from __future__ import annotations

from collections.abc import Sequence

from evenhand.reporting.axes import Point
from evenhand.reporting.text import escape

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


def page(width: float, height: float, title: str, description: str, parts: Sequence[str], scale: str = "") -> str:
    """A whole drawing that scales to the width it is given; ``scale`` is what the script needs to read values off it.

    Examples:
        >>> page(10, 5, "T", "D", []).endswith("<title>T</title><desc>D</desc></svg>")
        True
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"{scale} '
        f'font-family="system-ui,sans-serif" font-size="{SIZE}" fill="currentColor" stroke="{PAGE}" stroke-width="3" '
        'stroke-linejoin="round" paint-order="stroke">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "start", *, muted: bool = False, bold: bool = False) -> str:
    """One line of text; the stroke it inherits is a halo in the page's colour, readable on top of lines.

    Examples:
        >>> "&lt;b&gt;" in text(0, 0, "<b>")
        True
    """
    look = (' fill-opacity=".7"' if muted else "") + (' font-weight="650"' if bold else "")
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{place}{look}>{escape(words)}</text>'


def line(points: Sequence[Point], colour: str, *, thick: float = 1.0, dash: str = "", faint: float = 1.0) -> str:
    """A line through the points.

    Examples:
        >>> line([(0, 0), (1, 2)], "currentColor")
        '<polyline points="0,0 1,2" fill="none" stroke="currentColor" stroke-width="1"/>'
    """
    route = " ".join(f"{round(x, 1):g},{round(y, 1):g}" for x, y in points)
    look = (f' stroke-dasharray="{dash}"' if dash else "") + (f' stroke-opacity="{faint:g}"' if faint < 1 else "")
    return f'<polyline points="{route}" fill="none" stroke="{colour}" stroke-width="{thick:g}"{look}/>'


def whisker(low: float, high: float, y: float) -> str:
    """An interval with ends, on a halo.

    Examples:
        >>> whisker(1, 3, 9).count("<p")
        2
    """
    route = f"M{low:.1f} {y - 4:g}v8m0-4H{high:.1f}m0-4v8"
    ends = f'<path d="{route}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return line([(low, y), (high, y)], PAGE, thick=3.5) + ends


def box(x: float, y: float, width: float, height: float, colour: str, *, faint: float = 1.0) -> str:
    """A filled rectangle with slightly rounded corners.

    Examples:
        >>> box(0, 0, 2, 1, "red")
        '<rect x="0.0" y="0.0" width="2.0" height="1.0" rx="2" stroke="none" fill="red"/>'
    """
    look = f' fill-opacity="{faint:g}"' if faint < 1 else ""
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {where} rx="2" stroke="none" fill="{colour}"{look}/>'


def hover(words: str, parts: Sequence[str], name: str = "", number: int | None = None) -> str:
    """Parts that show these words when the pointer rests on them; ``number`` is the group they belong to.

    Examples:
        >>> hover("74 %", [], "class 8", 3)
        '<g data-n="class 8" data-g="3"><title>74 %</title></g>'
    """
    named = f' data-n="{escape(name)}"' if name else ""
    return f"<g{named}{_group(number)}><title>{escape(words)}</title>{''.join(parts)}</g>"


def belonging(parts: Sequence[str], number: int | None) -> str:
    """Parts that are shown and hidden with a group.

    Examples:
        >>> belonging(["<path/>"], 3), belonging(["<path/>"], None)
        ('<g data-g="3"><path/></g>', '<path/>')
    """
    return "".join(parts) if number is None else f"<g{_group(number)}>{''.join(parts)}</g>"


def _group(number: int | None) -> str:
    return "" if number is None else f' data-g="{number}"'
