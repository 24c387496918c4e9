"""Checks of numbers and names, shared by everything that a user constructs. Messages never contain data values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from evenhand.errors import UsageError

SHOWN = 60
"""Characters of a name that a message quotes."""


def number(value: Any, name: str, *, low: float, high: float = math.inf, open_low: bool = True) -> float:
    """Return ``value`` as a finite float inside the interval, or say what to pass.

    ``open_low`` excludes the lower end; the upper end, when finite, is always excluded.

    >>> number(0.5, "delta", low=0, high=1)
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(
            f"{name} must be a number, not {type(value).__name__}. Pass for example {name}={_example(low, high)}."
        )
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    inside = (result > low if open_low else result >= low) and result < high
    if not math.isfinite(result) or not inside:
        raise UsageError(f"{name}={result:g} cannot be used: it must be {_interval(low, high, open_low)}.")
    return result


def whole(value: Any, name: str, *, low: int = 1) -> int:
    """Return ``value`` as an int of at least ``low``, or say what to pass."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} must be a whole number, not {type(value).__name__}.")
    if int(value) < low:
        raise UsageError(f"{name}={int(value)} cannot be used: it must be at least {low}.")
    return int(value)


def delta(value: Any) -> float:
    """Return a usable delta: inside (0, 0.1). Larger ones promise nothing, so they are refused.

    >>> delta(1e-5)
    1e-05
    """
    result = number(value, "delta", low=0, high=1)
    if result >= 0.1:
        raise UsageError(f"delta={result:g} promises nothing: keep it below 1 / number of records, for example 1e-5.")
    return result


def real(value: Any, name: str) -> float:
    """Return ``value`` as a float, finite or infinite, or raise naming it if it is no number.

    >>> real(3, "noise"), real(math.inf, "noise")
    (3.0, inf)
    """
    if type(value) is float and value == value:
        return value
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise UsageError(f"{name} must be a number, got {value!r}.")
    return float(value)


def any_delta(value: Any) -> float:
    """Return a delta strictly between 0 and 1, for accounting; ``delta`` also refuses those that promise nothing.

    >>> any_delta(0.5)
    0.5
    """
    result = real(value, "delta")
    if not 0 < result < 1:
        raise UsageError(f"delta must lie strictly between 0 and 1, got {result}; usual is less than 1/records.")
    return result


def known(name: str, names: Iterable[str], what: str) -> str:
    """Return ``name`` if it is one of ``names``; otherwise name the nearest one."""
    options = sorted(names)
    if name in options:
        return name
    near = difflib.get_close_matches(str(name)[:SHOWN], options, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(options)}."
    raise UsageError(f"There is no {what} called {shown(name)}. {hint}")


def shown(name: Any) -> str:
    """Return a name as messages quote it: on one line, and not longer than a line.

    >>> shown("age"), len(shown("x" * 10_000))
    ("'age'", 65)
    """
    text = str(name)
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _interval(low: float, high: float, open_low: bool) -> str:
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    lower = f"greater than {low:g}" if open_low else f"at least {low:g}"
    return "a finite number " + (lower if math.isinf(high) else f"{lower} and less than {high:g}")


def _example(low: float, high: float) -> str:
    if math.isinf(low):
        return "1" if math.isinf(high) else f"{high - 1:g}"
    return f"{low + 1:g}" if math.isinf(high) else f"{(low + high) / 2:g}"


def epsilon_names(epsilons: Iterable[Any]) -> list[str]:
    """Return the owner class of each record, named by its epsilon; errors give a record's place, never its value.

    >>> epsilon_names([1, "2.50", 0.1 + 0.2])
    ['1', '2.5', '0.30000000000000004']
    """
    values = [_positive(cell) for cell in epsilons]
    wrong = [place for place, value in enumerate(values, 1) if value is None]
    if wrong or not values:
        where = f"{len(wrong)} record(s), the first being record {wrong[0]}, have" if wrong else "no record has"
        raise UsageError(f"Budgets by record: {where} no positive finite epsilon. Give every record one, such as 1.5.")
    return [f"{value:g}" if float(f"{value:g}") == value else repr(value) for value in values if value is not None]


def _positive(cell: Any) -> float | None:
    try:
        value = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if 0 < value < math.inf else None
