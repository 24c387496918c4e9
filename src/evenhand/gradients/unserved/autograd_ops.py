"""Operations of torch's graph: what each does to gradients, so that they can be followed one record at a time.

Only operations that are listed here are followed. Each is linear in the gradient: a factor, a sum over what was
broadcast, or a move of elements. All work on rows: the first dimension is the records, the others are the tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any
"""A node of torch's graph; its attributes depend on the operation."""
Factor: TypeAlias = Tensor | float
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """From rows of an operation's output to rows of one of its inputs.

    ``apply(rows, magnitude)`` with ``magnitude`` takes sizes through: every factor without its sign. ``terms`` elements
    are added for each element of the result; a ``faithful`` step moves elements without loss, so it keeps lengths.
    """

    apply: Callable[[Tensor, bool], Tensor]
    terms: int = 1
    faithful: bool = False


def shape_of(node: Node, output: int = 0) -> Shape:
    """Return the shape of what the operation behind ``node`` returned.

    >>> shape_of((torch.ones(2, 3, requires_grad=True) * 2).grad_fn)
    (2, 3)
    """
    return tuple(node._input_metadata[output].shape)


def summed(rows: Tensor, shape: Shape) -> Tensor:
    """Return rows of what was broadcast to give tensors of this many dimensions.

    >>> summed(torch.ones(5, 4, 3), (3,)), summed(torch.ones(5, 4, 3), (4, 1)).shape
    (tensor([[4., 4., 4.],
            [4., 4., 4.],
            [4., 4., 4.],
            [4., 4., 4.],
            [4., 4., 4.]]), torch.Size([5, 4, 1]))
    """
    padded = (1,) * (rows.dim() - 1 - len(shape)) + shape
    dims = [i + 1 for i, size in enumerate(padded) if size == 1 and rows.shape[i + 1] != 1]
    return (rows.sum(dims) if dims else rows).reshape(len(rows), *shape)


def scaled(rows: Tensor, factor: Factor, magnitude: bool) -> Tensor:
    """Return rows times a factor, or times its size."""
    if isinstance(factor, Tensor):
        return rows * (factor.abs() if magnitude else factor)
    factor = abs(factor) if magnitude else factor
    return rows if factor == 1 else rows * factor


def _softplus(node: Node) -> Tensor:
    scaled_input = node._saved_self * node._saved_beta
    return torch.where(scaled_input > node._saved_threshold, 1.0, torch.sigmoid(scaled_input))


def _quotient(node: Node, place: int) -> Tensor:
    below: Tensor = node._saved_other
    return below.reciprocal() if place == 0 else -(node._saved_self / below) / below


FACTORS: dict[str, Callable[[Node, int], Factor]] = {
    "AddBackward0": lambda node, place: 1.0 if place == 0 else float(node._saved_alpha),
    "SubBackward0": lambda node, place: 1.0 if place == 0 else -float(node._saved_alpha),
    "RsubBackward1": lambda node, place: -float(node._saved_alpha),
    "MulBackward0": lambda node, place: node._saved_other if place == 0 else node._saved_self,
    "DivBackward0": _quotient,
    "NegBackward0": lambda node, place: -1.0,
    "ExpBackward0": lambda node, place: node._saved_result,
    "SigmoidBackward0": lambda node, place: node._saved_result * (1 - node._saved_result),
    "TanhBackward0": lambda node, place: 1 - node._saved_result.square(),
    "SoftplusBackward0": lambda node, place: _softplus(node),
    "ExpandBackward0": lambda node, place: 1.0,
    "RepeatBackward0": lambda node, place: 1.0,
    "WhereBackward0": lambda node, place: node._saved_condition if place == 0 else ~node._saved_condition,
    "MaskedFillBackward0": lambda node, place: ~node._saved_mask,
}
"""Operations on elements, with broadcasting: the derivative of the output by the input at a place."""

MEETINGS: dict[tuple[str, int], Callable[[Node], Factor]] = {
    ("PreluKernelBackward0", 1): lambda node: node._saved_self.clamp(max=0.0),
    ("NativeLayerNormBackward0", 1): lambda node: (node._saved_input - node._saved_result1) * node._saved_result2,
    ("NativeLayerNormBackward0", 2): lambda node: 1.0,
}
"""Derivatives of operations that mean something only on data: name and place of the parameter."""


def group_normalised(node: Node) -> Tensor:
    """Return the input of ``functional.group_norm``, normalised: the derivative of the output by the scale.

    >>> x, scale = torch.tensor([[[1.0, 3e5]]]), torch.ones(1, requires_grad=True)
    >>> group_normalised(torch.nn.functional.group_norm(x, 1, scale).grad_fn)
    tensor([[[-1.,  1.]]])
    """
    x: Tensor = node._saved_input
    apart = x.reshape(len(x), node._saved_group, -1)
    mean, inverse = (t.reshape(len(x), -1, 1) for t in (node._saved_result1, node._saved_result2))
    normalised: Tensor = (apart - mean) * inverse
    return normalised.detach().view(x.shape)


_RESHAPES = {
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "AliasBackward0", "CloneBackward0", "ToCopyBackward0",
}  # fmt: skip


def factor_of(node: Node, place: int, *, data: bool) -> Factor | None:
    """Return the derivative of an operation's elements by the operand at a place; None for an unknown operation.

    >>> x = torch.ones(3, requires_grad=True)
    >>> factor_of((x * 5).grad_fn, 0, data=True), factor_of((3 - x).grad_fn, 0, data=True)
    (tensor(5.), -1.0)
    """
    name = node.name()
    if name == "RepeatBackward0" and _tiles(node):
        return None
    if name in FACTORS:
        factor = FACTORS[name](node, place)
    elif data and (name, place) in MEETINGS:
        factor = MEETINGS[name, place](node)
    else:
        return None
    if isinstance(factor, Tensor) and not factor.is_floating_point():
        return factor.to(node._input_metadata[0].dtype)
    return factor


def _tiles(node: Node) -> bool:
    """Return whether something else than single elements is repeated, which broadcasting does not do."""
    repeats, sizes = node._saved_repeats, node._saved_self_sym_sizes
    padded = (1,) * (len(repeats) - len(sizes)) + tuple(sizes)
    return any(count != 1 and size != 1 for count, size in zip(repeats, padded, strict=True))


def step(node: Node, place: int, shape: Shape) -> Step | None:
    """Return how rows get past an operation on parameters to its input of this shape; None if it is unknown.

    >>> weight = torch.arange(6.0).view(2, 3).requires_grad_()
    >>> found = step(weight.t().grad_fn, 0, (2, 3))
    >>> found.apply(torch.ones(5, 3, 2), False).shape, found.faithful
    (torch.Size([5, 2, 3]), True)
    """
    name, factor = node.name(), factor_of(node, place, data=False)
    if factor is not None:
        terms = max(1, math.prod(shape_of(node)) // max(1, math.prod(shape)))
        return Step(lambda rows, magnitude: summed(scaled(rows, factor, magnitude), shape), terms)
    if name in _RESHAPES:
        return _move(lambda rows: rows.reshape(len(rows), *shape))
    if name in _MOVES:
        return _MOVES[name](node, place, shape)
    return None


def _move(apply: Callable[[Tensor], Tensor], *, faithful: bool = True) -> Step:
    return Step(lambda rows, magnitude: apply(rows), faithful=faithful)


def _dim(value: int, count: int) -> int:
    """Return a saved dimension; negative ones are saved as unsigned numbers."""
    return (value - (1 << 64) if value >= 1 << 63 else value) % count


def _transposed(node: Node, place: int, shape: Shape) -> Step:
    first, second = (_dim(dim, len(shape)) for dim in (node._saved_dim0, node._saved_dim1))
    return _move(lambda rows: rows.transpose(first + 1, second + 1))


def _permuted(node: Node, place: int, shape: Shape) -> Step:
    dims = [_dim(dim, len(shape)) for dim in node._saved_dims]
    back = [0, *(dims.index(dim) + 1 for dim in range(len(dims)))]
    return _move(lambda rows: rows.permute(back))


def _placed(dim: int, index: int | slice, shape: Shape) -> Step:
    where: tuple[Any, ...] = (slice(None),) * (dim + 1) + (index,)

    def apply(rows: Tensor) -> Tensor:
        whole = rows.new_zeros(len(rows), *shape)
        whole[where] = rows
        return whole

    return _move(apply)


def _sliced(node: Node, place: int, shape: Shape) -> Step:
    index = slice(node._saved_start, node._saved_end, node._saved_step)
    return _placed(_dim(node._saved_dim, len(shape)), index, shape)


def _selected(node: Node, place: int, shape: Shape) -> Step:
    dim = _dim(node._saved_dim, len(shape))
    return _placed(dim, _dim(node._saved_index, shape[dim]), shape)


def _looked_up(node: Node, place: int, shape: Shape) -> Step | None:
    index: Tensor = node._saved_indices
    padded = node._saved_padding_idx < 1 << 63 and node._saved_padding_idx >= 0
    return None if padded or node._saved_scale_grad_by_freq else _taken(index, shape)


def _indexed(node: Node, place: int, shape: Shape) -> Step | None:
    first, *others = node._saved_indices
    whole = first is not None and first.dtype == torch.long and all(index is None for index in others)
    return _taken(first % shape[0], shape) if whole else None


def _taken(index: Tensor, shape: Shape) -> Step:
    """Return the way back from rows of a table at these places to the table."""
    flat = index.flatten()
    terms = int(flat.bincount().max()) if len(flat) else 1

    def apply(rows: Tensor, magnitude: bool) -> Tensor:
        flattened = rows.flatten(1, index.dim()) if index.dim() else rows.unsqueeze(1)
        return rows.new_zeros(len(rows), *shape).index_add_(1, flat, flattened)

    return Step(apply, terms, faithful=terms == 1)


def _joined(node: Node, place: int, shape: Shape) -> Step | None:
    dim, before = _dim(node._saved_dim, len(shape)), node.next_functions[:place]
    if any(child is None for child, _ in before):
        return None
    start = sum(shape_of(child, output)[dim] for child, output in before)
    return _move(lambda rows: rows.narrow(dim + 1, start, shape[dim]), faithful=False)


_MOVES: dict[str, Callable[[Node, int, Shape], Step | None]] = {
    "TBackward0": lambda node, place, shape: _move(lambda rows: rows.mT if len(shape) == 2 else rows),
    "TransposeBackward0": _transposed,
    "PermuteBackward0": _permuted,
    "SliceBackward0": _sliced,
    "SelectBackward0": _selected,
    "EmbeddingBackward0": _looked_up,
    "IndexBackward0": _indexed,
    "CatBackward0": _joined,
}


def through(rows: Tensor, steps: Sequence[Step], magnitude: bool = False) -> Tensor:
    """Return rows past several operations."""
    for each in steps:
        rows = each.apply(rows, magnitude)
    return rows
