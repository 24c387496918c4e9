"""A batch that does not fit the memory goes through the engine in parts; what comes out is one pass all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import LossFn, as_plain, batch_size, take
from evenhand.gradients.engine import Engine
from evenhand.gradients.memory import out_of_memory, part_of, saved_bytes
from evenhand.gradients.pass_context import RandomState, exclusive
from evenhand.gradients.record_blocks import Blocks
from evenhand.gradients.row_norms import working_dtype
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

    def run(self, inputs: Any, targets: Any, early: Early | None = None, blocks: Blocks | None = None) -> Pass:
        """Run as `Engine.run`; running out of memory halves the parts and starts this batch again."""
        inputs = as_plain(inputs)
        size = batch_size(inputs, targets)
        blocks = blocks or Blocks(size)
        state = RandomState(self._model)
        while True:
            most = self._most(inputs, targets, blocks) if early is not None else self.limit or size
            self.engine.expected = blocks.expected if size <= most else most
            try:
                if size <= most:
                    return run_filled(self.engine, inputs, targets, blocks, most if self.limit else None)
                return _Parts(self.engine, self._model, inputs, targets, blocks, most, early).result()
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

    def _most(self, inputs: Any, targets: Any, blocks: Blocks) -> int:
        """Return how many records go through the model at once if their weights are known at once.

        That follows the expected batch: by the drawn one, a record more could move the borders of all parts.
        """
        size = blocks.size
        if self.limit is not None or not self._lean or not size:
            return self.limit or size
        if self._each is None:
            layout = self.engine.layout()  # refuses what must not run, before anything of it does
            with exclusive(layout.identities):
                self._each = saved_bytes(self._model, self._loss_fn, inputs, targets)
        expected = size if blocks.summation is None else math.ceil(blocks.summation.expected_batch)
        return part_of(expected, self._each)


def run_filled(engine: Engine, inputs: Any, targets: Any, blocks: Blocks, most: int | None = None) -> Pass:
    """Run a batch with at least ``least_rows()`` rows: a smaller one is filled up with copies of its own.

    Matrix products of very few rows are computed in another order, so that one record more would change the last digits
    of all others, and at the kink of a ReLU their gradients. The copies enter no sum. Where memory allows only ``most``
    rows, and that is fewer, the batch stays as it is.

    >>> engine = Engine(nn.Linear(2, 1), lambda out, y: out[:, 0] * y)
    >>> run_filled(engine, torch.ones(3, 2), torch.ones(3), Blocks(3)).norm.shape
    torch.Size([3])
    """
    size, least = blocks.size, least_rows()
    if not 0 < size < least <= (most or least):
        return engine.run(inputs, targets, blocks)
    rows = torch.arange(least) % size
    result = engine.run(take(inputs, rows), take(targets, rows), blocks)

    def filled(add_up: Callable[[Tensor], dict[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
        if len(weights) != size:
            raise UsageError(f"expected one weight per record, shape ({size},), got {tuple(weights.shape)}")
        return add_up(torch.cat([weights, weights.new_zeros(least - size)]))

    return replace(
        result,
        loss=result.loss[:size],
        norm=result.norm[:size],
        weighted_sum=partial(filled, result.weighted_sum),
        spend=None if result.spend is None else partial(filled, result.spend),
    )


def least_rows() -> int:
    """Return how many rows a batch needs so that none depends on how many others there are.

    Measured by tests/edges/test_batch_size.py: 4 rows with one thread of MKL, 12 with two.
    """
    return max(16, 8 * torch.get_num_threads())


class _Parts:
    """The parts of one batch, run one after the other."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        blocks: Blocks,
        limit: int,
        early: Early | None,
    ):
        self._engine, self._model, self._inputs, self._targets = engine, model, inputs, targets
        self._blocks, self._limit = blocks, limit
        self._parts: list[tuple[slice, RandomState]] = []
        self._sum: dict[str, Tensor] = {}
        losses, norms, weights = [], [], []
        for rows in blocks.of(limit):
            self._parts.append((rows, RandomState(model)))
            part = self._run(rows)
            losses.append(part.loss)
            norms.append(part.norm)
            if early is not None:
                weights.append(early(part.norm, part.loss, rows))
                _add(self._sum, part.last_sum(weights[-1]))
            del part  # and what its layers saw, before the next comes
        self._loss, self._norm = torch.cat(losses), torch.cat(norms)
        self._weights = torch.cat(weights) if weights else None
        self._versions = [p._version for p in model.parameters()]

    def _run(self, rows: slice) -> Pass:
        inputs, targets = take(self._inputs, rows), take(self._targets, rows)
        return run_filled(self._engine, inputs, targets, self._blocks.take(rows), self._limit)

    def result(self) -> Pass:
        return Pass(self._loss, self._norm, self.weighted_sum, spend=self.weighted_sum)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the sum that was made along the way, or that of a second run over all parts."""
        if self._weights is not None and torch.equal(weights, self._weights.to(weights.dtype)):
            self._weights = None  # the sum is handed over, and may be written
            return self._rounded(self._sum)
        if [p._version for p in self._model.parameters()] != self._versions:
            raise UsageError("parameters were changed after the pass; ask for the weighted sum before the update")
        total: dict[str, Tensor] = {}
        now = RandomState(self._model)
        try:
            for rows, state in self._parts:
                state.restore()
                part = self._run(rows)
                _add(total, part.last_sum(weights[rows] * _shrunk(self._norm[rows], part.norm)))
                del part
        finally:
            now.restore()
        return self._rounded(total)

    def _rounded(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return totals in the precision of their parameters, or in float64 if there are too many records for that."""
        if not self._blocks.rounds:
            return total
        dtypes = {name: working_dtype(p.dtype) for name, p in self._model.named_parameters()}
        return {name: value.to(dtypes[name]) for name, value in total.items()}


def _shrunk(before: Tensor, now: Tensor) -> Tensor:
    """Return the factors of weights whose records' gradients are longer now than when the weights were chosen.

    The second run draws the same random numbers, but layers need not use them in the same order: kernels and the slow
    way lay out pictures differently, and the first run may have been the other one. The bound must hold all the same.

    >>> _shrunk(torch.tensor([2.0, 2.0, 0.0, torch.nan]), torch.tensor([1.0, 4.0, 1.0, 1.0]))
    tensor([1.0000, 0.5000, 0.0000, 1.0000])
    """
    return torch.where(now > before, before / now, 1.0)


def _add(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    """Add the sums of a part to the total, which is float64 and in memory of its own.

    >>> shared, total = torch.ones(2), {}
    >>> for _ in range(2): _add(total, {"a": shared, "b": shared})
    >>> total["a"].tolist(), total["b"].tolist(), shared.tolist()
    ([2.0, 2.0], [2.0, 2.0], [1.0, 1.0])
    """
    for name in list(part):
        value = part.pop(name)
        if name in total:
            total[name] += value
        else:
            total[name] = value.to(torch.float64, copy=True)
