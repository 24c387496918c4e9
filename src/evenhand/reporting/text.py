"""Words and numbers as they are printed: foreign text made harmless, percentages and bounds rounded honestly."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

NO_BREAK = "\u00a0"
DASH = "\u2013"
ELLIPSIS = "\u2026"

_SPACES = re.compile("[\t\n\r\v\f\x85\u2028\u2029]")
_MARKS = re.compile("[\u061c\u200e\u200f\ufeff]")
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_MARKUP = re.compile(r"[\\`*_\[\]<>|#]")
_RISKY = ("=", "+", "-", "@", "\t", "\r")
_WIDTHS = {**dict.fromkeys(" iljftrI.,:;'|!()[]-", 0.4), **dict.fromkeys("mwMW@%<>=+~^#&", 1.0)}


def clean(text: object) -> str:
    r"""Neutralise what could break a page or reorder its words: control characters, bidi overrides, lone surrogates.

    Examples:
        >>> clean("a\nb")
        'a b'
        >>> clean("left\u202etfel") == "left\ufffdtfel"
        True
    """
    return _HARMFUL.sub("\ufffd", _MARKS.sub("", _SPACES.sub(" ", str(text))))


def escape(text: object) -> str:
    """Clean text, safe between tags and inside quoted attributes of HTML and XML.

    Examples:
        >>> escape('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(clean(text), quote=True)


def unmarked(text: object) -> str:
    r"""Clean text that Markdown shows as it is: no markup, no HTML, no new cell in a table.

    Examples:
        >>> print(unmarked("<b>*x*|"))
        \<b\>\*x\*\|
    """
    return _MARKUP.sub(r"\\\g<0>", clean(text))


def cell(text: object) -> str:
    """Clean text for a spreadsheet: what it would run as a formula gets an apostrophe.

    Examples:
        >>> cell("=1+1"), cell("plain")
        ("'=1+1", 'plain')
    """
    shown = clean(text)
    return f"'{shown}" if shown.startswith(_RISKY) else shown


def label(name: object, limit: int | None = None) -> str:
    """A name that can be read: clean, never empty, at most ``limit`` characters.

    Examples:
        >>> label("  "), label("class 8"), len(label("x" * 200, 40))
        ('(unnamed)', 'class 8', 40)
    """
    shown = clean(name).strip() or "(unnamed)"
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1].rstrip() + ELLIPSIS


def percent(value: float, count: int = 0) -> str:
    """A share as a percentage: whole numbers, one decimal from 1,000 records on, and never rounded to 0 or 100.

    Examples:
        >>> percent(0.744).replace(NO_BREAK, " "), percent(0.997).replace(NO_BREAK, " ")
        ('74 %', '99.7 %')
        >>> percent(float("nan"))
        'not measured'
    """
    if not math.isfinite(value):
        return "not measured"
    digits = 1 if count >= 1000 or (0 < value < 1 and round(100 * value) in (0, 100)) else 0
    return f"{100 * value:.{digits}f}{NO_BREAK}%"


def quantity(value: float, unit: str, count: int = 0) -> str:
    """A value with its unit; ``"%"`` means that the value is a share.

    Examples:
        >>> quantity(12.3456, "points").replace(NO_BREAK, " ")
        '12.3 points'
    """
    if unit == "%" or not math.isfinite(value):
        return percent(value, count)
    return f"{value:.3g}{NO_BREAK}{unit}".rstrip()


def span(low: float, high: float, unit: str = "%", count: int = 0) -> str:
    """An interval, the unit written once.

    Examples:
        >>> span(0.66, 0.81).replace(NO_BREAK, " ").replace(DASH, "-")
        '66-81 %'
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return "not measured"
    if unit == "%":
        digits = 1 if count >= 1000 else 0
        return f"{100 * low:.{digits}f}{DASH}{100 * high:.{digits}f}{NO_BREAK}%"
    return f"{low:.3g}{' to ' if low < 0 else DASH}{quantity(high, unit)}"


def bound(value: float) -> str:
    """An upper bound with three significant digits, rounded up so that the printed number still holds.

    Examples:
        >>> bound(2.98), bound(2.9801), bound(3.0), bound(0.012341), bound(12345.6), bound(float("inf"))
        ('2.98', '2.99', '3', '0.0124', '12346', 'unbounded')
    """
    if not math.isfinite(value):
        return "unbounded"
    exact = Decimal(repr(float(value)))
    places = min(0, exact.adjusted() - 2) if exact else 0
    shown = f"{exact.quantize(Decimal(1).scaleb(places), rounding=ROUND_CEILING):f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def tiny(value: float) -> str:
    """A small number such as delta, as a power of ten.

    Examples:
        >>> tiny(1e-4), tiny(2.5e-6)
        ('1e-4', '2.5e-6')
    """
    mantissa, power = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(power)}"


def listed(words: Sequence[str]) -> str:
    """Words joined as a sentence would.

    Examples:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def width(text: str, size: float) -> float:
    """About how wide a text is in a proportional font of this size; wide and combining characters are known.

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
    """The text, shortened with an ellipsis until it is at most ``room`` wide.

    Examples:
        >>> fit("class 8", 13, 100)
        'class 8'
        >>> fit("a very long name of a group", 13, 60).endswith(ELLIPSIS)
        True
    """
    if width(text, size) <= room:
        return text
    kept, used = "", width(ELLIPSIS, size)
    for character in text:
        used += size * _advance(character)
        if used > room:
            break
        kept += character
    return kept.rstrip() + ELLIPSIS
