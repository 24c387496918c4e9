"""Compute the grid of the noise and the sensitivity that rounding adds. ``add_noise.py`` adds the noise.

The sum is rounded to the grid before the noise is added, so the released value is the rounding of (a number on the
grid + Gaussian): post-processing of a Gaussian mechanism whose sensitivity grows by ``slack``. Low-order bits of the
released floats then carry no trace of the datum (the attack of Mironov 2012). We claim "hardened", not "immune".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenhand.summation import Summation, largest_in_level

S = TypeVar("S", bound=Any)
GRID_BITS = 30


NORMS = 1e-5
"""Relative error of a record's norm: the engine's bar."""


def rounding(expected_batch: float) -> float:
    """Return the relative error that covers norms and a sum in float64 over the batch, such as a query's.

    It is charged as extra sensitivity. Sums of gradients are float32: see ``charged_sum``.

    >>> rounding(256) < 3e-5
    True
    """
    return NORMS + expected_batch * 2.0**-24


def grid(sensitivity: float) -> float:
    """Return the spacing of the grid: a power of two, about a billionth of the sensitivity.

    >>> grid(1.0) == 2.0**-30
    True
    """
    return math.ldexp(1.0, math.frexp(sensitivity)[1] - 1 - GRID_BITS)


def slack(spacing: float, dimension: int) -> float:
    """Return what rounding to the grid can add to the L2 sensitivity: half a spacing per coordinate on either side."""
    return spacing * math.sqrt(dimension)


def charged_sum(
    sensitivity: NDArray[np.float64],
    scales: Sequence[float],
    spacing: float,
    dimension: int,
    summation: Summation,
    whole: bool = False,
) -> NDArray[np.float64]:
    """Return per owner class the sensitivity that the noise of a gradient must cover: rounding and grid included.

    A record changes the rounding of its own block, whose records have bounds of one level; if ``whole``, of all blocks.
    Proof: docs/proofs/float_sums.md.

    >>> one = charged_sum(np.array([1.0]), [1.0], 0.0, 1, Summation(1024))
    >>> bool(1.005 < one[0] < 1.01)
    True
    """
    largest = float(sensitivity.max())
    near = np.full_like(sensitivity, largest) if whole else largest_in_level(sensitivity, scales)
    rounded = near * summation.block + largest * summation.total
    return sensitivity * (1 + NORMS) + rounded + slack(spacing, dimension)


def charged(sensitivity: S, spacing: float, dimension: int, expected_batch: float, largest: float | None = None) -> S:
    """Return the sensitivity (a number or an array) that the noise must cover: float rounding and grid included.

    ``largest`` is the largest of all owner classes: a record with a small bound changes how large ones are rounded.

    >>> charged(0.01, 0.0, 1, 1024, largest=1.0) > charged(0.01, 0.0, 1, 1024)
    True
    """
    most = sensitivity if largest is None else largest
    summed = rounding(expected_batch) - rounding(0)
    covered: S = sensitivity * (1 + rounding(0)) + most * summed + slack(spacing, dimension)
    return covered
