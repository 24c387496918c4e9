"""Makes foreign text harmless for pages, Markdown and spreadsheets, and fits it to a width.

Numbers are printed by ``evenhand._numbers``.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence

ELLIPSIS = "\u2026"

_SPACES = re.compile("[\t\n\r\v\f\x85\u2028\u2029]")
_MARKS = re.compile("[\u061c\u200e\u200f\ufeff]")
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_MARKUP = re.compile(r"[\\`*_\[\]<>|#]")
_RISKY = ("=", "+", "-", "@", "\t", "\r")
_WIDTHS = {**dict.fromkeys(" iljftrI.,:;'|!()[]-", 0.4), **dict.fromkeys("mwMW@%<>=+~^#&", 1.0)}


def clean(text: object) -> str:
    r"""Return text without control characters, bidi overrides and lone surrogates, which break or reorder a line.

    Examples:
        >>> clean("a\nb")
        'a b'
        >>> clean("left\u202etfel") == "left\ufffdtfel"
        True
    """
    return _HARMFUL.sub("\ufffd", _MARKS.sub("", _SPACES.sub(" ", str(text))))


def escape(text: object) -> str:
    """Return clean text, safe between tags and inside quoted attributes of HTML and XML.

    Examples:
        >>> escape('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(clean(text), quote=True)


def unmarked(text: object) -> str:
    r"""Return clean text that Markdown shows as it is: no markup, no HTML, no new cell in a table.

    Examples:
        >>> print(unmarked("<b>*x*|"))
        \<b\>\*x\*\|
    """
    return _MARKUP.sub(r"\\\g<0>", clean(text))


def cell(text: object) -> str:
    """Return clean text for a spreadsheet: what it would run as a formula gets an apostrophe.

    Examples:
        >>> cell("=1+1"), cell("plain")
        ("'=1+1", 'plain')
    """
    shown = clean(text)
    return f"'{shown}" if shown.startswith(_RISKY) else shown


def label(name: object, limit: int | None = None) -> str:
    """Return a name that can be read: clean, never empty, at most ``limit`` characters.

    Examples:
        >>> label("  "), label("class 8"), len(label("x" * 200, 40))
        ('(unnamed)', 'class 8', 40)
    """
    shown = clean(name).strip() or "(unnamed)"
    return shown if limit is None else clip(shown, limit)


def clip(text: str, limit: int) -> str:
    """Return the text, cut to ``limit`` characters with an ellipsis at its end.

    Examples:
        >>> clip("class 8", 9), clip("class eight", 6)
        ('class 8', 'class…')
    """
    return text if len(text) <= limit else text[: limit - 1].rstrip() + ELLIPSIS


def listed(words: Sequence[str]) -> str:
    """Return words joined as in a sentence.

    Examples:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def width(text: str, size: float) -> float:
    """Return about how wide a text is in a proportional font of this size; wide and combining characters are known.

    Examples:
        >>> width("mm", 10) > width("ii", 10)
        True
    """
    return size * sum(map(_advance, text))


def _advance(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    return _WIDTHS.get(character, 0.76 if character.isupper() or character > "\u02ff" else 0.64)


def fit(text: str, size: float, room: float) -> str:
    """Return the text, shortened with an ellipsis until it is at most ``room`` wide.

    Examples:
        >>> fit("class 8", 13, 100)
        'class 8'
        >>> fit("a very long name of a group", 13, 60).endswith(ELLIPSIS)
        True
    """
    if width(text, size) <= room:
        return text
    head, used = "", width(ELLIPSIS, size)
    for character in text:
        used += size * _advance(character)
        if used > room:
            break
        head += character
    return head.rstrip() + ELLIPSIS
