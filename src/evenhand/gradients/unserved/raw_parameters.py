"""Parameters that a model uses itself (tokens, positions, scales, gates, raw weights), without a layer's kernel.

Autograd would add their gradient up over the batch. The graph of the loss shows where that happens: at operations where
something made of parameters alone meets the batch by broadcasting, or where a raw weight multiplies it. The gradient of
such an operation's output still has a row per record, so it is asked for instead, and followed from there to the
parameter record by record (``autograd_ops.py``).

Guarantee: a parameter counts as covered only if every path from the loss to it passes one such operation and after that
only operations that are known. Otherwise it is not, and autograd's gradient gives the bypass away as ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from evenhand.gradients.layers.base import Instantiated, Share, Shares
from evenhand.gradients.layers.embedding import lookup
from evenhand.gradients.layers.linear import Outer, Rank1
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.model_layout import Call, ServedLayer
from evenhand.gradients.row_norms import RowNorms, working_dtype
from evenhand.gradients.unserved.autograd_ops import (
    Node,
    Shape,
    Step,
    factor_of,
    group_normalised,
    scaled,
    shape_of,
    step,
    summed,
    through,
)
from evenhand.gradients.unserved.convolved_weights import ConvolvedWeight, ends


def _followed(piece: Broadcast, grad: Tensor, factor: Tensor | float) -> Share:
    """Return the share of a parameter that met the batch by broadcasting: rows held up to the steps left to go.

    Rows are measured before the steps that only move elements; sums are taken first, since those steps are linear.
    """
    last = max((i + 1 for i, each in enumerate(piece.steps) if not each.faithful), default=0)
    added = math.prod(grad.shape[1:]) // max(1, math.prod(piece.shape))
    terms = max(1, added) * math.prod(each.terms for each in piece.steps)

    def summed_rows(magnitude: bool) -> Tensor:
        rows = scaled(grad.abs() if magnitude else grad, factor, magnitude)
        rows = summed(rows, piece.inner).reshape(len(rows), *piece.shape)
        return through(rows, piece.steps[:last], magnitude)

    def reach(gauge: RowNorms) -> Tensor:
        rows = summed_rows(magnitude=True)
        return gauge(rows.reshape(len(rows), -1))

    rows = summed_rows(magnitude=False)
    flat = Instantiated({"weight": rows.reshape(len(rows), -1)}, terms, None if terms == 1 else reach)
    return Shares([flat], partial(_moved, rows.shape[1:], piece.steps[last:]))


def _moved(shape: Shape, steps: tuple[Step, ...], parts: Sequence[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Take the last steps with a sum (``dim`` 0) or with the gradients of all records (1)."""
    flat = parts[0]["weight"]
    moved = through(flat.view(len(flat) if dim else 1, *shape), steps)
    return {"weight": moved if dim else moved[0]}


@dataclass(frozen=True)
class Broadcast:
    """``shape`` is that of the operand, ``inner`` the same without the batch in the dimensions of the result."""

    shape: Shape
    inner: Shape
    factor: float = 1.0
    steps: tuple[Step, ...] = ()

    def share(
        self, module: nn.Module, tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Share:
        """Return the share, from the gradient of the result and the factor if that is a tensor."""
        return _followed(self, tensors[0], tensors[1] if len(tensors) > 1 else self.factor)


@dataclass(frozen=True)
class Product:
    """A matrix product with a raw weight, as it is or transposed."""

    transposed: bool = False

    def share(
        self, module: nn.Module, tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Share:
        """Return the share of a linear layer."""
        grad, x = tensors if self.transposed else tensors[::-1]
        if x.shape[1] == 1:
            return Rank1(x.squeeze(1), grad.squeeze(1), trainable)
        return Outer(x, grad, trainable, room)


@dataclass(frozen=True)
class LookedUp:
    """Rows of a raw table, looked up at indices that are the batch's; ``padding`` is an index without a gradient."""

    entries: int
    padding: int | None

    def share(
        self, module: nn.Module, tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Share:
        """Return the share of an embedding."""
        return lookup(tensors[1], tensors[0], self.entries, self.padding, room)


Piece: TypeAlias = Broadcast | Product | LookedUp | ConvolvedWeight
MOST_USES = 1000
"""A graph with more paths than this is not followed."""
WEIGHT = {"MmBackward0": 1, "AddmmBackward0": 2}
"""Matrix products, and the place of the factor that may be a parameter."""
CONVOLUTION, GROUP_NORM = "ConvolutionBackward0", "NativeGroupNormBackward0"
TURNS = {"TBackward0", "PermuteBackward0", "TransposeBackward0"}
Key: TypeAlias = tuple[str, ...]
"""Which way a gradient went: name of the parameter and of the operations, whatever their sizes."""


@dataclass(frozen=True)
class _Meeting:
    """An operation on the batch: where the batch is in its result (None: folded together with time, batch first)."""

    key: Key
    node: Node
    batch: int | None
    tensors: tuple[Tensor, ...]
    piece: Piece

    def ending(self, path: _Path) -> Piece | None:
        """Return the piece with what lies between the operation and the parameter, if that is known."""
        if isinstance(self.piece, Broadcast):
            return Broadcast(self.piece.shape, self.piece.inner, self.piece.factor, path.steps)
        if not isinstance(self.piece, Product):
            return self.piece if not path.names else None
        if not path.names:
            return Product()
        turned = len(path.names) == 1 and path.names[0] in TURNS
        return Product(True) if turned and through(torch.empty(1, 2, 3), path.steps).shape == (1, 3, 2) else None


@dataclass(frozen=True)
class _Path:
    """From an operand to a parameter."""

    parameter: nn.Parameter
    names: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Use:
    """One way in which a parameter meets the batch."""

    key: Key
    meeting: _Meeting
    site: ServedLayer

    def call(self, grad: Tensor, size: int) -> Call:
        """Return the recorded call, given the gradient of the operation's result."""
        batch, tensors = self.meeting.batch, self.meeting.tensors
        rows = grad.reshape(size, -1, *grad.shape[1:]) if batch is None else grad.movedim(batch, 0)
        return Call.of(self.site, (rows, *tensors))


@dataclass(frozen=True)
class Uses:
    """All direct uses of parameters by one batch.

    Autograd hands out the gradient of a result that it needs itself before the hooks of that tensor have run, and of
    others after. ``passed`` keeps what an operation was really given, by its place in ``uses``.
    """

    size: int
    uses: tuple[Use, ...] = ()
    passed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def covered(self) -> frozenset[int]:
        """Return the identities of the parameters for which autograd need not be asked."""
        return frozenset(id(p) for use in self.uses for p in use.site.parameters.values())

    @property
    def weights(self) -> dict[Key, tuple[tuple[int, ...], Tensor]]:
        """Return the weights that are made of parameters, with the versions of these."""
        pieces = {use.key: use.meeting.piece for use in self.uses}
        return {key: (p.versions, p.weight) for key, p in pieces.items() if isinstance(p, ConvolvedWeight)}

    @property
    def edges(self) -> list[GradientEdge]:
        """Return the edges whose gradients autograd is asked for instead."""
        return [GradientEdge(use.meeting.node, 0) for use in self.uses]

    def watch(self) -> Uses:
        """Watch every operation; returns itself. The graph must not hold on to itself, so its hooks hold a dict."""
        for i, use in enumerate(self.uses):
            use.meeting.node.register_prehook(partial(_keep, self.passed, i))
        return self

    def calls(self, gradients: Sequence[Tensor | None]) -> list[Call]:
        """Return the recorded calls, given these gradients."""
        every = [self.passed.get(i, gradient) for i, gradient in enumerate(gradients)]
        pairs = zip(self.uses, every, strict=True)
        return [use.call(grad, self.size) for use, grad in pairs if grad is not None]


def _keep(passed: dict[int, Tensor], place: int, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        passed[place] = gradients[0]


class _UnknownError(Exception):
    """A way that cannot be followed."""


def uses(loss: Tensor, trainable: Mapping[str, nn.Parameter], size: int, known: Collection[Key] | None) -> Uses:
    """Return where the graph of ``loss`` uses trainable parameters; nothing if one way cannot be followed.

    With ``known`` only ways that are among these count.

    >>> scale, x = nn.Parameter(torch.ones(3)), torch.ones(2, 3)
    >>> [use.key for use in uses((x * scale).sum(1), {"scale": scale}, 2, None).uses]
    [('scale', 'MulBackward0', '1', '0')]
    >>> uses(x.matmul(scale), {"scale": scale}, 2, None).uses
    ()
    """
    if loss.grad_fn is None:
        return Uses(size)
    try:
        return Uses(size, tuple(_Walk(trainable, size, known).uses(loss.grad_fn))).watch()
    except _UnknownError:
        return Uses(size)


class _Walk:
    def __init__(self, trainable: Mapping[str, nn.Parameter], size: int, known: Collection[Key] | None):
        self._names, self._size, self._known = {id(p): name for name, p in trainable.items()}, size, known
        self._pure: dict[Node, bool] = {}
        self._followed: set[Node] = set()
        self._lost: set[int] = set()

    def uses(self, root: Node) -> list[Use]:
        self._classify(root)
        uses: list[Use] = []
        seen, stack = {root}, [root]
        while stack:
            node = stack.pop()
            for place, (child, output) in enumerate(node.next_functions):
                if child is None:
                    continue
                try:
                    met = self._meet(node, place, child, output) if self._pure[child] else []
                except _UnknownError:
                    self._lose(child)
                    continue
                uses += met
                if not met and self._pure[child] and hasattr(child, "variable"):
                    self._lost.add(id(child.variable))
                if not met and child not in seen:
                    seen.add(child)
                    stack.append(child)
        uses = [use for use in uses if self._lost.isdisjoint(map(id, use.site.all_parameters))]
        # What flows into an operation from beyond a meeting has been followed already.
        if len(uses) > MOST_USES or any(use.meeting.node in self._followed for use in uses):
            raise _UnknownError
        return uses

    def _lose(self, root: Node) -> None:
        """Give up all parameters behind an operand."""
        seen, stack = {root}, [root]
        while stack:
            node = stack.pop()
            if hasattr(node, "variable"):
                self._lost.add(id(node.variable))
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)

    def _classify(self, root: Node) -> None:
        """Mark the operations whose operands depend on nothing but trainable parameters."""
        stack = [root]
        while stack:
            node = stack[-1]
            children = [child for child, _ in node.next_functions if child is not None]
            waiting = [child for child in children if child not in self._pure]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            leaf = hasattr(node, "variable") and id(node.variable) in self._names
            self._pure[node] = leaf or (bool(children) and all(self._pure[child] for child in children))

    def _meet(self, node: Node, place: int, child: Node, output: int) -> list[Use]:
        """Return the uses of all parameters behind one operand; none if the operation does not put it to the batch."""
        if node.name() == CONVOLUTION and place == 1:
            return self._convolve(node, child, output)
        paths: list[_Path] = []
        passed: set[Node] = set()
        for meeting in _meetings(node, place, shape_of(child, output), self._size):
            paths = paths or list(self._paths(child, output, passed))
            uses = []
            for path in paths:
                name, piece = self._names[id(path.parameter)], meeting.ending(path)
                if piece is None:
                    raise _UnknownError
                dtype = working_dtype(path.parameter.dtype)
                site = ServedLayer(
                    nn.Identity(), piece, {"weight": path.parameter}, (path.parameter,), dtype, piece=True
                )
                uses.append(Use((name, *meeting.key, *path.names), meeting, site))
            if self._known is None or all(use.key in self._known for use in uses):
                self._followed |= passed
                return uses
        return []

    def _convolve(self, node: Node, child: Node, output: int) -> list[Use]:
        """Return the use of all parameters that the weight of a convolution is made of."""
        x, weight = node._saved_input.detach(), node._saved_weight
        if shape_of(node)[0] != self._size or len(x) != self._size:
            return []
        passed: set[Node] = set()
        parameters = ends(child, passed)
        if parameters is None or any(p.dtype != weight.dtype for p in parameters):
            raise _UnknownError
        names = [self._names[id(p)] for p in parameters]
        raw = hasattr(child, "variable")
        named = dict(zip(["weight"] if raw else names, parameters, strict=True))
        piece = ConvolvedWeight.of(node, None if raw else GradientEdge(child, output), named)
        dtype = working_dtype(weight.dtype)
        site = ServedLayer(piece.module, piece, named, tuple(parameters), dtype, piece=True)
        use = Use((*sorted(names), CONVOLUTION), _Meeting((), node, 0, (x,), piece), site)
        if self._known is not None and use.key not in self._known:
            return []
        self._followed |= passed
        return [use]

    def _paths(self, node: Node, output: int, passed: set[Node]) -> Iterator[_Path]:
        if hasattr(node, "variable"):
            yield _Path(node.variable)
            return
        passed.add(node)
        for place, (child, below) in enumerate(node.next_functions):
            if child is None:
                continue
            inverse = step(node, place, shape_of(child, below)) if output == 0 else None
            if inverse is None:
                raise _UnknownError
            for path in self._paths(child, below, passed):
                yield _Path(path.parameter, (node.name(), *path.names), (inverse, *path.steps))


def _meetings(node: Node, place: int, shape: Shape, size: int) -> Iterator[_Meeting]:
    """Yield how the operation may put an operand of this shape to the batch."""
    name = node.name()
    whole = shape_of(node)
    rows = bool(whole) and whole[0] == size
    if WEIGHT.get(name) == place and rows:
        x = (node._saved_self if name == "MmBackward0" else node._saved_mat1).detach()
        if getattr(node, "_saved_alpha", 1) == 1:
            yield _Meeting((name, str(place)), node, None, (x.reshape(size, rows, -1),), Product())
    elif name == "AddmmBackward0" and place == 0 and rows and shape == whole[1:] and node._saved_beta == 1:
        yield _Meeting((name, str(place)), node, None, (), Broadcast(shape, shape))
        return
    elif rows and (name, place) in {(CONVOLUTION, 2), (GROUP_NORM, 1), (GROUP_NORM, 2)}:
        scale = (group_normalised(node),) if place == 1 else ()
        yield _Meeting((name, str(place)), node, 0, scale, Broadcast(shape, (*shape, *[1] * (len(whole) - 2))))
        return
    if name == "EmbeddingBackward0" and not node._saved_scale_grad_by_freq:
        index, padding = node._saved_indices.detach(), node._saved_padding_idx
        if index.dim() and len(index) == size:
            piece = LookedUp(shape[0], padding if 0 <= padding < shape[0] else None)
            yield _Meeting((name, str(place)), node, 0, (index,), piece)
        return
    padded = (1,) * (len(whole) - len(shape)) + shape
    dims = [dim for dim in range(min(2, len(padded), len(whole))) if whole[dim] == size and padded[dim] == 1]
    factor = factor_of(node, place, data=True) if dims else None
    for dim in dims if factor is not None else ():
        met = Broadcast(shape, padded[:dim] + padded[dim + 1 :], factor if isinstance(factor, float) else 1.0)
        tensors = (factor.detach().expand(whole).movedim(dim, 0),) if isinstance(factor, Tensor) else ()
        yield _Meeting((name, str(place), str(dim)), node, dim, tensors, met)
