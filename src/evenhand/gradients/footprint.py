"""How much memory a record needs on its way through a model, and how large the parts of a batch may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenhand.gradients.randomness import preserved
from evenhand.gradients.records import LossFn, batch_size, buffers_restored, call, losses, take

ROWS = 4
PARTS = 3
PART_BYTES = 1 << 24
"""Parts that hold less than this cost more time than the memory they save is worth."""


def saved_bytes(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> int:
    """Bytes per record that autograd keeps for a plain backward, found with a forward of a few records.

    Parameters and buffers are not counted. It depends on shapes, not on what the records say. 0 if it cannot be told.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> saved_bytes(model, lambda out, y: out[:, 0], torch.ones(8, 2), torch.ones(8)) // 4  # 2 inputs, 3 outputs
    5
    """
    rows = slice(0, ROWS)
    inputs, targets = take(inputs, rows), take(targets, rows)
    size = batch_size(inputs, targets)
    held = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in held:
            own = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            seen[tensor.data_ptr()] = max(own, seen.get(tensor.data_ptr(), 0))
        return tensor.detach()  # with its graph it would be held by what it holds

    try:
        with (
            preserved(model),
            buffers_restored(model),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            losses(loss_fn, call(model, inputs), targets, size)
    except (RuntimeError, MemoryError):  # a transform of torch.func within the model, say, allows no hooks
        return 0
    return sum(seen.values()) // size


def part_of(size: int, each: int) -> int:
    """Rows of a part of a batch of ``size`` records that keep ``each`` bytes: a few equal parts, none of them small.

    >>> part_of(256, 1 << 20), part_of(100, 1 << 19), part_of(256, 100)
    (86, 34, 256)
    """
    return -(-size // max(1, min(PARTS, size * each // PART_BYTES)))


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text
