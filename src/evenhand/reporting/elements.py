"""The few pieces of HTML that the report's sections are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from evenhand.reporting.script import SCRIPT
from evenhand.reporting.style import STYLE, policy
from evenhand.reporting.svg import NARROW, WIDE
from evenhand.reporting.text import escape, label

_CHOICES = 40  # groups that get a button


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page around these sections: its policy first, then its style, at the end its script.

    Examples:
        >>> document("A < B", ["<p>c</p>"]).count("A &lt; B")
        1
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><meta name="generator" content="evenhand">'
        f"<title>{escape(label(title, 120))}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(filter(None, parts))
        + "\n<footer>Written by evenhand. This page is one file; it loads nothing and sends nothing.</footer>"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def chooser(numbers: Mapping[str, int]) -> str:
    """Buttons that show and hide groups in every chart; hidden until the script is there to obey them.

    Examples:
        >>> chooser({"a": 0, "b": 1}).count("<button"), chooser({"a": 0})
        (4, '')
    """
    if len(numbers) < 2:
        return ""
    one = "".join(
        f'<button type="button" aria-pressed="true" data-g="{number}">{escape(label(name, 60))}</button>'
        for name, number in list(numbers.items())[:_CHOICES]
    )
    both = "".join(f'<button type="button" data-all="{on}">{word}</button>' for on, word in ((1, "all"), (0, "none")))
    return f'<div class="choose" role="group" aria-label="Groups to show" hidden>Show: {both}{one}</div>'


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", *, folded: bool = True) -> str:
    """The numbers under a chart, folded unless they are the point; the first cell of each row is a name.

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
    whole = f"<table>{above}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f"<details><summary>Show the numbers</summary>{whole}</details>" if folded else whole


def made_with(facts: Mapping[str, str]) -> str:
    """The section that lists method, data, steps and so on; nothing without facts.

    Examples:
        >>> made_with({})
        ''
    """
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in facts.items())
    return section("How this was made", f'<table class="facts"><tbody>{rows}</tbody></table>') if rows else ""


def again(commands: str) -> str:
    """The section with the commands that make this again; nothing without any.

    Examples:
        >>> "evenhand verify ." in again("evenhand verify .")
        True
    """
    code = "\n".join(escape(row) for row in commands.splitlines())
    return section("How to reproduce", f"<pre><code>{code}</code></pre>") if code.strip() else ""
