"""Standard normals from random bits: Box-Muller in float64, in memory that is kept."""

from __future__ import annotations

import functools
import os  # noqa: F401 - for the examples
import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1024
"""Normals that are made together: first all that come from a cosine, then those from the sine."""
AT_ONCE = 16
"""Blocks that are made together: what they need fits the cache, and torch keeps to one thread."""


def box_muller(words: Tensor, out: Tensor, at_once: int) -> None:
    """Normals from random bits, both of shape (blocks, 2, n): words (r, a) -> radius * (cos, sin). Overwrites words."""
    start = 0
    while start < words.size(0):
        stop = min(start + at_once, words.size(0))
        signed = words[start:stop].bitwise_right_shift_(11)  # 53 bits in [-2^52, 2^52)
        radius = signed[:, 0].double().add_(4503599627370497.0).mul_(1.1102230246251565e-16)  # exact, in (0, 1]
        radius.log_().mul_(-2.0).sqrt_()
        angle = signed[:, 1].double().mul_(6.283185307179586 * 1.1102230246251565e-16)
        torch.mul(torch.cos(angle), radius, out=out[start:stop, 0])
        torch.mul(angle.sin_(), radius, out=out[start:stop, 1])
        start = stop


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor, int], None]:
    """The same as TorchScript: it runs without Python's lock, so that a thread can work ahead beside training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled: Callable[[Tensor, Tensor, int], None] = torch.jit.script(box_muller)
    return compiled


class Desk:
    """Memory in which normals are made; kept from step to step it saves asking for it, for one thread at a time.

    >>> desk = Desk()
    >>> zeros, bits = desk.bits(2)
    >>> bits[: len(zeros)] = os.urandom(len(zeros))
    >>> desk.normals(2).shape
    (2048,)
    """

    def __init__(self) -> None:
        self._held = 0

    def bits(self, blocks: int) -> tuple[memoryview, memoryview]:
        """Zeros to encrypt, and where the bits of so many blocks of normals go (with room to spare)."""
        size = 8 * BLOCK * blocks
        if self._held < blocks:
            raw = bytearray(size + 15)
            words = torch.frombuffer(raw, dtype=torch.int64, count=BLOCK * blocks)
            self._held, self._zeros, self._raw = blocks, memoryview(bytes(size)), memoryview(raw)
            self._words = words.view(blocks, 2, BLOCK // 2)
            self._out = torch.empty(blocks, 2, BLOCK // 2, dtype=torch.float64)
        return self._zeros[:size], self._raw

    def normals(self, blocks: int) -> NDArray[np.float64]:
        """The normals made of those bits; overwritten by the next."""
        out = self._out[:blocks]
        _compiled()(self._words[:blocks], out, AT_ONCE)
        numbers: NDArray[np.float64] = out.view(-1).numpy()
        return numbers
