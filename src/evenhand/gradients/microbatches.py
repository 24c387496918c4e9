"""A batch that does not fit the memory goes through the engine in parts; what comes out is one pass all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.engine import Engine
from evenhand.gradients.footprint import out_of_memory, part_of, saved_bytes
from evenhand.gradients.locking import exclusive
from evenhand.gradients.measuring import chunks
from evenhand.gradients.randomness import RandomState
from evenhand.gradients.records import LossFn, batch_size, take
from evenhand.types import Pass

Early: TypeAlias = Callable[[Tensor, Tensor, slice], Tensor]
"""Weights of some rows from their norms and losses, where a rule looks at each row alone."""


class MicroBatches:
    """An engine that takes at most ``limit`` records at a time, and fewer once memory has run out.

    Weights are chosen when all norms and losses are known, so rules that need the whole batch work too. If ``early``
    can tell the weights of a part at once, and they are the ones asked for in the end, nothing is computed twice;
    otherwise every part is run again for its sum, with the same random numbers.

    A ``lean`` engine without a limit splits large batches by itself wherever ``early`` is given, so that layers hold
    what they saw of a third of the records at a time. Rules that need the whole batch get no such parts: their
    weights come after all norms, so every layer's input and output gradient is held until then, or computed twice,
    which is what a limit asks for.

    >>> engine = MicroBatches(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, limit=2)
    >>> result = engine.run(torch.ones(5, 2), torch.arange(5.0))
    >>> result.weighted_sum(torch.ones(5))["bias"]
    tensor([10.])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, *, lean: bool = False, limit: int | None = None):
        self.engine = Engine(model, loss_fn, lean=lean)
        self._model, self._loss_fn, self._lean, self.limit = model, loss_fn, lean, limit
        self._each: int | None = None

    def run(self, inputs: Any, targets: Any, early: Early | None = None) -> Pass:
        """As `Engine.run`; running out of memory halves the parts and starts this batch again."""
        size = batch_size(inputs, targets)
        state = RandomState(self._model)
        while True:
            most = self._most(inputs, targets, size) if early is not None else self.limit or size
            try:
                if size <= most:
                    return self.engine.run(inputs, targets)
                return _Parts(self.engine, self._model, inputs, targets, size, most, early).result()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                largest = min(size, most)
                if largest <= 1:
                    raise UsageError(
                        "one record alone does not fit the memory: use a smaller model, smaller inputs, or lean=True"
                    ) from None
                self.limit = largest // 2
            self.engine.forget()
            state.restore()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _most(self, inputs: Any, targets: Any, size: int) -> int:
        """How many records go through the model at once if their weights are known at once."""
        if self.limit is not None or not self._lean or not size:
            return self.limit or size
        if self._each is None:
            layout = self.engine.layout()  # refuses what must not run, before anything of it does
            with exclusive(layout.identities):
                self._each = saved_bytes(self._model, self._loss_fn, inputs, targets)
        return part_of(size, self._each)


class _Parts:
    """The parts of one batch, run one after the other."""

    def __init__(
        self, engine: Engine, model: nn.Module, inputs: Any, targets: Any, size: int, limit: int, early: Early | None
    ):
        self._engine, self._model, self._inputs, self._targets = engine, model, inputs, targets
        self._parts: list[tuple[slice, RandomState]] = []
        self._sum: dict[str, Tensor] = {}
        losses, norms, weights = [], [], []
        for rows in chunks(size, 1, limit):
            self._parts.append((rows, RandomState(model)))
            part = engine.run(take(inputs, rows), take(targets, rows))
            losses.append(part.loss)
            norms.append(part.norm)
            if early is not None:
                weights.append(early(part.norm, part.loss, rows))
                _add(self._sum, part.last_sum(weights[-1]))
            del part  # and what its layers saw, before the next comes
        self._loss, self._norm = torch.cat(losses), torch.cat(norms)
        self._weights = torch.cat(weights) if weights else None
        self._versions = [p._version for p in model.parameters()]

    def result(self) -> Pass:
        return Pass(self._loss, self._norm, self.weighted_sum, spend=self.weighted_sum)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum that was made along the way, or that of a second run over all parts."""
        if self._weights is not None and torch.equal(weights, self._weights.to(weights.dtype)):
            self._weights = None  # the sum is handed over, and may be written
            return self._sum
        if [p._version for p in self._model.parameters()] != self._versions:
            raise UsageError("parameters were changed after the pass; ask for the weighted sum before the update")
        total: dict[str, Tensor] = {}
        now = RandomState(self._model)
        try:
            for rows, state in self._parts:
                state.restore()
                part = self._engine.run(take(self._inputs, rows), take(self._targets, rows))
                _add(total, part.last_sum(weights[rows] * _shrunk(self._norm[rows], part.norm)))
                del part
        finally:
            now.restore()
        return total


def _shrunk(before: Tensor, now: Tensor) -> Tensor:
    """What each weight is multiplied by if a record's gradient is longer now than when its weight was chosen.

    The second run draws the same random numbers, but layers need not use them in the same order: kernels and the slow
    way lay out pictures differently, and the first run may have been the other one. The bound must hold all the same.

    >>> _shrunk(torch.tensor([2.0, 2.0, 0.0, torch.nan]), torch.tensor([1.0, 4.0, 1.0, 1.0]))
    tensor([1.0000, 0.5000, 0.0000, 1.0000])
    """
    return torch.where(now > before, before / now, 1.0)


def _add(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    """Adds in place; nobody else holds the sums, and none is in the memory of another, where it would count twice.

    >>> shared, total = torch.ones(2), {}
    >>> for _ in range(2): _add(total, {"a": shared, "b": shared})
    >>> total["a"].tolist(), total["b"].tolist(), shared.tolist()
    ([2.0, 2.0], [2.0, 2.0], [1.0, 1.0])
    """
    if total:
        for name in total:
            total[name] += part.pop(name)
        return
    places = Counter(own.untyped_storage().data_ptr() for own in part.values())
    for name, own in part.items():
        total[name] = own if places[own.untyped_storage().data_ptr()] == 1 else own.clone()
