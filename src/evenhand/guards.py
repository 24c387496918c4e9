"""What could make a model leak: a mode that changes, buffers written from data, updates from elsewhere.

These are cheap looks at every step; the thorough look is the probe of ``gradients``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.errors import BatchReuseError, DataError, EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients import Engine, probe
from evenhand.types import Pass

Marks = tuple[tuple[int, int], ...]


class Watch:
    """A model and its engine, looked at before, during and after every pass."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], labels: int) -> None:
        self._model, self._loss, self._labels = model, loss, labels
        self._engine = Engine(model, loss)
        self._rows: tuple[Any, Any] | None = None
        self._mode: tuple[bool, ...] = ()
        self._weights: Marks | None = None
        self._spoilt = ""

    def probe(self, rows: tuple[Any, Any]) -> None:
        """Look thoroughly at the model in its present mode, also with the last declared label."""
        self._rows = rows
        inputs, targets = rows
        probe(self._model, self._loss, inputs, targets)
        if self._labels and not targets.is_floating_point():
            probe(self._model, self._loss, inputs, torch.full_like(targets, self._labels - 1))
        self._mode = mode(self._model)

    def run(self, inputs: Any, targets: Any) -> Pass:
        """One pass; a model whose mode changed since the last probe is probed again first."""
        if self._rows is None:
            raise BatchReuseError("Iterate over private.batches(data) first.")
        if mode(self._model) != self._mode:
            self.probe(self._rows)
        before = buffer_marks(self._model)
        try:
            result = self._engine.run(inputs, targets)
        except (torch.OutOfMemoryError, EvenhandError):
            raise
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise without_values(error) from None
        self._spoilt = self._spoilt or written_buffer(self._model, before)
        self.refuse_spoilt()
        return result

    def refuse_spoilt(self) -> None:
        """Nothing may leave the run once a buffer holds data."""
        if self._spoilt:
            raise UnsupportedModelError(
                f"The forward pass wrote the buffer {self._spoilt!r} from data, which would be released without noise. "
                "Nothing was released: remove it, or freeze it (for normalisation use GroupNorm or LayerNorm)."
            )

    def updated(self) -> None:
        """Remember the weights as the private step left them."""
        self._weights = weight_marks(self._model)

    def changed_elsewhere(self) -> bool:
        """Whether somebody else wrote the weights since."""
        return self._weights is not None and weight_marks(self._model) != self._weights


def mode(model: nn.Module) -> tuple[bool, ...]:
    """Which modules train and which parameters do: when this changes, the model must be probed again."""
    return (
        *(module.training for module in model.modules()),
        *(parameter.requires_grad for parameter in model.parameters()),
    )


def buffer_marks(model: nn.Module) -> Marks:
    """Identity and version of every buffer: a write in place or a replacement changes them."""
    return tuple((id(buffer), buffer._version) for buffer in model.buffers())


def weight_marks(model: nn.Module) -> Marks:
    """Identity and version of every parameter."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())


def written_buffer(model: nn.Module, before: Marks) -> str:
    """Name of a buffer that was written since ``before``, or nothing."""
    pairs = zip(model.named_buffers(), before, buffer_marks(model), strict=False)
    return next((name for (name, _), old, new in pairs if old != new), "")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold exactly the trainable parameters and take one private gradient a step."""
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not own:
        raise UsageError("The model has no trainable parameter: unfreeze one with requires_grad_(True).")
    if held != own:
        raise UsageError(
            "The optimizer does not hold exactly the model's trainable parameters: build it from "
            "[p for p in model.parameters() if p.requires_grad]."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates the loss several times a step, which is not accounted: use SGD or Adam.")


def without_values(error: Exception) -> DataError:
    """An error of the model or the loss, without its message: that may contain labels or other data."""
    return DataError(
        f"The model or the loss failed on a batch ({type(error).__name__}); the message is withheld since it may "
        "contain data values. Check that every label has an output and every row the same shape; made-up rows show it."
    )
