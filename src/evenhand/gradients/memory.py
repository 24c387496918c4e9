"""Buffers that layers keep from batch to batch, and how large a part of a batch may be.

Fresh pages cost more than filling them, so a layer's buffers serve every batch of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.gradients.batch_utils import LossFn, batch_size, buffers_restored, call, losses, take
from evenhand.gradients.pass_context import preserved
from evenhand.gradients.row_norms import lies_last

KEPT_BYTES = 1 << 28
"""Instantiated gradients larger than this are not kept for the weighted sum; it is then computed again."""

LEAN_BYTES = 6 << 20
"""The limit in lean mode."""


class ScratchBuffers:
    """Named buffers for one call of a layer. ``lean`` asks for forms that need little memory, at some cost in time.

    ``expected`` is how many records a batch is expected to have, or at most has where it runs in parts.

    What a buffer held is overwritten by the next batch, so only the newest pass of an engine may be used.

    >>> room = ScratchBuffers(lean=False)
    >>> first = room.empty("patches", (2, 3), torch.zeros(1))
    >>> first.shape, room.empty("patches", (1, 3), torch.zeros(1)).data_ptr() == first.data_ptr()
    (torch.Size([2, 3]), True)
    """

    def __init__(self, lean: bool, expected: int | None = None):
        self.lean, self.expected = lean, expected
        self._held: dict[str, Tensor] = {}

    def aside(self) -> ScratchBuffers:
        """Return buffers for temporaries: these, or in lean mode new ones that are freed with their user.

        >>> keeping, lean = ScratchBuffers(lean=False), ScratchBuffers(lean=True)
        >>> keeping.aside() is keeping, lean.aside() is lean
        (True, False)
        """
        return ScratchBuffers(True, self.expected) if self.lean else self

    def empty(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape with any contents, on the device and in the precision of ``like``."""
        count, dtype = math.prod(shape), dtype or like.dtype
        buffer = self._held.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != dtype or buffer.device != like.device:
            # Poisson batches vary in size: a little more now saves growing later.
            buffer = self._held[name] = like.new_empty(count + count // 8, dtype=dtype)
        return buffer[:count].view(tuple(shape))

    def like(self, name: str, x: Tensor) -> Tensor:
        """Return a buffer of the shape of ``x``, with the channels last if they are there.

        >>> ScratchBuffers(lean=False).like("scaled", torch.ones(2, 4, 4, 3).movedim(-1, 1)).stride()
        (48, 1, 12, 3)
        """
        if not lies_last(x):
            return self.empty(name, x.shape, x)
        return self.empty(name, x.movedim(1, -1).shape, x).movedim(-1, 1)

    def keeps(self, rows: int, each: int, like: Tensor) -> bool:
        """Return whether ``each`` elements of so many rows may be kept until the weighted sum.

        That is decided by the ``expected`` number of rows where it is known: by the drawn one, a single record more
        could change how all others are summed.
        """
        elements = (self.expected or rows) * each
        return elements * like.element_size() <= (LEAN_BYTES if self.lean else KEPT_BYTES)


class Corner(ScratchBuffers):
    """A part of a room whose buffers have names of their own, for one of several shares of a call.

    >>> room = ScratchBuffers(lean=False)
    >>> like, shape = torch.zeros(1), (2,)
    >>> Corner(room, "a").empty("x", shape, like).data_ptr() == Corner(room, "b").empty("x", shape, like).data_ptr()
    False
    """

    def __init__(self, room: ScratchBuffers, name: str):
        super().__init__(room.lean, room.expected)
        self._room, self._name = room, name

    def empty(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer of the whole room."""
        return self._room.empty(f"{self._name} {name}", shape, like, dtype)


ROWS = 4
PARTS = 3
PART_BYTES = 1 << 24
"""Parts that hold less than this cost more time than the memory they save is worth."""


def saved_bytes(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> int:
    """Return bytes per record that autograd keeps for a plain backward, found with a forward of a few records.

    Parameters and buffers are not counted. It depends on shapes, not on what the records say. 0 if it cannot be told.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> saved_bytes(model, lambda out, y: out[:, 0], torch.ones(8, 2), torch.ones(8)) // 4  # 2 inputs, 3 outputs
    5
    """
    rows = slice(0, ROWS)
    inputs, targets = take(inputs, rows), take(targets, rows)
    size = batch_size(inputs, targets)
    addresses = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in addresses:
            nbytes = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            seen[tensor.data_ptr()] = max(nbytes, seen.get(tensor.data_ptr(), 0))
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
    """Return the rows of a part of a batch whose records keep ``each`` bytes: few equal parts, none small.

    >>> part_of(256, 1 << 20), part_of(100, 1 << 19), part_of(256, 100)
    (86, 34, 256)
    """
    return -(-size // max(1, min(PARTS, size * each // PART_BYTES)))


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on any device.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text
