"""Records in changing company: the same rows of a batch, run again with all other rows replaced, and alone.

The probe of a few records (``independence_probe.py``) is precise but small: hard-example mining, capacities and
quantiles show only in batches of the real size. Here a whole batch is run twice with plain autograd, from the same
state and the same seeds of all generators, with only some rows kept in place. Loss and gradient of the kept rows must
not change. For records that do not touch each other both runs do the same arithmetic on those rows, so that hardly even
rounding differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from evenhand import generators
from evenhand.errors import EvenhandError
from evenhand.gradients.batch_utils import LossFn, WithLoss, batch_size, call, call_with, cast, losses, take
from evenhand.gradients.doctor.python_state import Picture, PlainState, Snapshot, changes
from evenhand.gradients.memory import out_of_memory
from evenhand.gradients.model_layout import modules_of
from evenhand.gradients.pass_context import exclusive, means
from evenhand.gradients.record_by_record import folded
from evenhand.model_io import concatenated, picked

NOTICED = 1e-4
"""Relative difference in the model's own precision that asks for a second look."""
SURE = 1e-6
"""Relative difference in float64 that no rounding explains."""
PLAIN = 1e-3
"""Relative difference that no rounding explains in the model's own precision, if three companies all differ by it."""
HELD = 1 << 22
"""Gradient elements that are held for a comparison; a longer gradient is folded."""


@dataclass(frozen=True)
class Rows:
    """A batch and a second one that has other records in all rows but the kept ones, whose places are ``indices``."""

    first: tuple[Any, Any]
    second: tuple[Any, Any]
    indices: Tensor

    @classmethod
    def of(cls, batch: tuple[Any, Any], others: tuple[Any, Any], indices: Tensor) -> Rows:
        """Put the rows of ``others``, one after the other, into the places of a batch that are not among ``indices``.

        >>> batch, others = (torch.zeros(3, 1), torch.zeros(3)), (torch.ones(2, 1), torch.ones(2))
        >>> Rows.of(batch, others, torch.tensor([1])).second[1]
        tensor([1., 0., 1.])
        """
        places = torch.ones(batch_size(*batch), dtype=torch.bool).index_fill_(0, indices, False).nonzero().squeeze(1)
        flat, spec = tree_flatten(batch)

        def put(leaf: Any, other: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_nested:
                order = torch.arange(len(places) + len(indices)).index_copy(
                    0, places, len(leaf) + torch.arange(len(places))
                )
                return picked(concatenated([leaf, other]), order)
            return leaf.index_copy(0, places.to(leaf.device), other) if isinstance(leaf, Tensor) else leaf

        return cls(batch, tree_unflatten([*map(put, flat, tree_leaves(others))], spec), indices)


@dataclass(frozen=True)
class Kept:
    """Losses of the kept rows, and the gradient of their sum with random signs, piece by piece."""

    loss: Tensor
    gradient: list[Tensor]
    drew: bool = False

    def differs(self, other: Kept, tolerance: float) -> bool:
        """Return whether losses or gradients are further apart than a relative tolerance, or finite at different rows.

        >>> Kept(torch.ones(2), []).differs(Kept(torch.tensor([1.0, 1.1]), []), 0.01)
        True
        """
        finite = torch.isfinite(self.loss)
        if not torch.equal(finite, torch.isfinite(other.loss)):
            return True
        one, two = self.loss[finite], other.loss[finite]
        if len(one) and bool(((one - two).abs() > tolerance * (one.abs() + one.abs().mean() + 1e-6)).any()):
            return True
        if len(self.gradient) != len(other.gradient):
            return True
        pairs = list(zip(self.gradient, other.gradient, strict=True))
        length = math.hypot(*(float(piece.norm()) for piece in self.gradient))
        apart = math.hypot(*(float((piece - other).norm()) for piece, other in pairs))
        return math.isfinite(apart) and apart > tolerance * (length + 1e-6)


@dataclass(frozen=True)
class Finding:
    """The result of a look: records that touch each other, or the path of state that a pass sets from records.

    ``losses`` are those of the kept rows, unless random numbers were drawn for them.
    """

    coupled: bool = False
    written: str | None = None
    losses: Tensor | None = None


class Company:
    """Runs rows in several companies, and leaves model, loss, their state and all generators as they were.

    ``views`` makes the random views of a batch of inputs; it is part of what must keep records apart. ``moving`` are
    the paths of state that every pass changes in the same way, whatever the records.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, views: Callable[[Any], Any] | None = None) -> None:
        self._model, self._loss_fn, self._views = model, loss_fn, views
        self._state = PlainState({"model": model, "loss": loss_fn, "augment": views})
        self._exact = True
        self.moving: frozenset[str] = frozenset()
        self._mirrors: frozenset[str] = frozenset()

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        """Return a context in which all generators start from ``seed``."""
        return generators.drawing(seed)

    def picture(self) -> Picture:
        """Return the state as it is now."""
        return self._state.picture()

    def settled(self, path: str) -> bool:
        """Return whether a pass may change what lies here: it moves the same way always, or mirrors the last pass."""
        return path in self.moving or path in self._mirrors

    def look(self, rows: Rows, seed: int, again: Callable[[], Rows], *, precise: bool, learns: bool = True) -> Finding:
        """Return whether loss or gradient of the kept rows depend on the other rows, or state on any of them.

        All three generators start from ``seed``. What differs must differ in float64 too, or in every pair of three
        companies that ``again`` makes. ``precise`` looks in float64 first, with random layers replaced by their means,
        also at each kept row alone. If it ``learns``, state that changes alike in both companies is taken for one that
        every pass moves; a single look cannot tell that from state that is set by a row which is in both.
        """
        with self._alone() as before:
            start = self._state.picture()
            if precise and self._exact and self._in_float64(rows, seed, before, alone=True):
                return Finding(coupled=True)
            first = self._run(rows.first, rows.indices, seed, before)
            one = self._state.picture()
            second = self._run(rows.second, rows.indices, seed, before)
            two = self._state.picture()
            if first.differs(second, NOTICED) and self._confirmed(rows, seed, before, again):
                return Finding(coupled=True)
            paths = changes(one, two)
            if learns:
                self.moving |= frozenset(changes(start, one)) - frozenset(paths)
            if paths and not self._mirrored(rows, seed, before, second, two):
                return Finding(written=paths[0])
            self._mirrors |= frozenset(paths)
            return Finding(losses=None if first.drew else first.loss)

    def _confirmed(self, rows: Rows, seed: int, before: Snapshot, again: Callable[[], Rows]) -> bool:
        """Return whether a difference is more than a unit that rounding switches on or off."""
        if self._exact and self._in_float64(rows, seed, before, alone=False):
            return True
        trial = again()
        copies = trial.indices[: max(1, len(trial.indices) // 2)].repeat(
            batch_size(*trial.first)
        )  # of half of the kept rows
        others = copies[: batch_size(*trial.first) - len(trial.indices)]
        batches = trial.first, trial.second, Rows.of(trial.first, take(trial.first, others), trial.indices).second
        one, two, three = (self._run(batch, trial.indices, seed, before) for batch in batches)
        return one.differs(two, PLAIN) and two.differs(three, PLAIN) and one.differs(three, PLAIN)

    def _mirrored(self, rows: Rows, seed: int, before: Snapshot, second: Kept, two: Picture) -> bool:
        """Return whether state only mirrors the last pass, such as a map of attention that is kept to be looked at.

        Whatever it was before, the next pass then leaves the same state, losses and gradients.
        """
        self._run(rows.first, rows.indices, seed, before)
        after = self._run(rows.second, rows.indices, seed, None)
        return not changes(self._state.picture(), two) and not after.differs(second, 0.0)

    def snapshot(self) -> Snapshot | None:
        """Return buffers that passes move, to be put back before a second pass of the same step; None if none does."""
        buffers = [(table, table[key]) for table, key in self._moving_buffers()]
        if not buffers:
            return None
        tables = {id(table): (table, list(table.items())) for table, _ in buffers}
        return Snapshot([*tables.values(), *((tensor, tensor.detach().clone()) for _, tensor in buffers)])

    def advance(self, inputs: Any, targets: Any) -> None:
        """Move the buffers that passes move, by one pass over these records, and nothing else."""
        with self._alone() as before, torch.no_grad(), generators.drawing(0):
            inputs = inputs if self._views is None else self._views(inputs)
            losses(self._loss_fn, call(self._model, inputs), targets, batch_size(inputs, targets))
            places = self._moving_buffers()
            moved = [table[key].clone() for table, key in places]
            before.restore()
        for (table, key), tensor in zip(places, moved, strict=True):
            with torch.no_grad():
                table[key].copy_(tensor)

    def _moving_buffers(self) -> list[tuple[dict[str, Any], str]]:
        every = [
            (f"model.{prefix}.{key}" if prefix else f"model.{key}", module._buffers, key)
            for prefix, module in modules_of(self._model)
            for key in module._buffers
        ]
        return [(table, key) for path, table, key in every if path in self.moving and table[key] is not None]

    @contextmanager
    def _alone(self) -> Iterator[Snapshot]:
        before = self._state.snapshot()
        with exclusive(frozenset(id(module) for _, module in modules_of(self._model))), torch.enable_grad():
            try:
                yield before
            finally:
                before.restore()

    def _run(self, batch: tuple[Any, Any], indices: Tensor, seed: int, before: Snapshot | None) -> Kept:
        """Run in the model's own precision, from the state ``before``; None goes on from the present one."""
        if before is not None:
            before.restore()
        leaves = [p for p in self._model.parameters() if p.requires_grad]
        with generators.drawing(seed):
            state = self._generators()
            inputs = batch[0] if self._views is None else self._views(batch[0])
            loss = losses(self._loss_fn, call(self._model, inputs), batch[1], batch_size(*batch))
            drew = self._generators() != state
        return replace(_kept(loss, indices, leaves, seed), drew=drew)

    def _generators(self) -> tuple[Any, ...]:
        """Return states of all generators that a pass may draw from."""
        numpy: Any = np.random.get_state()  # noqa: NPY002 - the global one is meant
        torch_state = torch.default_generator.get_state().numpy().tobytes()
        return torch_state, random.getstate(), numpy[2], self._state.generators()

    def _in_float64(self, rows: Rows, seed: int, before: Snapshot, *, alone: bool) -> bool | None:
        """Return whether the kept rows differ beyond rounding; None where the code insists on its own precision.

        ``alone`` replaces random draws by their means, and compares the kept rows one by one too.
        """
        both = WithLoss(self._model, self._loss_fn)
        tensors = {**dict(both.named_parameters()), **dict(both.named_buffers())}
        state = {name: _double(t, name, self._model) for name, t in tensors.items()}
        leaves = [t for t in state.values() if t.requires_grad]

        def run(batch: tuple[Any, Any], indices: Tensor, places: list[int] | None = None) -> Kept:
            before.restore()
            with generators.drawing(seed):
                inputs = batch[0] if self._views is None else self._views(batch[0])
                inputs, targets = cast((inputs, batch[1]), torch.float64)
                if places is None:
                    with means() if alone else nullcontext():
                        loss = call_with(both, state, inputs, targets)
                    return _kept(loss, indices, leaves, seed)
                values = []
                with means():
                    for i in places:
                        before.restore()
                        values.append(call_with(both, state, *take((inputs, targets), slice(i, i + 1))))
                return _kept(torch.cat(values), torch.arange(len(places)), leaves, seed)

        try:
            first, second = run(rows.first, rows.indices), run(rows.second, rows.indices)
            single = run(rows.first, rows.indices, rows.indices.tolist()) if alone else first
        except EvenhandError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            self._exact = False
            return None
        return first.differs(second, SURE) or first.differs(single, SURE)


def _double(tensor: Tensor, name: str, model: nn.Module) -> Tensor:
    """Return a copy in float64, which takes a gradient if it stands for a trained parameter of the model."""
    copy = tensor.detach().to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and name.startswith(WithLoss.PREFIX) else copy


def _kept(loss: Tensor, indices: Tensor, leaves: Sequence[Tensor], seed: int) -> Kept:
    """Return losses and signed gradient sum of some rows; rows that are not finite are in neither sum."""
    values = loss[indices.to(loss.device)]
    draw = np.random.default_rng(seed)
    signs = torch.from_numpy(draw.integers(0, 2, len(indices)) * 2.0 - 1.0).to(values.device, values.dtype)
    finite = torch.isfinite(values.detach())
    gradient: list[Tensor] = []
    if values.requires_grad and bool(finite.any()):
        gradients = torch.autograd.grad((values * signs)[finite].sum(), leaves, allow_unused=True)
        dense = [_dense(g, leaf) for g, leaf in zip(gradients, leaves, strict=True)]
        if sum(leaf.numel() for leaf in leaves) > HELD:
            gradient = [torch.from_numpy(folded(g, seed)[0]) for g in dense]
        else:
            gradient = [g.double() for g in dense]
    return Kept(values.detach().double(), gradient)


def _dense(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(leaf)
    return gradient.to_dense() if gradient.is_sparse else gradient
