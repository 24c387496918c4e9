"""The shares of parameters that a model uses itself: where they met the batch, and the way from there to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from evenhand.gradients.adjoint import Shape, Step, scaled, summed, through
from evenhand.gradients.kernels import Share
from evenhand.gradients.linear import Outer, Rank1
from evenhand.gradients.measuring import Gauge
from evenhand.gradients.rooms import Room


class Followed:
    """The share of a parameter that met the batch by broadcasting: sums for each record, and the steps left to go."""

    joint = 1

    def __init__(self, grad: Tensor, factor: Tensor | float, piece: Broadcast):
        self._grad, self._factor, self._piece = grad, factor, piece
        last = max((i + 1 for i, each in enumerate(piece.steps) if not each.faithful), default=0)
        self._first, self._rest = piece.steps[:last], piece.steps[last:]
        self._rows = self._summed(magnitude=False)
        added = math.prod(grad.shape[1:]) // max(1, math.prod(piece.shape))
        self.terms = max(1, added) * math.prod(each.terms for each in piece.steps)

    def _summed(self, magnitude: bool) -> Tensor:
        rows = scaled(self._grad.abs() if magnitude else self._grad, self._factor, magnitude)
        rows = summed(rows, self._piece.inner).reshape(len(rows), *self._piece.shape)
        return through(rows, self._first, magnitude)

    def lengths(self, gauge: Gauge) -> list[Tensor]:
        """Steps that only move elements are not needed for this."""
        return [gauge(_flat(self._rows))]

    def reach(self, gauge: Gauge) -> Tensor | None:
        """The same with all signs dropped."""
        return None if self.terms == 1 else gauge(_flat(self._summed(magnitude=True)))

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Sum first, then take the steps that are linear."""
        total = (weights @ _flat(self._rows[rows])).view(1, *self._rows.shape[1:])
        return {"weight": through(total, self._rest)[0]}

    def instantiate(self) -> dict[str, Tensor]:
        """A gradient per record."""
        return {"weight": through(self._rows, self._rest)}


def _flat(rows: Tensor) -> Tensor:
    """Also of a parameter without dimensions."""
    return rows.reshape(len(rows), -1)


@dataclass(frozen=True)
class Broadcast:
    """``shape`` is that of the operand, ``inner`` the same without the batch in the dimensions of the result."""

    shape: Shape
    inner: Shape
    factor: float = 1.0
    steps: tuple[Step, ...] = ()

    def share(self, module: nn.Module, kept: tuple[Tensor, ...], trainable: frozenset[str], room: Room) -> Share:
        """From the gradient of the result, and the factor if that is a tensor."""
        return Followed(kept[0], kept[1] if len(kept) > 1 else self.factor, self)


@dataclass(frozen=True)
class Product:
    """A matrix product with a raw weight, as it is or transposed."""

    transposed: bool = False

    def share(self, module: nn.Module, kept: tuple[Tensor, ...], trainable: frozenset[str], room: Room) -> Share:
        """That of a linear layer."""
        grad, x = kept if self.transposed else kept[::-1]
        if x.shape[1] == 1:
            return Rank1(x.squeeze(1), grad.squeeze(1), trainable)
        return Outer(x, grad, trainable, room)
