"""Rounding of float32 sums: how a batch is split so that it stays small, and what is charged for it.

A sum of n vectors of length C in float32 may be wrong by n^2 2^-25 C, and one record more can change all of that error.
So records are summed in blocks, and block sums are added in float64. Which block a record is in depends on a secret
random number of its own, never on which others were drawn: one record more changes the sum of one block only.
Proof: docs/proofs/float_sums.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""
MOST_ROWS = 290
"""Records in a block at most, where each adds one vector."""
JOINT = 0.0012
"""Error of a block whose records add several vectors each, as a part of the bound."""
USUAL_REACH = 3.5
"""Sum of the lengths of a record's terms over the length of their sum that blocks are made for, where terms are few.

Of many terms it is the root of their number, which terms that have nothing to do with each other come to.
"""
SPREAD = 5e-4
"""How much more a record of the smallest bound may be charged for rounding totals that hold records of the largest."""
LEVELS = 4
"""Levels of clip bounds per factor of two: records of different levels are never in one block."""
KEY_BITS = 56
"""Digits of a record's secret key; above them stands the level of its clip bound."""


@dataclass(frozen=True)
class Summation:
    """Split of the sums of one run into blocks, and the cost of their rounding.

    It is decided by the expected batch size, and by the ratio of the largest to the smallest clip bound.

    Examples:
      >>> Summation(256).rows, Summation(64).rows
      (290, 104)
      >>> Summation(1024).relative < 0.01, Summation(65_536).relative < 0.03
      (True, True)
    """

    expected_batch: float
    ratio: float = 1.0

    @cached_property
    def rows(self) -> int:
        """Most records of a block whose records add one vector each."""
        return min(MOST_ROWS, math.ceil(self.expected_batch + 4 * math.sqrt(self.expected_batch)) + 8)

    @cached_property
    def most(self) -> int:
        """Most records of a batch whose total may be rounded to float32; a larger one stays in float64."""
        return self._usual if 4 * UNIT * self._usual * (self.ratio - 1) <= SPREAD else 0

    @property
    def _usual(self) -> int:
        """Return a number of records that a batch almost never exceeds."""
        return math.ceil(self.expected_batch + 10 * math.sqrt(self.expected_batch)) + 100

    @property
    def block(self) -> float:
        """Change of the error of one block when a record joins it, as a part of the largest bound in the block."""
        return 2 * 1.01 * UNIT * (self.rows * (self.rows + 1) / 2 + 3 * self.rows) + 2.5 * JOINT

    @property
    def total(self) -> float:
        """Change of the error of everything after the block sums, as a part of the largest bound of all records."""
        return 4 * UNIT * self.most + 2 * self._usual**2 * 2.0**-53

    @property
    def relative(self) -> float:
        """Sum of ``block`` and ``total``, for records that all have one bound."""
        return self.block + self.total


def joint_rows(terms: int) -> int:
    """Return the most records of a block whose records add ``terms`` vectors each: 1, 2, 3, 4, 6, 8, 12 and so on.

    Few sizes, so that the layers of a model share them.

    Examples:
      >>> joint_rows(16), joint_rows(64), joint_rows(196), joint_rows(100_000)
      (16, 6, 2, 1)
    """
    most = max(1.0, math.sqrt(JOINT / (UNIT * terms * max(USUAL_REACH, math.sqrt(terms)))))
    power = 1 << int(math.log2(most))
    return power + power // 2 if most >= 1.5 * power else power


def ratio_of(scales: Sequence[float]) -> float:
    """Return the largest clip bound as a multiple of the smallest.

    Examples:
      >>> ratio_of([0.5, 1.0, 2.0])
      4.0
    """
    return max(scales) / min(scales)


def levels(scales: Sequence[float]) -> NDArray[np.uint64]:
    """Return the level of each clip bound: bounds of one level differ by a factor of at most 2^(1/4).

    Examples:
      >>> levels([1.0, 1.1, 1.3, 0.99]).tolist()
      [128, 128, 129, 127]
    """
    numbers: NDArray[np.float64] = 128 + np.floor(LEVELS * np.log2(np.asarray(scales, dtype=np.float64)))
    return numbers.clip(0, 255).astype(np.uint64)


def largest_in_level(sensitivity: NDArray[np.float64], scales: Sequence[float]) -> NDArray[np.float64]:
    """Return for every class the largest sensitivity of a class whose records may share a block with its own.

    Examples:
      >>> largest_in_level(np.array([1.0, 1.1, 4.0]), [1.0, 1.1, 4.0])
      array([1.1, 1.1, 4. ])
    """
    most, places = np.zeros(256), levels(scales).astype(np.int64)
    np.maximum.at(most, places, sensitivity)
    return most[places]
