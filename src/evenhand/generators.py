"""Reads, restores and sets the global generators of torch, numpy and Python's ``random``.

A seed of one number is not a secret: torch's generator on the CPU uses 32 bits of it, few enough to try them all. Here
whole states are set. Whoever does not know the bytes cannot tell the draws that follow from fresh ones.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = 624
_FIRST = 24
"""Bytes of torch's state before its words: the seed (8), how many words are left (4), a flag (4), the next (8)."""
_TORCH = slice(0, 4 * _WORDS)
_START = slice(_TORCH.stop, _TORCH.stop + 8)
_NUMPY = slice(_START.stop + 8, _START.stop + 8 + 4 * _WORDS)
_PYTHON = slice(_NUMPY.stop, _NUMPY.stop + 32)
SECRET = _PYTHON.stop
"""Bytes that set all generators: 5,040, a whole number of cipher blocks."""
_MASK = 0xFFFFFFFF


class Snapshot:
    """The state of every global generator.

    Examples:
      >>> before = Snapshot(); first = random.random(), torch.rand(1).item(), np.random.rand(); before.moved()
      True
      >>> before.restore(); first == (random.random(), torch.rand(1).item(), np.random.rand())
      True
    """

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002 - the global one is meant, here and below
        self._python = random.getstate()
        self._mark = mark()
        self._cuda = _cuda_states()

    def moved(self) -> bool:
        """Return whether anything was drawn since, from any of them."""
        drawn = mark() != self._mark or not torch.equal(torch.default_generator.get_state(), self._torch)
        return drawn or self._normal_used() or self._cuda_moved()

    def _normal_used(self) -> bool:
        """Return whether a normal number that numpy kept from an earlier pair was handed out."""
        now: Any = np.random.get_state() if self._numpy[3] else self._numpy  # noqa: NPY002
        return bool(now[3] != self._numpy[3])

    def _cuda_moved(self) -> bool:
        now = _cuda_states()
        return any(not torch.equal(a, b) for a, b in zip(now, self._cuda, strict=False))

    def restore(self) -> None:
        """Put every generator back, so that the caller's own draws go on as if nothing had been drawn since."""
        torch.default_generator.set_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def drawing(secret: bytes | int) -> Iterator[None]:
    """Start every global generator from ``secret`` inside the block, and restore all of them after it.

    Examples:
      >>> with drawing(3): first = random.random(), torch.rand(1).item()
      >>> with drawing(3): first == (random.random(), torch.rand(1).item())
      True
    """
    before = Snapshot()
    seed(secret)
    try:
        yield
    finally:
        before.restore()


def mark() -> tuple[Any, ...]:
    """Return a value that changes whenever numpy's or Python's generator draws; quicker than a `Snapshot` (two us).

    A normal number that numpy's old interface kept from an earlier pair is handed out without a change.

    Examples:
      >>> before = mark(); before == mark()
      True
      >>> _ = np.random.rand(); before == mark()
      False
      >>> before = mark(); _ = random.random(); before == mark()
      False
    """
    return _numpy_bytes(), _python_bytes()()


def seed(secret: bytes | int) -> None:
    """Set every global generator from ``SECRET`` secret bytes, or from a public number where nothing is secret.

    Examples:
      >>> before = Snapshot()
      >>> seed(bytes(range(240)) * 21); first = random.random(), torch.rand(1).item(), np.random.rand()
      >>> seed(bytes(range(240)) * 21); first == (random.random(), torch.rand(1).item(), np.random.rand())
      True
      >>> before.restore()
    """
    if isinstance(secret, int):
        torch.default_generator.manual_seed(secret)
        np.random.seed(secret & _MASK)  # noqa: NPY002
        random.seed(secret)
    else:
        seed_torch(secret)
        _seed_numpy(secret[_NUMPY])
        random.seed(int.from_bytes(secret[_PYTHON], "little"))
    if _cuda_states():
        torch.cuda.manual_seed_all(number(secret))


def seed_torch(secret: bytes | int) -> None:
    """Set torch's global generator on the CPU, its whole state where that comes in the form that we know.

    Examples:
      >>> before = Snapshot(); seed_torch(3); seed_torch(bytes(SECRET - 1) + b"1"); before.moved()
      True
      >>> before.restore()
    """
    template = _template()
    if isinstance(secret, int) or template is None:
        torch.default_generator.manual_seed(number(secret))
        return
    state, start, words = template
    start[0], words[:] = number(secret), np.frombuffer(secret[_TORCH], "<u4")
    torch.default_generator.set_state(state)


def number(secret: bytes | int) -> int:
    """Return 63 bits of the secret, where no more can be taken: the generators of CUDA devices.

    Examples:
      >>> number(7), number(bytes(SECRET))
      (7, 0)
    """
    return secret if isinstance(secret, int) else int.from_bytes(secret[_START], "little") >> 1


def _cuda_states() -> list[Tensor]:
    """Return the states of the devices' generators; none where no device is used."""
    used: Callable[[], bool] = torch.cuda.is_initialized
    return torch.cuda.get_rng_state_all() if used() else []


@functools.cache
def _template() -> tuple[Tensor, NDArray[np.uint64], NDArray[np.uint64]] | None:
    """Return torch's state with room for our own words (Mersenne twister); None if its layout has changed."""
    state = torch.Generator().manual_seed(5489).get_state()
    raw = state.numpy()
    if raw.size < _FIRST + 8 * _WORDS:
        return None
    numbers = raw[: _FIRST + 8 * _WORDS].view(np.uint64)
    words = [5489]
    for place in range(1, _WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + place) & _MASK)
    expected = [5489, 1 + (1 << 32), 0, *words]
    return (state, numbers[:1], numbers[3:]) if numbers.tolist() == expected else None


def _seed_numpy(words: bytes) -> None:
    """Set numpy's global generator: in its own memory, ten times as quick, if its layout is the known one."""
    place = _numpy_place()
    if place is None:
        np.random.seed(np.frombuffer(words, np.uint32))  # noqa: NPY002
        return
    np.random.seed(0)  # noqa: NPY002 - forgets a normal number that was kept
    ctypes.memmove(place, words + _WORDS.to_bytes(4, sys.byteorder), 4 * _WORDS + 4)


def _numpy_place() -> int | None:
    """Return the address of the words of numpy's global generator; None if its kind or layout is another one."""
    used: Any = np.random.mtrand._rand._bit_generator
    if used is not _place[0]:
        known = type(used) is np.random.MT19937 and _numpy_as_known()
        _place[:] = used, int(used.ctypes.state_address) if known else None
    address: int | None = _place[1]
    return address


_place: list[Any] = [None, None]
"""Numpy's global generator when it was last looked at, and where its words are."""


@functools.cache
def _numpy_as_known() -> bool:
    """Return whether numpy keeps a Mersenne twister as 624 words and a position."""
    one: Any = np.random.MT19937(5)
    words = np.frombuffer(ctypes.string_at(one.ctypes.state_address, 4 * _WORDS + 4), np.uint32)
    state = one.state["state"]
    return bool(np.array_equal(words, [*state["key"], state["pos"]]))


def _numpy_bytes() -> bytes:
    """Return the memory of numpy's global generator, or its state as text where the address is not known."""
    place = _numpy_place()
    if place is None:
        return repr(np.random.mtrand._rand._bit_generator.state).encode()
    return _memory_at(place).raw


@functools.cache
def _memory_at(place: int) -> ctypes.Array[ctypes.c_char]:
    """Return a view of a generator's 624 words and position; reading it is quicker than ``string_at``."""
    return (ctypes.c_char * (4 * _WORDS + 4)).from_address(place)


@functools.cache
def _python_bytes() -> Callable[[], Any]:
    """Return a function that reads the state of Python's generator: from memory if the layout is known, else slowly."""
    inside = id(random._inst) + object.__basicsize__
    if type(random._inst).__basicsize__ < object.__basicsize__ + 4 * _WORDS + 4:
        return random.getstate
    memory = np.frombuffer(ctypes.string_at(inside, 4 * _WORDS + 4), np.uint32).tolist()
    *words, place = random.getstate()[1]
    usual = memory == [place, *words]
    return (lambda: _memory_at(inside).raw) if usual else random.getstate
