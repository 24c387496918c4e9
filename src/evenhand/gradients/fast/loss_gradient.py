"""The slope of a loss at the model's outputs: by formula for the usual one, by autograd for every other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from evenhand.gradients.batch_utils import LossFn, losses
from evenhand.gradients.fast.dense_native import NARROW, fits, loops
from evenhand.gradients.layers.base import touched

_IGNORED = nn.CrossEntropyLoss().ignore_index
_VECTORS = 2
"""Dimensions of a batch of vectors."""


def slope(
    loss_fn: LossFn, outputs: Tensor, targets: Any, size: int, parameters: Iterable[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return one loss per record, and its gradient at ``outputs``, which belong to the caller and have no graph.

    None if the loss depends on a parameter as well, or on nothing, or writes into the outputs. What a loss raises is
    raised. The gradient belongs to the caller too.

    >>> loss, grad = slope(nn.CrossEntropyLoss(reduction="none"), torch.zeros(1, 2), torch.tensor([1]), 1, [])
    >>> loss.float(), grad
    (tensor([0.6931]), tensor([[ 0.5000, -0.5000]]))
    """
    if _usual(loss_fn) and outputs.dim() == _VECTORS and targets.dim() == 1 and targets.dtype == torch.long:
        offsets = _offsets(loss_fn)
        if not offsets:
            return _cross_entropy(outputs, targets)
        if len(offsets) == outputs.shape[1]:
            return _cross_entropy(outputs + _row(offsets, outputs.dtype, outputs.device), targets)
    version = outputs._version
    with torch.enable_grad():
        loss = losses(loss_fn, outputs.requires_grad_(), targets, size)
        if not loss.requires_grad:
            return None
        grad, *past = gradients_of_sum(loss, [outputs, *parameters])
    if grad is None or any(gradient is not None for gradient in past) or outputs._version != version:
        return None
    # A copy: autograd may give out one number for many places, or what belongs to somebody else.
    return loss.detach(), grad.clone(memory_format=torch.contiguous_format)


def _usual(loss_fn: Any) -> bool:
    """Return whether this is plain cross-entropy; a loss of ours says which one of torch's it is."""
    known = loss_fn.as_torch if "as_torch" in vars(type(loss_fn)) else loss_fn
    return (
        type(known) is nn.CrossEntropyLoss
        and known.reduction == "none"
        and known.weight is None
        and not known.label_smoothing
        and known.ignore_index == _IGNORED
        and not touched(known)
    )


def _offsets(loss_fn: Any) -> tuple[float, ...]:
    """Return the constants that a loss of ours adds to the outputs before cross-entropy; none for most."""
    return loss_fn.offsets if "offsets" in vars(type(loss_fn)) else ()


@lru_cache(16)
def _row(offsets: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the offsets as a tensor, which no caller writes into."""
    return torch.tensor(offsets, dtype=dtype, device=device)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``-log p`` of the label, and ``p`` less one at the label; raises for a label without an output.

    Few classes are handled side by side, over all records at once: torch is ten times quicker that way round.
    """
    turned, compiled = outputs.t(), loops()
    plain = fits(turned) and targets.is_contiguous() and targets.is_cpu and not targets.is_neg()
    if compiled is not None and plain and 0 < len(turned) <= NARROW:
        loss_and_gradient = compiled.slopes(turned, targets)
        if loss_and_gradient is None:
            raise RuntimeError("a label has no output")
        return loss_and_gradient
    across = 0 if turned.is_contiguous() else 1
    table, labels = (turned, targets.unsqueeze(0)) if across == 0 else (outputs, targets.unsqueeze(1))
    likely = torch.log_softmax(table, across)
    loss = likely.gather(across, labels).neg_().squeeze(across)
    grad = likely.exp_().scatter_add_(across, labels, torch.full_like(labels, -1, dtype=likely.dtype))
    return loss, grad.t().contiguous() if across == 0 else grad


def gradients_of_sum(loss: Tensor, asked: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``loss.sum()`` at tensors or edges of the graph; None where it does not depend on them.

    ``torch.autograd.grad`` does the same, but looks at its arguments for a good part of a small model's step.

    >>> x = torch.ones(2, requires_grad=True)
    >>> gradients_of_sum(x * 3, [x])
    (tensor([3., 3.]),)
    """
    answers: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tuple(asked), allow_unreachable=True, accumulate_grad=False
    )
    return answers
