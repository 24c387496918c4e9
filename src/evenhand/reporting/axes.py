"""Where things go on a chart: readable ticks, labels that do not overlap, no more points than can be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that enclose ``low`` to ``high`` in about ``count`` steps.

    Examples:
        >>> ticks(0, 2.98)
        [0.0, 1.0, 2.0, 3.0]
        >>> ticks(0.5, 98)
        [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    if high <= low:
        low, high = low - 0.5, low + 0.5
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, all_ticks: Sequence[float]) -> str:
    """A tick with as many decimals as its neighbours need.

    Examples:
        >>> tick_text(1000.0, [0.0, 1000.0]), tick_text(0.5, [0.0, 0.5, 1.0])
        ('1,000', '0.5')
    """
    step = min((b - a for a, b in pairwise(all_ticks)), default=1.0)
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def domain(values: Sequence[float]) -> tuple[float, float]:
    """From zero, unless all values are positive and lie in the upper half of what zero-based axes would show.

    Examples:
        >>> domain([5.0, 98.0]), domain([90.0, 98.0])
        ((0.0, 98.0), (90.0, 98.0))
    """
    low, high = min(values), max(values)
    return (min(0.0, low), high) if low < high / 2 or low == high else (low, high)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions as little as possible so that any two are at least ``gap`` apart and inside ``low`` to ``high``.

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
    """At most about ``limit`` finite points; the first and the last stay.

    Examples:
        >>> thin([(float(i), 0.0) for i in range(1000)], 4)
        [(0.0, 0.0), (333.0, 0.0), (666.0, 0.0), (999.0, 0.0)]
    """
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= limit:
        return finite
    return [finite[i * (len(finite) - 1) // (limit - 1)] for i in range(limit)]
