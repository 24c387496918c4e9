"""Gaussian noise on a power-of-two grid: what the rounding costs. It is added in ``releasing.py``.

The sum is rounded to the grid before the noise is added, so the released value is the rounding of (a number on the
grid + Gaussian): post-processing of a Gaussian mechanism whose sensitivity grows by ``slack``. Low-order bits of the
released floats then carry no trace of the datum (the attack of Mironov 2012). We claim "hardened", not "immune".
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

S = TypeVar("S", bound=Any)
GRID_BITS = 30


def rounding(expected_batch: float) -> float:
    """Relative float32 error of norms (1e-5, the engine's bar) and of a sum over the batch (half an ulp a record).

    Charged as extra sensitivity. The error of a sum grows with the batch and with the largest class's bound.

    >>> rounding(256) < 3e-5
    True
    """
    return 1e-5 + expected_batch * 2.0**-24


def grid(sensitivity: float) -> float:
    """Spacing of the grid: a power of two, about a billionth of the sensitivity.

    >>> grid(1.0) == 2.0**-30
    True
    """
    return math.ldexp(1.0, math.frexp(sensitivity)[1] - 1 - GRID_BITS)


def slack(spacing: float, dimension: int) -> float:
    """By how much rounding to the grid can raise the L2 sensitivity: half a spacing per coordinate on either side."""
    return spacing * math.sqrt(dimension)


def charged(sensitivity: S, spacing: float, dimension: int, expected_batch: float, largest: float | None = None) -> S:
    """The sensitivity (a number or a column of them) that the noise must cover: float rounding and the grid added.

    ``largest`` is that of any owner class: a record of a small bound also changes how the large ones are rounded.

    >>> charged(0.01, 0.0, 1, 1024, largest=1.0) > charged(0.01, 0.0, 1, 1024)
    True
    """
    most = sensitivity if largest is None else largest
    summed = rounding(expected_batch) - rounding(0)
    covered: S = sensitivity * (1 + rounding(0)) + most * summed + slack(spacing, dimension)
    return covered
