"""The few pieces of HTML that the report's sections are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenhand.reporting.svg import NARROW, WIDE
from evenhand.reporting.text import escape, label


def section(heading: str, body: str) -> str:
    """A section of the page; the body is HTML already.

    Examples:
        >>> section("A & B", "<p>c</p>")
        '<section><h2>A &amp; B</h2><p>c</p></section>'
    """
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def figure(draw: Callable[[int], str]) -> str:
    """A chart drawn for wide and for narrow windows; the style sheet shows the one that fits.

    Examples:
        >>> figure(lambda size: f"<svg width='{size}'/>").count("<svg")
        2
    """
    return f'<figure><div class="desk">{draw(WIDE)}</div><div class="phone">{draw(NARROW)}</div></figure>'


def notes(remarks: Sequence[str]) -> str:
    """Small print, one paragraph each.

    Examples:
        >>> notes(["a < b"])
        '<p class="note">a &lt; b</p>'
    """
    return "".join(f'<p class="note">{escape(remark)}</p>' for remark in remarks)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """The numbers under a chart, folded; the first cell of each row is a name.

    Examples:
        >>> "<bdi>class 8</bdi></th><td>74</td>" in table(["group", "correct"], [["class 8", "74"]])
        True
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row"><bdi>{escape(label(name))}</bdi></th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f"<details><summary>Show the numbers</summary><table>{above}<thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></details>"
    )
