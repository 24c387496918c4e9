"""The norm of a weight that several calls share, as a table that is looked up and as the weight of a linear layer.

The gradients of the calls are added before the norm is taken. For a vocabulary of 50,000 words they are too large to be
added for one record after the other; the inner products of what the calls saw give the same number, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenhand.gradients.layers.base import Share
from evenhand.gradients.layers.embedding import Lookup
from evenhand.gradients.layers.linear import Outer, Rank1
from evenhand.gradients.row_norms import chunks

CHUNK = 1 << 20
"""Elements of inputs and gradients that are held in float64 at a time."""
Sides = tuple[Tensor, Tensor]
"""Of a linear layer output gradients (B, T, out) and inputs (B, T, in), of a look-up indices (B, T) and gradients."""


def tied_norms(shares: Sequence[Share], parameters: int) -> Tensor | None:
    """Return the length of the sum of these gradients for each record; None if another way is quicker or needed.

    ``parameters`` is the size of the weight. What is not exactly a linear layer's weight or a look-up is left alone.

    >>> g, x, index = torch.ones(2, 1, 4), torch.ones(2, 1, 3), torch.tensor([[0], [1]])
    >>> from evenhand.gradients.memory import ScratchBuffers
    >>> room, weight = ScratchBuffers(lean=False), frozenset(["weight"])
    >>> shares = [Outer(x, g, weight, room), Lookup(index, torch.ones(2, 1, 3), 4, room)]
    >>> tied_norms(shares, 1 << 20).square()  # three rows of three ones, one row of three twos
    tensor([21., 21.], dtype=torch.float64)
    """
    sides: list[Sides] = []
    for share in shares:
        if isinstance(share, Lookup):
            sides.append((share.index, share.grad))
        elif isinstance(share, Outer | Rank1) and share.trainable == {"weight"}:
            wide = share.grad.dim() == 2
            sides.append((share.grad.unsqueeze(1), share.x.unsqueeze(1)) if wide else (share.grad, share.x))
        else:
            return None
    times, width = sum(s[0].shape[1] for s in sides), sum(t.shape[-1] for s in sides for t in s if t.dim() == 3)
    if 4 * times * times * (width + 50) > (2 * times + 20) * parameters:
        return None
    squares = []
    for rows in chunks(len(sides[0][0]), times * (width + times), CHUNK):
        some = [(_wide(a[rows]), _wide(b[rows])) for a, b in sides]
        pairs = [(i, j) for i in range(len(some)) for j in range(i + 1)]
        squares.append(torch.stack([(2 - (i == j)) * _inner(some[i], some[j]) for i, j in pairs]).sum(0))
    return torch.cat(squares).clamp_(min=0.0).sqrt_()


def _wide(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def _inner(one: Sides, other: Sides) -> Tensor:
    """Return the inner product of the gradients of two calls, for each record."""
    rows = torch.bmm(one[1], other[1].mT)
    return (_met(one[0], other[0]) * rows).sum((1, 2))


def _met(one: Tensor, other: Tensor) -> Tensor:
    """Return what each time of one call (second dimension) has in common with each of the other in the table's rows."""
    if one.dim() == other.dim() == 3:
        return torch.bmm(one, other.mT)
    if one.dim() == other.dim() == 2:
        return (one.unsqueeze(2) == other.unsqueeze(1)).double()
    if one.dim() == 2:
        return _met(other, one).mT
    return one.gather(2, other.unsqueeze(1).expand(-1, one.shape[1], -1))
