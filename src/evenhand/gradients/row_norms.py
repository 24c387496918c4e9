"""Lengths of rows, quickly where float32 can carry them and carefully where it cannot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST = torch.finfo(torch.float64).max

ROW_LIMIT = 1e15
"""Row lengths outside [1/ROW_LIMIT, ROW_LIMIT] leave the range where float32 squares keep their precision."""


RUN = 1024
"""Numbers whose squares are added in float32 before the sum is taken to float64."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of norms and sums, which is never half.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return dtype if dtype == torch.float64 else torch.float32


def rows_of(x: Tensor) -> Tensor:
    """Return one row per record, in the order that its memory has: lengths do not depend on it, and copies cost.

    >>> last = torch.arange(12.0).view(1, 2, 3, 2).contiguous(memory_format=torch.channels_last)
    >>> rows_of(last).data_ptr() == last.data_ptr()
    True
    """
    return (x.movedim(1, -1) if lies_last(x) else x).reshape(len(x), -1)


def lies_last(x: Tensor) -> bool:
    """Return whether pictures have their channels last in memory, and not only by chance.

    >>> lies_last(torch.ones(2, 3, 4, 4)), lies_last(torch.ones(2, 4, 4, 3).movedim(-1, 1))
    (False, True)
    """
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def row_lengths(flat: Tensor) -> Tensor:
    """Return the length of each row; long ones in runs, since the roundings of a sum of squares add up.

    >>> row_lengths(torch.ones(2, 4 * RUN + 1))[0] == (4 * RUN + 1) ** 0.5
    tensor(True)
    """
    width = flat.shape[1]
    if width <= 2 * RUN or flat.dtype == torch.float64:
        lengths: Tensor = torch.linalg.vector_norm(flat, dim=1)
        return lengths
    whole = width // RUN * RUN
    runs = torch.linalg.vector_norm(flat[:, :whole].view(len(flat), -1, RUN), dim=2)
    if whole < width:
        runs = torch.cat([runs, torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)], dim=1)
    joined: Tensor = torch.linalg.vector_norm(runs, dim=1, dtype=torch.float64)
    return joined.to(flat.dtype)


class RowNorms:
    """Measures the length of each row; afterwards ``trusted`` says whether float32 could carry all of them.

    Looking once at all lengths of a pass is much cheaper than after each. A length of zero is trusted if the row is
    zero, rather than too small to be squared.

    >>> gauge = RowNorms()
    >>> gauge(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), gauge.trusted()
    (tensor([5., 0.]), True)
    >>> gauge(torch.tensor([[3e-30, 4e-30], [0.0, 0.0]])), gauge.trusted()
    (tensor([0., 0.]), False)
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._doubt, self._fine = False, False

    def joint(self, lengths: list[Tensor]) -> Tensor:
        """Return the lengths whose squares are the sums of these columns' squares, in float64.

        What was measured so far is looked at on the way, all of it at once: a look at so few numbers costs little
        beside asking torch for it.
        """
        shape, seen = lengths[0].shape, [column for column, _ in self._seen]
        if any(column.shape != shape for column in seen):
            seen = []
        every = numbers(torch.stack(seen + lengths))
        looked, squares = every[: len(seen)], every[len(seen) :].astype(np.float64)
        self._fine = looked.size > 0 and float(looked.min()) >= 1 / ROW_LIMIT and float(looked.max()) <= ROW_LIMIT
        with np.errstate(over="ignore", invalid="ignore"):
            squares *= squares
            norm = torch.from_numpy(np.sqrt(squares.sum(axis=0)))
        return norm if lengths[0].is_cpu else norm.to(lengths[0].device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return length of each row of ``x`` (its first dimension), in the precision of ``x``."""
        flat = x if x.dim() == 2 else rows_of(x)
        lengths = row_lengths(flat)
        self._seen.append((lengths, flat))
        self._fine = False
        return lengths

    def passing(self, x: Tensor) -> Tensor:
        """Measure rows whose memory will be used for something else before ``trusted`` is asked."""
        lengths = self(x)
        self._doubt |= not self.trusted()
        self._seen.clear()
        return lengths

    def trusted(self) -> bool:
        """Return whether every length so far lies where its precision is not in doubt."""
        if self._doubt or self._fine or not self._seen:
            return not self._doubt
        every = torch.cat([lengths for lengths, _ in self._seen])
        if within(every, 1 / ROW_LIMIT, ROW_LIMIT):
            return True
        small = every < 1 / ROW_LIMIT
        if not within(every, 0.0, ROW_LIMIT) or not torch.equal(small, every == 0):
            return False
        parts = zip(torch.split(small, [len(lengths) for lengths, _ in self._seen]), self._seen, strict=True)
        return not any(bool(flat[rows].any()) for rows, (_, flat) in parts if bool(rows.any()))


class CarefulRowNorms(RowNorms):
    """Measures in float64 the rows that float32 cannot carry.

    >>> [f"{n:.3g}" for n in CarefulRowNorms()(torch.tensor([[3.0, 4.0], [3e-30, 4e-30], [3e30, 4e30]])).tolist()]
    ['5', '5e-30', '5e+30']
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return length of each row in float64."""
        flat = rows_of(x)
        lengths = row_lengths(flat).double()
        if x.dtype != torch.float64 and not within(lengths, 1 / ROW_LIMIT, ROW_LIMIT):
            odd = ~((lengths >= 1 / ROW_LIMIT) & (lengths <= ROW_LIMIT))
            lengths[odd] = torch.linalg.vector_norm(flat[odd], dim=1, dtype=torch.float64)
        return lengths

    def passing(self, x: Tensor) -> Tensor:
        """Measure as usual: nothing is looked at later."""
        return self(x)


def numbers(column: Tensor) -> NDArray[Any]:
    """Return a column outside torch, where so few numbers are handled with less ado.

    >>> numbers(torch.ones(2))
    array([1., 1.], dtype=float32)
    """
    array: NDArray[Any] = column.numpy(force=column.requires_grad or not column.is_cpu)
    return array


def finite(values: Tensor) -> bool:
    """Return whether every value is a finite number.

    >>> large = torch.full((2,), LARGEST, dtype=torch.float64)
    >>> finite(torch.ones(2)), finite(torch.tensor([torch.inf, -torch.inf])), finite(large)
    (True, False, True)
    """
    return math.isfinite(values.sum().item()) or within(values, -LARGEST, LARGEST)


def within(values: Tensor, low: float, high: float) -> bool:
    """Return whether all values lie between the two; false if one is not a number.

    >>> within(torch.ones(2), 0, 1), within(torch.tensor([torch.nan]), 0, 1), within(torch.ones(0), 0, 1)
    (True, False, True)
    """
    if not values.numel():
        return True
    if values.is_cpu:
        column = numbers(values)
        return low <= float(column.min()) and float(column.max()) <= high
    least, most = torch.aminmax(values)
    return low <= float(least) and float(most) <= high


def chunks(size: int, row_elements: int, limit: int) -> list[slice]:
    """Return slices of ``range(size)`` that hold about ``limit`` elements each.

    >>> chunks(5, 10, 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, min(size, limit // max(1, row_elements)))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def roundings(terms: int) -> float:
    """Return how many units of rounding, times reach, a gradient that sums ``terms`` terms may be wrong by.

    Up to some 50 terms this was measured on inputs made to cancel, where a block of terms is added in order. Longer
    sums of ordinary data have a reach that grows with the root of their number, so there the figure is the one that
    asks for a second look at three times that; their errors, which do not all point one way, stay below it.

    A sum of no terms, such as that over a sequence of length zero, is not rounded.

    >>> roundings(16), round(roundings(1024), 3), roundings(0)
    (2.0, 0.875, 0.0)
    """
    return min(1 + terms / 16, 28 / math.sqrt(terms)) if terms else 0.0
