"""Records' gradients of recurrent layers: sums over time of gate gradients with what entered the gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from evenhand.gradients.fast_paths import fast
from evenhand.gradients.layers.linear import Outer
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import ROW_LIMIT, RowNorms, chunks, roundings

LIMIT = ROW_LIMIT**2
CHUNK = 1 << 17
"""Elements that are taken to float64 at a time: they should stay in the cache."""
BLUR = 1e-16
"""The error that float64 leaves in a squared norm, as a part of the squared reach."""
FIRM = 32.0
"""Squared reach over squared norm up to which Gram matrices may be float32.

Their error was measured on independent, coherent, cancelling and positive inputs up to 16384 wide: 5e-7 of the squared
reach at most by torch, 1.3e-7 by compiled loops. At this limit a norm is then off by 8e-6 at most.
"""


Grams: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Of each record: the squared norm of the sum of its terms, their norms added, and whether no square was extreme."""


class Gates:
    """``x`` (B, T, in) enters gates whose gradients are ``grad`` (B, T, out), through a weight and some biases.

    ``columns`` are the trainable weights by name, each a range of ``in``; ``biases`` the trainable biases, all with the
    same gradient. Rows of a parameter are those of ``grad`` turned by ``turn``. Where T is short the norm comes from
    Gram matrices over time, and biases are ones that are added to that of ``x``. Rows whose terms cancel are looked at
    again in float64.
    """

    def __init__(
        self,
        x: Tensor,
        grad: Tensor,
        columns: Mapping[str, tuple[int, int]],
        biases: Sequence[str],
        turn: int,
        room: ScratchBuffers,
    ):
        first = min((start for start, _ in columns.values()), default=0)
        last = max((stop for _, stop in columns.values()), default=0)
        self._columns = {name: (start - first, stop - first) for name, (start, stop) in columns.items()}
        self._x, self._grad = x[:, :, first:last], grad
        self._biases, self._turn, self._room = tuple(biases), turn, room
        self.terms = time = x.shape[1]
        self._sums = grad.sum(1) if biases else None
        self._reach: Tensor | None = None
        parameters = (last - first) * grad.shape[2]
        again = (0.8 * time + 40 if room.keeps(len(x), parameters, x) else 2 * time + 20) * parameters
        products = columns and 4 * time * time * (last - first + grad.shape[2] + 50) >= again
        self._products = Outer(self._x, grad, frozenset({"weight"}), room) if products else None

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Return one column for all parameters by Gram matrices; else one for each bias and one for the weights."""
        if self._columns and self._products is None:
            return [gauge(self._by_gram().unsqueeze(1))]
        lengths = [] if self._sums is None else [gauge(self._sums)] * len(self._biases)
        return lengths if self._products is None else [*lengths, *self._products.lengths(gauge)]

    def _by_gram(self) -> Tensor:
        x, grad, ones = self._x, self._grad, len(self._biases)
        firm = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        squares = torch.empty(len(x), dtype=torch.float64, device=x.device)
        reach = torch.empty_like(squares)
        if x.dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest":
            squares, reach, normal = _grams(x, grad, ones)
            firm = normal & (squares * FIRM >= reach.square()) if x.dtype != torch.float64 else ~firm
        rows = (~firm).nonzero().squeeze(1)
        for part in chunks(len(rows), self.terms * (x.shape[2] + grad.shape[2]), CHUNK):
            block = rows[part]
            squares[block], reach[block], _ = _grams(x[block].double(), grad[block].double(), ones)
        # A norm that cancels to nothing is taken for what float64 can tell apart from nothing, never for less.
        lengths = torch.maximum(squares, reach.square() * BLUR).sqrt_()
        blurred = reach.square() / (lengths * roundings(self.terms)).clamp_(min=1e-300)
        self._reach = torch.where(firm, torch.maximum(reach, blurred), reach)
        return lengths

    def reach(self, gauge: RowNorms) -> Tensor | None:
        """Return the norms of all times, added; or more by Cauchy-Schwarz."""
        if self.terms == 1:
            return None
        if self._reach is not None:
            return self._reach
        many = max(1, len(self._biases)) ** 0.5
        if self._products is None:
            many *= self.terms**0.5
        extent: Tensor = gauge(self._grad).double() if self._products is None else self._products.reach(gauge)
        return extent.mul(many)

    @property
    def joint(self) -> int:
        """Return the number of times, or 1 where the products are kept."""
        if self._products is not None:
            return self._products.joint
        return self.terms if self._columns else 1

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Take one matrix product over times and records for all weights, unless the products were kept."""
        sums = {}
        if self._sums is not None:
            # Both biases have the same gradient, each in memory of its own: sums may be added to in place.
            sums = {name: self._turned(weights @ self._sums[rows], 0) for name in self._biases}
        if self._products is not None:
            sums |= self._split(self._products.weighted_sum(weights, rows)["weight"], 0)
        elif self._columns:
            x, grad = self._x[rows].transpose(0, 1), self._grad[rows].transpose(0, 1)
            scaled = torch.mul(x, weights.view(1, -1, 1), out=self._room.empty("scaled", x.shape, x))
            sums |= self._split(grad.flatten(0, 1).t() @ scaled.flatten(0, 1), 0)
        return sums

    def instantiate(self) -> dict[str, Tensor]:
        """Return the products and the sums."""
        rows = {} if self._sums is None else dict.fromkeys(self._biases, self._turned(self._sums, 1))
        return rows | self._split(torch.bmm(self._grad.mT, self._x), 1) if self._columns else rows

    def _split(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        weight = self._turned(weight, dim)
        return {name: weight[..., start:stop].contiguous() for name, (start, stop) in self._columns.items()}

    def _turned(self, gradient: Tensor, dim: int) -> Tensor:
        return gradient.roll(-self._turn, dim) if self._turn else gradient


def _grams(x: Tensor, grad: Tensor, ones: int) -> Grams:
    """Measure by Gram matrices over time, in compiled loops where they can be had."""
    return fast().grams(x, grad, ones, LIMIT) or torch_grams(x, grad, ones, LIMIT)


def torch_grams(x: Tensor, grad: Tensor, ones: int, most: float) -> Grams:
    """Measure by torch, in any precision and on any device.

    >>> [column.tolist() for column in torch_grams(torch.ones(1, 2, 1), torch.tensor([[[3.0], [-1.0]]]), 0, 1e30)]
    [[4.0], [4.0], [True]]
    """
    inner = [torch.bmm(t, t.mT).double() for t in (x, grad)]
    energies = torch.stack([gram.diagonal(dim1=1, dim2=2).sum(1) for gram in inner])
    inner[0] += ones
    squares = torch.linalg.vecdot(inner[0].flatten(1), inner[1].flatten(1))
    reach = torch.mul(*(gram.diagonal(dim1=1, dim2=2) for gram in inner)).sqrt_().sum(1)
    return squares, reach, ((energies >= 1 / most) & (energies <= most)).all(0)
