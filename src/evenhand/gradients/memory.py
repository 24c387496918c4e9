"""Buffers that layers keep from batch to batch, freed memory that a run keeps, and how large a part of a batch may be.

Fresh pages cost more than filling them, so a layer's buffers serve every batch of an engine, and what a step frees
serves the next one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
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


_TRIM, _LARGE, _APART = -1, -3, -4
"""M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX of <malloc.h>: when the heap shrinks, which blocks are large, and
how many large blocks may be asked of the system apart from the heap."""
_USUAL = {_TRIM: 64 << 20, _LARGE: 32 << 20, _APART: 1 << 16}
"""What glibc comes to by itself in a process with large blocks."""
_KEEP = {_TRIM: (1 << 31) - 1, _APART: 0}
_CHOSEN = tuple(f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD"))
_CHOSEN += ("GLIBC_TUNABLES",)
_lock = threading.RLock()
_keepers = 0


@functools.cache
def _library() -> Any:
    """Return glibc, or None if this is none of ours to change."""
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _CHOSEN):
        return None
    library = ctypes.CDLL(None)
    wanted = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return library if all(hasattr(library, name) for name in wanted) else None


class KeepFreedMemory:
    """Keeps freed memory in the process until `give_back`, or until ``owner`` is gone.

    A step frees everything at its end. glibc then shrinks its heap, and gives back blocks above 32 MB in any case, so
    that the next step pays for every page again: a tenth of the time of a CNN or a ResNet. The last keeper gives the
    memory back. Elsewhere than in glibc nothing is done, nor where the environment says how memory is handled.

    >>> class Training: pass
    >>> training = Training()
    >>> keeper = KeepFreedMemory(training); keeper.give_back(); keeper.give_back()
    """

    def __init__(self, owner: object):
        _count(1)
        self._finish = weakref.finalize(owner, _count, -1)

    def give_back(self) -> None:
        """Let the memory go, if there is no other keeper. Safe to call twice."""
        self._finish()


def _forked() -> None:
    """Renew the lock: another thread may have had it when this process was forked."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _count(change: int) -> None:
    """Add or remove a keeper; the first one sets the heap to keep memory, the last one sets it back and trims it."""
    global _keepers
    library = _library()
    with _lock:
        before, _keepers = _keepers, _keepers + change
        if library is None:
            return
        if not before:
            _set(library, _KEEP)
        elif not _keepers:
            _set(library, _USUAL)
            library.malloc_trim(0)


def _set(library: Any, values: Mapping[int, int]) -> None:
    for name, value in values.items():
        library.mallopt(name, value)
