"""Memory that a layer keeps from batch to batch: fresh pages cost more than filling them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from evenhand.gradients.measuring import lies_last

KEPT_BYTES = 1 << 28
"""Instantiated gradients larger than this are not kept for the weighted sum; it is then computed again."""

LEAN_BYTES = 6 << 20
"""The same where memory counts."""


class Room:
    """Named buffers for one call of a layer. ``lean`` asks for forms that need little memory, at some cost in time.

    ``expected`` is how many records a batch is expected to have, or at most has where it runs in parts.

    What a buffer held is overwritten by the next batch, so only the newest pass of an engine may be used.

    >>> room = Room(lean=False)
    >>> first = room.empty("patches", (2, 3), torch.zeros(1))
    >>> first.shape, room.empty("patches", (1, 3), torch.zeros(1)).data_ptr() == first.data_ptr()
    (torch.Size([2, 3]), True)
    """

    def __init__(self, lean: bool, expected: int | None = None):
        self.lean, self.expected = lean, expected
        self._held: dict[str, Tensor] = {}

    def aside(self) -> Room:
        """Where to put what is not needed for long: here, or where memory counts in a room that goes with its user.

        >>> keeping, lean = Room(lean=False), Room(lean=True)
        >>> keeping.aside() is keeping, lean.aside() is lean
        (True, False)
        """
        return Room(True, self.expected) if self.lean else self

    def empty(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of this shape with any contents, on the device and (unless given) in the precision of ``like``."""
        count, dtype = math.prod(shape), dtype or like.dtype
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != dtype or held.device != like.device:
            # Poisson batches vary in size: a little more now saves growing later.
            held = self._held[name] = like.new_empty(count + count // 8, dtype=dtype)
        return held[:count].view(tuple(shape))

    def like(self, name: str, x: Tensor) -> Tensor:
        """The same of the shape of ``x``, with the channels last if they are there.

        >>> Room(lean=False).like("scaled", torch.ones(2, 4, 4, 3).movedim(-1, 1)).stride()
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
