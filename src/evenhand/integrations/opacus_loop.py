"""The loop of an Opacus user around a private run: which batch it has, what the model saw of it, what loss it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.errors import BatchReuseError, BudgetExhausted, UsageError
from evenhand.integrations.opacus_arguments import per_record
from evenhand.training.guards.model_guards import Compute
from evenhand.training.losses import Loss
from evenhand.training.private import Private
from evenhand.types import Batch

CHANGED = (
    "The model was given something else than the loader's rows, or they were changed. What the loop does to a batch "
    "could make records influence each other: put it into the dataset (per record) or into the model. Nothing of this "
    "batch was released; its step is charged."
)


class Loop:
    """State that model, optimizer and loader share: the run, the batch that the loop has, and the outputs for it."""

    def __init__(self, model: nn.Module, start: Callable[..., Private], plan: Plan, data: Data, criterion: Any) -> None:
        self.model, self.plan = model, plan
        self.private: Private | None = None
        self._start, self._data, self._criterion = start, data, criterion
        self._micro_batch: int | None = None
        self._batches: Iterator[Batch] = iter(())
        self._batch: Batch | None = None
        self._marks: list[tuple[int, int]] = []
        self._outputs: list[Tensor] = []
        self._loss = per_record(criterion)

    def limit(self, records: int) -> None:
        """Let gradients be computed for so many records at a time; before the first batch only."""
        if self.private is not None and records != self._micro_batch:
            raise UsageError("The size of physical batches is fixed with the first batch: keep it for all epochs.")
        self._micro_batch = records

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield the next ``count`` batches of the plan."""
        if self.private is None:
            self.private = self._start(compute=Compute(micro_batch=self._micro_batch))
            device = next(self.model.parameters()).device
            self._batches = self.private.batches(self._data.on(device))
        if not self.private.remaining:
            raise BudgetExhausted(
                f"All {self.plan.steps} steps of the plan are done; another would spend more than was promised. Give "
                "epochs= as many as the loop makes."
            )
        for batch in islice(self._batches, count):
            self._batch, self._outputs = batch, []
            self._marks = _marks(batch)
            yield batch

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the model's outputs for the loop; those of a drawn batch end there and wait for the step."""
        batch = self._batch
        if batch is None or not self.model.training or not torch.is_grad_enabled():
            return self.model(*arguments, **named)
        self._compare_inputs(batch, arguments, named)
        with torch.no_grad():
            outputs = self.model(*arguments, **named) if len(batch) else self._empty(arguments, named)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != (len(batch),):
            raise UsageError(
                "The model must return one tensor with a row per record here. For other outputs write the loop with "
                "eh.attach, whose loss sees them as they are."
            )
        self._outputs.append(outputs.detach().requires_grad_())
        return self._outputs[-1]

    def step(self) -> None:
        """Take the private step of the batch that the loop has; release the model after the last one."""
        if self._batch is None or self.private is None:
            raise BatchReuseError(
                "There is no batch to step: every batch of the loader is stepped exactly once. Nothing was released."
            )
        batch = self._batch
        if _marks(batch) != self._marks:
            raise UsageError(CHANGED)
        if len(batch):
            self._compare_loss(batch)
        self._batch, self._outputs = None, []
        self.private.step(batch)
        if not self.private.remaining:
            self.release()

    def release(self) -> None:
        """Write model and statement, and close the run."""
        if self.private is None:
            raise UsageError("No step was taken: there is nothing to release.")
        with self.private:
            self.private.checkpoint()
            self.private.release()

    def _compare_inputs(self, batch: Batch, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raise unless the model gets the rows as the loader gave them: a change could mix the records."""
        expected = batch.inputs
        given = named if isinstance(expected, Mapping) else arguments
        parts = expected if isinstance(expected, Mapping | tuple) else (expected,)
        pairs = (
            [(given.get(key), value) for key, value in parts.items()]
            if isinstance(parts, Mapping) and isinstance(given, Mapping)
            else list(zip(given, parts, strict=False))
        )
        extra = len(arguments) + len(named) != len(parts)
        if extra or _marks(batch) != self._marks or not all(_equal(one, other) for one, other in pairs):
            raise UsageError(CHANGED)

    def _compare_loss(self, batch: Batch) -> None:
        """Raise unless the loop's loss is the mean of the criterion: its gradient at the outputs must be that one."""
        seen = [outputs for outputs in self._outputs if outputs.grad is not None]
        if len(seen) != 1 or any(parameter.grad is not None for parameter in self.model.parameters()):
            raise BatchReuseError(
                "Before optimizer.step() the loop must call loss.backward() once, on a loss of the model's outputs for "
                "this batch alone (no second loss, no penalty on weights: use weight_decay). Nothing was released."
            )
        outputs, gradient = seen[0].detach(), seen[0].grad
        assert gradient is not None
        if _close(gradient, _gradient(self._loss, outputs, batch.targets)):
            return
        log_probabilities = self._criterion is None and outputs.ndim == 2 and _normalised(outputs)
        if log_probabilities and _close(gradient, _gradient(nn.NLLLoss(reduction="none"), outputs, batch.targets)):
            return  # cross-entropy of log-probabilities is their NLLLoss, with one gradient for the weights
        raise UsageError(
            "The loss in the loop is not the mean over the batch of the criterion that make_private was given (default "
            "nn.CrossEntropyLoss): pass criterion=, one with a value per record, and call its mean. Class weights with "
            "reduction='mean' divide by a number that depends on the other records. Nothing was released."
        )

    def _empty(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the outputs for no record: as for one made-up record, without its row."""
        one = [_zeros(value) for value in arguments]
        return self.model(*one, **{key: _zeros(value) for key, value in named.items()})[:0]


def _gradient(loss: Loss, outputs: Tensor, targets: Any) -> Tensor:
    """Return the gradient of the mean loss at the outputs."""
    leaf = outputs.clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss(leaf, targets).mean(), leaf)
    return gradient


def _close(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)


def _normalised(outputs: Tensor) -> bool:
    return bool((outputs.logsumexp(1).abs() < 1e-3).all())


def _equal(one: Any, other: Any) -> bool:
    same = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return same and one.dtype == other.dtype and (one is other or torch.equal(one, other))


def _marks(batch: Batch) -> list[tuple[int, int]]:
    """Return address and version of every tensor of a batch: they tell a change in place."""
    inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
    return [(part.data_ptr(), part._version) for part in (*inputs, batch.targets)]


def _zeros(value: Any) -> Any:
    return value.new_zeros((1, *value.shape[1:])) if isinstance(value, Tensor) else value
