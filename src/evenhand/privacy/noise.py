"""Gaussian noise on a power-of-two grid: what is added, and what the rounding costs.

The sum is rounded to the grid before the noise is added, so the released value is the rounding of (a number on the
grid + Gaussian): post-processing of a Gaussian mechanism whose sensitivity grows by ``slack``. Low-order bits of the
released floats then carry no trace of the datum (the attack of Mironov 2012). We claim "hardened", not "immune".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from evenhand.streams import Domain, Stream

GRID_BITS = 30


def rounding(expected_batch: float) -> float:
    """Relative float32 error of norms (1e-5, the engine's bar) and of a sum over the batch (half an ulp a record).

    Charged as extra sensitivity. Errors of a sum grow with the batch; measured, they stay about ten times below this.

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


def charged(sensitivity: float, spacing: float, dimension: int, expected_batch: float) -> float:
    """The sensitivity that the noise must cover: the rule's own, plus float rounding, plus the grid."""
    return sensitivity * (1 + rounding(expected_batch)) + slack(spacing, dimension)


def release(
    total: NDArray[np.float64], std: float, spacing: float, stream: Stream, domain: Domain, step: int, offset: int = 0
) -> NDArray[np.float64]:
    """``total`` rounded to the grid plus N(0, std^2) rounded to the grid; exact addition in float64."""
    noise = stream.normals(domain, step, total.size, offset).reshape(total.shape)
    return (np.rint(total / spacing) + np.rint(noise * (std / spacing))) * spacing
