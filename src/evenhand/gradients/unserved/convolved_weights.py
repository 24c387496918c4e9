"""Convolutions whose weight is made of parameters (standardised, of a given length, masked), or is a raw parameter.

The graph of the loss shows them, whatever module or function called the convolution. A record's gradient of the weight
is that of any convolution; from there it goes back to the parameters, by a form that was found for the whole weight
(``weight_map.py``) or else record by record through autograd's graph. A transposed convolution is one from its output
to its input.

Guarantee: a weight counts only if its graph has nothing but operations of torch and ends in trainable parameters alone.
Numbers that do not come from there but are constants of the graph must be the same for all records: see `steady`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from evenhand.errors import UsageError
from evenhand.gradients.layers.base import Share
from evenhand.gradients.layers.conv import Convolution, Convolved, Pads, flat
from evenhand.gradients.memory import ScratchBuffers, out_of_memory
from evenhand.gradients.row_norms import RowNorms, chunks
from evenhand.gradients.unserved.autograd_ops import Node
from evenhand.gradients.unserved.module_fallback import Held
from evenhand.gradients.unserved.weight_map import WeightMap, weight_map

WEIGHT = frozenset(["weight"])
JOINED = 16
"""Vectors that a record is taken to add to a sum at least: it is not the gradient as it was measured."""
CHUNK = 1 << 20
"""Elements of patches that are held in float64 at a time."""
LOST = 1000.0
"""How much longer scaled gradients may be than what is left of them, where both are measured in float64."""
Values: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class ConvolvedWeight:
    """The weight of one convolution, at ``edge`` of the graph; ``edge`` is None for a parameter as it is.

    ``formed`` keeps whether the first share used the form of the way back: all others of the batch do the same.
    """

    convolution: Convolution
    padding: tuple[int, ...]
    added: tuple[int, ...]
    transposed: bool
    edge: GradientEdge | None
    parameters: Mapping[str, nn.Parameter]
    versions: tuple[int, ...]
    formed: list[bool] = field(default_factory=list)
    module = nn.Identity()

    @classmethod
    def of(cls, node: Node, edge: GradientEdge | None, parameters: Mapping[str, nn.Parameter]) -> ConvolvedWeight:
        """Return the weight of the convolution behind a node of the graph."""
        sizes = node._saved_weight.detach(), node._saved_stride, node._saved_dilation, node._saved_groups
        versions = tuple(p._version for p in parameters.values())
        places = node._saved_padding, node._saved_output_padding, node._saved_transposed
        return cls(Convolution(*sizes), *places, edge, parameters, versions)

    @property
    def weight(self) -> Tensor:
        """Return the weight that was used."""
        return self.convolution.weight

    @cached_property
    def map(self) -> WeightMap | None:
        """Return the way back to the parameters, if it has a form for all records."""
        assert self.edge is not None
        self._demand()
        return weight_map(self.edge, self.weight, self.parameters)

    def share(
        self, module: nn.Module, tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Share:
        """Return the share, from the gradient of the result and the input."""
        x, grad = self._sides(tensors)
        convolved = self.convolved(x, grad, room)
        if self.edge is None:
            return convolved
        if not self.formed:
            self.formed.append(convolved.by_pixels and self.map is not None)
        way = self.map if self.formed[0] else None
        return Held(self, tensors, room) if way is None else _Mapped(self, way, convolved, x, grad, room)

    def convolved(self, x: Tensor, grad: Tensor, room: ScratchBuffers) -> Convolved:
        """Return the share of the weight itself, from input and output gradient."""
        return Convolved(self.convolution, x, self.pads, grad, WEIGHT, room)

    def _sides(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return input and output gradient; of a transposed convolution those of the one the other way round."""
        grad, x = tensors
        if not self.transposed:
            return x, grad
        for dim, (more, side) in enumerate(zip(self.added, self.padding, strict=True), start=2):
            grad = grad.narrow(dim, 0, grad.shape[dim] - max(0, more - side))
        return grad, x

    @property
    def pads(self) -> Pads:
        """Return what is added around the input; what was added to an output stands in the place of some of it."""
        return [(side, max(0, side - more)) for side, more in zip(self.padding, self.added, strict=True)]

    def gradients(self, tensors: Sequence[Tensor]) -> Values:
        """Return the parameters' gradients of some records, each by itself through the graph."""
        assert self.edge is not None
        self._demand()
        share = self.convolved(*self._sides(tensors), ScratchBuffers(lean=True))
        rows = share.instantiate()["weight"].to(self.weight.dtype)
        leaves = list(self.parameters.values())
        pull = partial(torch.autograd.grad, [self.edge], leaves, retain_graph=True, materialize_grads=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                columns = pull([rows], is_grads_batched=True)
        except RuntimeError as error:  # operations that vmap refuses
            if out_of_memory(error):
                raise
            columns = tuple(torch.stack(column) for column in zip(*[pull([row]) for row in rows], strict=True))
        return {name: rows.to(tensors[0].dtype) for name, rows in zip(self.parameters, columns, strict=True)}

    def _demand(self) -> None:
        if tuple(p._version for p in self.parameters.values()) != self.versions:
            raise UsageError("parameters were changed after the pass; ask for the weighted sum before the update")


class _Mapped:
    """Gradients of a weight as a convolution gives them, and their products with two directions, mapped together.

    ``convolved`` is the share of the weight, measured by inner products of pixels; its channels are scaled here.
    """

    def __init__(
        self,
        source: ConvolvedWeight,
        way: WeightMap,
        convolved: Convolved,
        x: Tensor,
        grad: Tensor,
        room: ScratchBuffers,
    ):
        self._source, self._map, self._x, self._grad, self._scaled = source, way, x, grad, convolved
        scale = way.scale.to(grad.dtype).view(-1, *[1] * (grad.dim() - 2))
        convolved.grad = torch.mul(grad, scale, out=room.like("by channel", grad))
        self._longer: Tensor | None = None
        self.terms = convolved.terms
        least = max(JOINED, self.terms)
        self.joint = least + least // 32 + 1

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor]:
        """Return the products of each record's gradient, and of the scaled one, with both directions (B, O, 2)."""
        of, places = self._source.convolution, self._grad.shape[2:]
        grads = self._grad, self._scaled.grad
        products = torch.empty(2, *self._grad.shape[:2], 2, dtype=torch.float64, device=self._grad.device)
        direction = self._map.direction.double()
        direction = direction.view(of.groups, -1, direction.shape[1]).mT
        for rows in chunks(len(self._x), of.groups * direction.shape[1] * math.prod(places), CHUNK):
            patches = _patches(self._x[rows].double(), of, self._source.pads, places)
            plain = patches.sum(3, keepdim=True).mul_(direction.shape[1] ** -0.5)
            along = torch.matmul(patches, direction).mT
            for into, every in zip(products, grads, strict=True):
                grad = every[rows].double().reshape(len(patches), of.groups, along.shape[2], -1)
                columns = torch.matmul(grad, plain), (grad * along).sum(3, keepdim=True)
                into[rows] = torch.cat(columns, dim=3).view(len(patches), -1, 2)
        return products[0], products[1]

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Measure the scaled gradients, and add what the products say."""
        scaled = torch.stack([column.double() for column in self._scaled.lengths(gauge)]).norm(dim=0)
        norm = (scaled.square() + self._map.squares(*self._both)).clamp_(min=0.0).sqrt_()
        self._longer = torch.where(scaled > norm, scaled / norm, 1.0)
        return [gauge(norm.unsqueeze(1))]

    def reach(self, gauge: RowNorms) -> Tensor:
        """Take the largest factor on the way of each channel, and more where so much is lost that the norm is moved."""
        outputs = torch.linalg.vector_norm(self._grad.flatten(2), dim=2).double() * self._map.largest
        reach = self._scaled.bound(gauge(self._x), outputs.norm(dim=1))
        return reach if self._longer is None else reach * (self._longer / LOST).clamp_(min=1.0)

    def weighted_sum(self, weights: Tensor, rows: slice) -> Values:
        """Sum gradients and products, and complete the sums."""
        scaled = self._scaled.weighted_sum(weights, rows)["weight"]
        products = torch.tensordot(weights.double(), self._both[0][rows], dims=1)
        completed = self._completed(scaled.unsqueeze(0), products.unsqueeze(0))
        return {name: part[0] for name, part in completed.items()}

    def instantiate(self) -> Values:
        """Complete each record's gradient."""
        return self._completed(self._scaled.instantiate()["weight"], self._both[0])

    def _completed(self, scaled: Tensor, products: Tensor) -> Values:
        shapes = {name: p.shape for name, p in self._source.parameters.items()}
        return self._map.complete(scaled.reshape(*products.shape[:2], -1), products, shapes)


def _patches(x: Tensor, of: Convolution, pads: Pads, out: Sequence[int]) -> Tensor:
    """Return what each place of the output sees of the input (B, C, *size), shape (B, groups, places, numbers).

    >>> _patches(torch.arange(4.0).view(1, 1, 4), Convolution(torch.ones(1, 1, 2), (2,), (1,), 1), [(0, 0)], (2,))
    tensor([[[[0., 1.],
              [2., 3.]]]])
    """
    x = functional.pad(x, flat(pads))
    spaces = zip(of.kernel_size, of.stride, of.dilation, out, strict=True)
    for dim, (size, stride, dilation, count) in enumerate(spaces):
        first = torch.arange(count, device=x.device).mul_(stride).unsqueeze(1)
        index = first + torch.arange(size, device=x.device).mul_(dilation)
        x = x.index_select(2 + 2 * dim, index.flatten())
        x = x.view(*x.shape[: 2 + 2 * dim], count, size, *x.shape[3 + 2 * dim :])
    x = x.view(len(x), of.groups, -1, *x.shape[2:])
    places = range(3, x.dim(), 2)
    return x.permute(0, 1, *places, 2, *[place + 1 for place in places]).reshape(*x.shape[:2], math.prod(out), -1)


def ends(root: Node, passed: set[Node]) -> list[nn.Parameter] | None:
    """Return the ends of a graph, whose operations are added to ``passed``; None if one of them is not torch's own.

    >>> theta = nn.Parameter(torch.ones(2))
    >>> [end is theta for end in ends((theta * theta.exp()).grad_fn, set())]
    [True]
    """
    parameters: dict[int, nn.Parameter] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            parameters[id(node.variable)] = node.variable
        elif isinstance(node, BackwardCFunction):
            return None
        elif node not in passed:
            passed.add(node)
            stack += [child for child, _ in node.next_functions if child is not None]
    return list(parameters.values())
