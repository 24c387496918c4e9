"""Products of matrices in which a row's result does not depend on where the row stands or how many others there are.

MKL computes products with few columns by dot products whose order follows the place of a row in memory: one record more
moves the others, and the last digit of their outputs changes. Rows that begin at a multiple of 64 bytes do not have
that, and a single column is computed as one of two. Measured by tests/edges/test_batch_size.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FEW = 16
"""Columns from which on products were found to have the same bits in every row."""
_FLOATS = 16
"""Numbers of float32 in 64 bytes."""


def narrow(columns: int) -> bool:
    """Return whether a product with so many columns needs care."""
    return columns < FEW


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` as ``functional.linear`` does, with rows that do not depend on their place.

    >>> x, weight = torch.randn(5, 17), torch.randn(3, 17)
    >>> bool(torch.equal(linear(x, weight, None)[1:], linear(x[1:].clone(), weight, None)))
    True
    """
    if not narrow(weight.shape[0]) or x.dtype != torch.float32 or not x.is_cpu or not x.numel():
        return functional.linear(x, weight, bias)
    rows = _aligned(x.reshape(-1, x.shape[-1]))
    if len(weight) == 1:
        zero = weight.new_zeros(1, weight.shape[1])
        both = functional.linear(rows, torch.cat([weight, zero]), None if bias is None else bias.expand(2))
        return both[:, :1].reshape(*x.shape[:-1], 1)
    return functional.linear(rows, weight, bias).view(*x.shape[:-1], len(weight))


def times(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight`` with rows that do not depend on their place.

    >>> torch.equal(times(torch.ones(2, 3), torch.ones(3, 4)), torch.full((2, 4), 3.0))
    True
    """
    return linear(x, weight.t().contiguous(), None) if narrow(weight.shape[1]) else x @ weight


def _aligned(rows: Tensor) -> Tensor:
    """Return the rows, each at a multiple of 64 bytes from the first."""
    count, width = rows.shape
    if width % _FLOATS == 0 and rows.stride() == (width, 1):
        return rows
    held = rows.new_empty(count, -(-width // _FLOATS) * _FLOATS)[:, :width]
    return held.copy_(rows)
