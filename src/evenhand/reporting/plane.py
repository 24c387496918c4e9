"""Where the points of a line chart go, with its grid, its axes and a stretch to shade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.reporting.axes import Point, tick_text
from evenhand.reporting.drawing import SIZE, STRONG, box, hover, line, text
from evenhand.reporting.text import escape, fit, width


@dataclass(frozen=True)
class Plane:
    """The area between the axes.

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
        """The place of a point on the drawing."""
        across = (point[0] - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (point[1] - self.y_marks[0]) / (self.y_marks[-1] - self.y_marks[0])
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def scale(self, x_label: str) -> str:
        """The attributes by which a script can turn a place back into values."""
        ends = (self.left, self.right, *self.x_range, self.bottom, self.top, self.y_marks[0], self.y_marks[-1])
        return f' data-axes="{" ".join(f"{end:g}" for end in ends)}" data-x="{escape(x_label)}"'

    def grid(self, x_label: str, y_label: str) -> list[str]:
        """Grid, ticks and axis labels."""
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
    """A shaded stretch with its words at the foot of the chart, where the curves of a drop are not."""
    if band is None:
        return []
    start, end = (plane.at((min(max(x, plane.x_range[0]), plane.x_range[1]), 0.0))[0] for x in band[:2])
    shown = fit(band[2], SIZE, plane.right - plane.left - 8)
    middle = min(max((start + end) / 2, plane.left + width(shown, SIZE) / 2), plane.right - width(shown, SIZE) / 2)
    shade = box(start, plane.top, end - start, plane.bottom - plane.top, STRONG, faint=0.13)
    return [hover(band[2], [shade]), text(middle, plane.top - 6, shown, "middle")]
