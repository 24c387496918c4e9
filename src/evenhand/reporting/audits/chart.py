"""Draw what was claimed, what an attack certified, and what its trials could show at most, one row per owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand._numbers import rounded_up, shown_down
from evenhand.reporting.charts import NARROW, WIDE, wrapped
from evenhand.reporting.svg import BAR, SIZE, STRONG, box, drawing, hover, line, text, tick_text, ticks
from evenhand.reporting.text import label, width

_TALL, _THICK, _ASIDE = 48.0, 12.0, 8.0
_ROOM = 1.12
"""The axis ends beyond the largest number that must be on it by this factor; ceilings may lie outside."""


@dataclass(frozen=True)
class Certified:
    """One row: the claimed epsilon (None where nothing is), the certified one, and the ceiling of the trials."""

    name: str
    claim: float | None
    lower: float
    ceiling: float

    @property
    def whole(self) -> float:
        """Return the epsilon that the row is drawn as a share of: the claim, else the bound itself."""
        return self.claim or self.lower or 1.0

    @property
    def exceeds(self) -> bool:
        """Return whether the bound lies above the claim."""
        return self.claim is not None and self.lower > self.claim

    @property
    def words(self) -> str:
        """Return the row in words."""
        claim = "nothing claimed" if self.claim is None else f"claimed {rounded_up(self.claim)}"
        return f"at least {shown_down(self.lower)}, {claim}"


def certified(rows: Sequence[Certified], *, title: str, size: int = WIDE) -> str:
    """Return bars of certified epsilons as shares of each claim; an arrow where the ceiling is beyond the axis.

    Examples:
        >>> drawn = certified([Certified("all", 3.0, 2.5, 40.0)], title="Audit")
        >>> "at least 2.500, claimed 3.000" in drawn and "trials can show 40.000" in drawn
        True
    """
    most = max([1.0, *(row.lower / row.whole for row in rows)])
    marks = ticks(0.0, 100 * most * _ROOM, 3 if size <= NARROW else 6)
    top, right = 26.0, size - _ASIDE
    heights = [_TALL + 15 * (len(_name(row, size)) - 1) + (15 if _below(row, size) else 0) for row in rows]
    bottom = top + sum(heights)

    def at(share: float) -> float:
        return right * min(1.0, 100 * share / marks[-1])

    parts = []
    for mark in marks:
        side = "start" if mark == marks[0] else "end" if mark == marks[-1] else "middle"
        x = at(mark / 100)
        parts.append(line([(x, top), (x, bottom + 4)], "currentColor", faint=0.13))
        parts.append(text(x, bottom + 19, f"{tick_text(mark, marks)}%", side, muted=True))
    key = "bar: certified, mark: claimed, line: "
    whole = f"share of the claimed epsilon; {key}the most that the trials can show"
    parts.append(text(0, 13, f"{key}ceiling" if size <= NARROW else whole, muted=True))
    y = top
    for row, height in zip(rows, heights, strict=True):
        lower, ceiling = at(row.lower / row.whole), at(row.ceiling / row.whole)
        parts.append(_row(row, y + height, right, lower, row.claim and at(1.0), ceiling, size))
        y += height
    told = "; ".join(f"{label(row.name, 60)}: {row.words}" for row in rows)
    return drawing(size, bottom + 26, title, f"{len(rows)} bars: {told}.", parts)


def _name(row: Certified, size: int) -> list[str]:
    return wrapped(label(row.name, 120), SIZE * 1.1, size if _below(row, size) else size - width(row.words, SIZE) - 24)


def _below(row: Certified, size: int) -> bool:
    """Return whether the figures stand below the name: beside it there is no room."""
    return width(row.words, SIZE) + 90 > size - 24 or size <= NARROW


def _row(
    row: Certified, bottom: float, right: float, lower: float, claim: float | None, ceiling: float, size: int
) -> str:
    """Return bar, claim and ceiling of one row whose lower edge is ``bottom``, with name and figures above."""
    upper, look = bottom - _THICK - 6, STRONG if row.exceeds else BAR
    middle, beyond = upper + _THICK / 2, ceiling >= right
    parts = [line([(0, middle), (ceiling - (6 if beyond else 0), middle)], "currentColor", thick=1.5, faint=0.5)]
    if beyond:
        parts.append(
            line([(right - 7, middle - 4), (right, middle), (right - 7, middle + 4)], "currentColor", thick=1.5)
        )
    else:
        parts.append(line([(ceiling, middle - 4), (ceiling, middle + 4)], "currentColor", thick=1.5))
    parts.append(box(0, upper, max(lower, 1.0), _THICK, look))
    if claim:
        parts.append(line([(claim, upper - 4), (claim, upper + _THICK + 4)], "currentColor", thick=3))
    named, below = _name(row, size), _below(row, size)
    first = upper - 10 - (15 if below else 0) - 15 * (len(named) - 1)
    parts += [text(0, first + 15 * place, part, bold=row.exceeds) for place, part in enumerate(named)]
    parts.append(text(0 if below else right, upper - 10, row.words, "start" if below else "end", bold=row.exceeds))
    most = f"{label(row.name, 60)}: {row.words}; so many trials can show {shown_down(row.ceiling)} at most"
    return hover(most, parts, label(row.name, 60))
