"""Linear layers: a rank-one product per record, or a sum of them over further leading dimensions (time)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.layers.base import WeightAndBias, combined, register_kernel
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import RowNorms, chunks

CHUNK = 1 << 18
"""Elements of instantiated gradients made at a time: their norms are taken while they are in the cache."""


class Rank1(WeightAndBias):
    """Input (B, in): the norm is ``|g_i| |a_i|``; nothing is summed within a record, so nothing can cancel."""

    terms = joint = 1

    def __init__(self, x: Tensor, grad: Tensor, trainable: frozenset[str]):
        self.x, self.grad, self.trainable = x, grad, trainable

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Return ``|g| |a|`` for the weight and ``|g|`` for the bias."""
        norms = gauge(self.grad)
        lengths = [norms] if "bias" in self.trainable else []
        if "weight" in self.trainable:  # in float64: a quick and a careful gauge then give the same bits
            lengths.append(norms.double() * gauge(self.x).double())
        return lengths

    def reach(self, gauge: RowNorms) -> None:
        """Return None: there is one term."""
        return None

    def _weight_sum(self, weights: Tensor, rows: slice) -> Tensor:
        return (self.grad[rows] * weights.unsqueeze(1)).t() @ self.x[rows]

    def _weight_gradients(self) -> Tensor:
        return self.grad.unsqueeze(2) * self.x.unsqueeze(1)

    def _bias(self) -> Tensor:
        return self.grad


class Outer(WeightAndBias):
    """Sums of outer products: ``x`` (B, T, in) and ``grad`` (B, T, out) -> (B, out, in).

    Three forms, chosen by cost: Gram matrices over T in float64 where T is short; the products themselves, kept for the
    weighted sum; or the products for the norm only and the sum computed again, where memory counts.
    """

    def __init__(self, x: Tensor, grad: Tensor, trainable: frozenset[str], room: ScratchBuffers):
        self.x, self.grad, self.trainable, self._room = x, grad, trainable, room
        self.terms = time = x.shape[1]
        parameters = x.shape[2] * grad.shape[2]
        self._keep = room.keeps(len(x), parameters, x)
        again = (0.8 * time + 40 if self._keep else 2 * time + 20) * parameters
        self._ghost = 4 * time * time * (x.shape[2] + grad.shape[2] + 50) < again
        self._flipped = x.shape[2] > 3 * grad.shape[2]  # long rows are slow to write
        self._kept: Tensor | None = None
        self._reach: Tensor | None = None
        self._summed: Tensor | None = None

    def _bias(self) -> Tensor:
        if self._summed is None:
            self._summed = self.grad.sum(1)
        return self._summed

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Measure by the chosen form."""
        if self.by_gram:
            return [gauge(self._by_gram().unsqueeze(1))]
        lengths = [gauge(self._bias())] if "bias" in self.trainable else []
        return [*lengths, self._by_product(gauge)] if "weight" in self.trainable else lengths

    def _by_gram(self) -> Tensor:
        """Return the length of weight and bias together, from what every two times have in common."""
        squares = torch.empty(len(self.x), dtype=torch.float64, device=self.x.device)
        reach = torch.empty_like(squares)
        width = self.terms * (self.x.shape[2] + self.grad.shape[2] + 2 * self.terms)
        for rows in chunks(len(self.x), width, CHUNK):
            x, grad = self.x[rows].double(), self.grad[rows].double()
            grams = torch.bmm(x, x.mT), torch.bmm(grad, grad.mT)
            squares[rows] = torch.linalg.vecdot(grams[0].flatten(1), grams[1].flatten(1))
            if "bias" in self.trainable:
                squares[rows] += grams[1].sum((1, 2))
            energies = [gram.diagonal(dim1=1, dim2=2).sum(1) for gram in grams]
            reach[rows] = (energies[0] + self.terms) * energies[1]
        self._reach = reach.sqrt_()
        return squares.clamp_(min=0.0).sqrt_()

    def _by_product(self, gauge: RowNorms) -> Tensor:
        size, sides = len(self.x), (self.grad, self.x)
        left, right = reversed(sides) if self._flipped else sides
        shape = (left.shape[2], right.shape[2])
        parts = chunks(size, shape[0] * shape[1], CHUNK)
        buffer = self._room.empty("products", (size if self._keep else parts[0].stop, *shape), self.x)
        measure = gauge if self._keep else gauge.passing
        lengths = []
        for rows in parts:
            out = buffer[rows] if self._keep else buffer[: rows.stop - rows.start]
            lengths.append(measure(torch.bmm(left[rows].mT, right[rows], out=out)))
        self._kept = buffer if self._keep else None
        return torch.cat(lengths)

    def reach(self, gauge: RowNorms) -> Tensor:
        """Bound by Cauchy-Schwarz over time."""
        if self._reach is not None:
            return self._reach
        reach: Tensor = gauge(self.grad).double() * self.terms**0.5
        if "weight" in self.trainable:
            reach *= (gauge(self.x).double().square_() / self.terms + 1.0).sqrt_()
        return reach

    @property
    def by_gram(self) -> bool:
        """Return whether weight and bias are measured by inner products in float64."""
        return self._ghost and "weight" in self.trainable

    @property
    def joint(self) -> int:
        """Return 1 where the products are kept, else the number of times."""
        return 1 if self._kept is not None or "weight" not in self.trainable else self.terms

    def _weight_sum(self, weights: Tensor, rows: slice) -> Tensor:
        """Sum the kept products, or take one matrix product over records and time."""
        if self._kept is not None:
            total = combined(weights, self._kept[rows])
            return total.t().contiguous() if self._flipped else total
        grad = self.grad[rows]
        scaled = torch.mul(grad, weights.view(-1, 1, 1), out=self._room.empty("scaled", grad.shape, grad))
        return scaled.flatten(0, 1).t() @ self.x[rows].flatten(0, 1)

    def _weight_gradients(self) -> Tensor:
        return torch.bmm(self.grad.mT, self.x)


@register_kernel(nn.Linear)
class LinearKernel:
    """``nn.Linear`` with input (B, ..., in)."""

    streams = True
    """A weighted sum is one product over all records: no record's gradient is held."""

    def serves(self, module: nn.Linear) -> bool:
        """Return whether the layer has its own two parameters."""
        return module._parameters.keys() == {"weight", "bias"}

    def inner(self, module: nn.Linear) -> int:
        """Return 1: a place is a vector."""
        return 1

    def accepts(self, module: nn.Linear, x: Tensor) -> bool:
        """Accept a batch of vectors or of sequences of them."""
        return x.dim() >= 2

    def forward(self, module: nn.Linear, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the layer's output."""
        return linear(x, module.weight, module.bias), ()

    def input_gradient(self, module: nn.Linear, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Return ``grad @ weight``."""
        return times(grad, module.weight.to(grad.dtype))

    def share(
        self,
        module: nn.Linear,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Rank1 | Outer:
        """Return one outer product per record, or a sum of them."""
        if x.dim() == 2:
            return Rank1(x, grad, trainable)
        return Outer(x.flatten(1, -2), grad.flatten(1, -2), trainable, room)

    def join(self, module: nn.Linear, calls: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Join several calls as one with more times."""
        columns = zip(*calls, strict=True)
        return tuple(torch.cat([t.reshape(len(t), -1, t.shape[-1]) for t in column], dim=1) for column in columns)


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
    padded = rows.new_empty(count, -(-width // _FLOATS) * _FLOATS)[:, :width]
    return padded.copy_(rows)
