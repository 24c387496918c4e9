"""Standard normals from random bits: Box-Muller in float64, in memory that is kept, compiled where that can be had."""

from __future__ import annotations

import functools
import os  # noqa: F401 - for the examples
import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand import noise_native
from evenhand.noise_native import BLOCK

AT_ONCE = 32
"""Blocks that are made together: what they need fits the cache, and torch keeps to one thread."""
_ZEROS = memoryview(bytes(1 << 18))


def box_muller(words: Tensor, out: Tensor, at_once: int) -> None:
    """Normals from random bits, both of shape (blocks, 2, n): words (r, a) -> radius * (cos, sin).

    Overwrites the words; ``out`` may be the same memory, since a part's words are read before its normals are written.
    """
    start = 0
    while start < words.size(0):
        stop = min(start + at_once, words.size(0))
        both = words[start:stop].bitwise_right_shift(11).double()  # 53 bits, from -2^52 to 2^52 - 1
        radius, angle, made = both[:, 0], both[:, 1], out[start:stop]
        radius.add_(4503599627370497.0).mul_(1.1102230246251565e-16)  # + 2^52 + 1: from 2^-53 to 1
        radius.log_().mul_(-2.0).sqrt_()
        angle.mul_(6.283185307179586 * 1.1102230246251565e-16)
        torch.cos(angle, out=made[:, 0]).mul_(radius)
        torch.sin(angle, out=made[:, 1]).mul_(radius)
        start = stop


@functools.cache
def _scripted() -> Callable[[Tensor, Tensor, int], None]:
    """The same as TorchScript: it runs without Python's lock, so that a thread can work ahead beside training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Callable[[Tensor, Tensor, int], None] = torch.jit.script(box_muller)
    return scripted


class Desk:
    """Memory in which normals are made; kept from step to step it saves asking for it, for one thread at a time.

    Bits and the normals made of them take turns in the same memory.

    >>> desk = Desk()
    >>> desk.fill(2, lambda zeros, bits: bits[: len(zeros)].__setitem__(slice(None), os.urandom(len(zeros))))
    >>> desk.normals(2).shape
    (2048,)
    """

    def __init__(self) -> None:
        self._held = 0

    def fill(self, blocks: int, encrypt: Callable[[memoryview, memoryview], object]) -> None:
        """Have the bits of so many blocks written: ``encrypt`` gets zeros and where their ciphertext goes.

        It is called several times, for one part after the other; where it writes there is room for a block more.
        """
        size = 8 * BLOCK * blocks
        if self._held < blocks:
            raw = bytearray(size + 15)
            words = torch.frombuffer(raw, dtype=torch.int64, count=BLOCK * blocks)
            self._held, self._raw = blocks, memoryview(raw)
            self._words = words.view(blocks, 2, BLOCK // 2)
            self._out = self._words.view(torch.float64)
        for start in range(0, size, len(_ZEROS)):
            encrypt(_ZEROS[: size - start], self._raw[start:])

    @property
    def address(self) -> int:
        """Where the bits lie until normals are made of them."""
        return self._words.data_ptr()

    def normals(self, blocks: int) -> NDArray[np.float64]:
        """The normals made of those bits; overwritten by the next."""
        out, loops = self._out[:blocks], noise_native.loops()
        if loops is None:
            _scripted()(self._words[:blocks], out, AT_ONCE)
        else:
            loops.normals(self.address, self.address, blocks)
        numbers: NDArray[np.float64] = out.view(-1).numpy()
        return numbers
