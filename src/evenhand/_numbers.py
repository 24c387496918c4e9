"""Prints numbers for people: spent epsilons rounded up, percentages, intervals and counts, in one way everywhere.

Words, tables, pages and cards print an epsilon by ``rounded_up`` and a promise by ``promised``, so the same figure
reads the same wherever it stands. Nothing here imports another module of evenhand.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

NO_BREAK = "\u00a0"
DASH = "\u2013"
MISSING = "not measured"
_FINEST = 6  # decimals of the smallest bound that is printed


def rounded_up(value: float, digits: int = 3) -> str:
    """Return an upper bound such as a spent epsilon as text, with ``digits`` decimals, rounded up.

    Below 1 there are at least three significant digits, down to a millionth.

    Guarantee: the printed number is never below ``value``.

    Examples:
        >>> rounded_up(2.99912), rounded_up(2.998), rounded_up(3.0000001), rounded_up(0.012341)
        ('3.000', '2.998', '3.001', '0.0124')
        >>> rounded_up(0.0), rounded_up(1e-9), rounded_up(math.inf), rounded_up(21.04, 1)
        ('0.000', '0.000001', 'infinite', '21.1')
    """
    if not math.isfinite(value):
        return "infinite"
    exact = Decimal(repr(float(value)))
    places = digits if not exact or exact >= 1 else max(digits, min(_FINEST, 2 - exact.adjusted()))
    return f"{exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING):f}"


def rounded_down(value: float, digits: int = 3) -> str:
    """Return a lower bound as text, with ``digits`` decimals, rounded down.

    Guarantee: the printed number is never above ``value``.

    Examples:
        >>> rounded_down(2.99988), rounded_down(0.0), rounded_down(math.inf)
        ('2.999', '0.000', 'infinite')
    """
    if not math.isfinite(value):
        return "infinite"
    exact = Decimal(repr(float(value)))
    return f"{exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_FLOOR):f}"


def shown_down(value: float) -> str:
    """Return a lower bound or a ceiling as text, rounded down: three decimals, and none from 100 on.

    Examples:
        >>> shown_down(2.99988), shown_down(20371.19)
        ('2.999', '20,371')
    """
    return rounded_down(value) if value < 100 or not math.isfinite(value) else f"{math.floor(value):,}"


def spent_range(least: float, most: float) -> str:
    """Return the smallest and the largest spent epsilon as text; one number if they print alike.

    Examples:
        >>> spent_range(0.9991, 7.9), spent_range(3.0, 3.0)
        ('1.000 to 7.900', '3.000')
    """
    low, high = rounded_up(least), rounded_up(most)
    return low if low == high else f"{low} to {high}"


def promised(budget: float | None, missing: str = "none") -> str:
    """Return a promised epsilon as the user gave it, or ``missing`` where none was promised.

    Examples:
        >>> promised(3.0), promised(0.5), promised(None)
        ('3', '0.5', 'none')
    """
    return missing if budget is None else f"{budget:g}"


def delta(value: float) -> str:
    """Return a delta as text.

    Examples:
        >>> delta(1e-4), delta(2.5e-6)
        ('0.0001', '2.5e-06')
    """
    return f"{value:g}"


def count(number: int) -> str:
    """Return a number of records or steps with separators of thousands.

    Examples:
        >>> count(1224)
        '1,224'
    """
    return f"{number:,}"


def percent(share: float, records: int = 0) -> str:
    """Return a share as a percentage: whole, with one decimal from 1,000 records on, never rounded to 0 or 100.

    Examples:
        >>> percent(0.744).replace(NO_BREAK, " "), percent(0.997).replace(NO_BREAK, " ")
        ('74 %', '99.7 %')
        >>> percent(float("nan"))
        'not measured'
    """
    if not math.isfinite(share):
        return MISSING
    digits = 1 if records >= 1000 or (0 < share < 1 and round(100 * share) in (0, 100)) else 0
    return f"{100 * share:.{digits}f}{NO_BREAK}%"


def bare_percent(share: float | None, digits: int = 1, missing: str = "") -> str:
    """Return a share as a percentage without its sign, for columns that name the unit in their head.

    Examples:
        >>> bare_percent(0.7442), bare_percent(0.7442, 0), bare_percent(None), bare_percent(math.nan, missing="none")
        ('74.4', '74', '', 'none')
    """
    return missing if share is None or not math.isfinite(share) else f"{100 * share:z.{digits}f}"


def quantity(value: float, unit: str, records: int = 0) -> str:
    """Return a value with its unit; ``"%"`` means that the value is a share.

    Examples:
        >>> quantity(12.3456, "points").replace(NO_BREAK, " ")
        '12.3 points'
    """
    if unit == "%" or not math.isfinite(value):
        return percent(value, records)
    return f"{value:z.3g}{NO_BREAK}{unit}".rstrip()


def interval(low: float, high: float, unit: str = "%", records: int = 0) -> str:
    """Return an interval with the unit written once; shares if the unit is ``"%"``.

    Examples:
        >>> interval(0.66, 0.81).replace(NO_BREAK, " ").replace(DASH, "-")
        '66-81 %'
        >>> interval(-20, -4, "points").replace(NO_BREAK, " ")
        '-20 to -4 points'
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return MISSING
    if unit == "%":
        digits = 1 if records >= 1000 else 0
        return f"{bare_percent(low, digits)}{DASH}{bare_percent(high, digits)}{NO_BREAK}%"
    return f"{low:z.3g}{' to ' if low < 0 else DASH}{quantity(high, unit)}"


def mean(value: float, low: float, high: float, scale: float = 1.0, missing: str = MISSING) -> str:
    """Return a mean with its interval in brackets, each times ``scale``; without brackets if there is no interval.

    Examples:
        >>> mean(0.5, 0.4, 0.6, 100), mean(41.26, math.nan, math.nan), mean(math.nan, 0, 0)
        ('50.0 (40 to 60)', '41.3', 'not measured')
    """
    if not math.isfinite(value):
        return missing
    ends = f" ({ends_in_words(low, high, scale)})" if math.isfinite(low) else ""
    return f"{scale * value:z.1f}{ends}"


def ends_in_words(low: float, high: float, scale: float = 1.0) -> str:
    """Return the ends of an interval, each times ``scale``: whole numbers, or as many decimals as tell them apart.

    Examples:
        >>> ends_in_words(-0.2, 52.0), ends_in_words(0.8151, 0.8234, 100), ends_in_words(2.0, 2.04)
        ('0 to 52', '81.5 to 82.3', '2.00 to 2.04')
    """
    width = scale * (high - low)
    digits = 0 if width >= 3 else 1 if width >= 0.3 else 2
    return f"{scale * low:z.{digits}f} to {scale * high:z.{digits}f}"


def difference(value: float, low: float, high: float) -> str:
    """Return a difference with its sign and its interval in brackets.

    Examples:
        >>> difference(1.25, -0.5, 3.0), difference(1.25, math.nan, math.nan), difference(math.nan, 0, 0)
        ('+1.2 (-0.5 to +3.0)', '+1.2', 'not measured')
    """
    if not math.isfinite(value):
        return MISSING
    return f"{value:+.1f}" + (f" ({low:+.1f} to {high:+.1f})" if math.isfinite(low) else "")


def points(value: float) -> str:
    """Return a number of percentage points with its unit.

    Examples:
        >>> points(41.3).replace(NO_BREAK, " "), points(1.0).replace(NO_BREAK, " ")
        ('41 points', '1 point')
    """
    whole = abs(value) >= 9.95 or round(value, 1) == round(value)
    shown = f"{value:z.0f}" if whole else f"{value:z.1f}"
    return f"{shown}{NO_BREAK}point{'' if shown == '1' else 's'}"


def setting(low: float, high: float) -> str:
    """Return a setting such as a clip bound or a noise multiplier: one number, or smallest and largest.

    Examples:
        >>> setting(1.0, 1.0), setting(0.5, 2.0)
        ('1', '0.5 to 2')
    """
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
