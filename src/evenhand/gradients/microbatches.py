"""A batch that does not fit the memory goes through the engine in parts; what comes out is one pass all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.engine import Engine
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

    >>> engine = MicroBatches(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, limit=2)
    >>> result = engine.run(torch.ones(5, 2), torch.arange(5.0))
    >>> result.weighted_sum(torch.ones(5))["bias"]
    tensor([10.])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, *, lean: bool = False, limit: int | None = None):
        self.engine = Engine(model, loss_fn, lean=lean)
        self._model, self.limit = model, limit

    def run(self, inputs: Any, targets: Any, early: Early | None = None) -> Pass:
        """As `Engine.run`; running out of memory halves the parts and starts this batch again."""
        size = batch_size(inputs, targets)
        state = RandomState(self._model)
        while True:
            try:
                if self.limit is None or size <= self.limit:
                    return self.engine.run(inputs, targets)
                return _Parts(self.engine, self._model, inputs, targets, size, self.limit, early).result()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                largest = min(size, self.limit or size)
                if largest <= 1:
                    raise UsageError(
                        "one record alone does not fit the memory: use a smaller model, smaller inputs, or lean=True"
                    ) from None
                self.limit = largest // 2
            self.engine.forget()
            state.restore()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text


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
                self._add(self._sum, part.weighted_sum(weights[-1]))
        self._loss, self._norm = torch.cat(losses), torch.cat(norms)
        self._weights = torch.cat(weights) if weights else None
        self._versions = [p._version for p in model.parameters()]

    def result(self) -> Pass:
        return Pass(self._loss, self._norm, self.weighted_sum)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum that was made along the way, or that of a second run over all parts."""
        if self._weights is not None and torch.equal(weights, self._weights.to(weights.dtype)):
            return self._sum
        if [p._version for p in self._model.parameters()] != self._versions:
            raise UsageError("parameters were changed after the pass; ask for the weighted sum before the update")
        total: dict[str, Tensor] = {}
        now = RandomState(self._model)
        try:
            for rows, state in self._parts:
                state.restore()
                part = self._engine.run(take(self._inputs, rows), take(self._targets, rows))
                self._add(total, part.weighted_sum(weights[rows]))
        finally:
            now.restore()
        return total

    @staticmethod
    def _add(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
