"""Load the compiled noise loops (``noise.c``) and compare them with numpy and OpenSSL before they are used."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from evenhand._native import NativeLibrary, team

BLOCK = 1024
"""Normals that are made together: first all that come from a cosine, then those from the sine."""
_SHARED = 1 << 15
"""From so many numbers on several threads make them."""
_KEY = 32
"""Bytes of a key of AES-256."""
_COUNTS = (1, 0, BLOCK - 2, 2 * BLOCK + 700, 3, 1)
"""Sizes of the parts that the loops are compared on."""
_PRECISE = 1e-13
"""How far a normal may lie from numpy's: far below the grid, which is about a billionth of a standard deviation."""


class Loops:
    """The functions of the compiled library. They run without Python's lock.

    Addresses belong to the caller and must stay valid during the call. Keys are secret and are not kept.
    """

    def __init__(self, library: ctypes.CDLL):
        whole, address, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
        self._normals, self._release = library.evenhand_normals, library.evenhand_release
        self._normals.argtypes, self._normals.restype = (address, address, whole), None
        self._release.argtypes = (address, whole, whole, address, address, address, number, number, number)
        self._encrypted = library.evenhand_encrypted
        self._encrypted.argtypes = (
            *(ctypes.c_char_p, ctypes.c_uint64, whole, address, address, address, number, number, number),
            *(address, ctypes.c_uint),
        )
        self._keyed = library.evenhand_keyed
        self._keyed.argtypes, self._keyed.restype = (ctypes.c_char_p, ctypes.c_uint64, whole, whole, address), None
        self._release.restype = self._encrypted.restype = library.evenhand_encrypts.restype = whole
        self.encrypts = bool(library.evenhand_encrypts())
        """Whether the processor can make the bits by itself, so that ``encrypted`` and ``keyed`` may be asked."""

    def normals(self, words: int, out: int, blocks: int) -> None:
        """Write normals to address ``out``, made of the random bits at ``words``, which may be the same address."""
        self._normals(words, out, blocks)

    def keyed(self, key: bytes, counter: int, first: int, blocks: int) -> NDArray[np.float64]:
        """Return the normals of some blocks of the AES-256 key stream (see ``encrypted``), in a new array."""
        _check(key)
        out = np.empty(BLOCK * blocks)
        self._keyed(key, counter, first, blocks, out.ctypes.data)
        return out

    def release(
        self, words: int, first: int, last: int, parts: Parts, std: float, spacing: float, divisor: float
    ) -> int:
        """Write the noisy numbers ``first`` to ``last - 1`` of a sum; return how many were not finite."""
        not_finite: int = self._release(
            words, first, last, parts.totals, parts.outs, parts.ends, 1 / spacing, std / spacing, spacing / divisor
        )
        return not_finite

    def encrypted(
        self, key: bytes, counter: int, parts: Parts, std: float, spacing: float, divisor: float, threads: int = 1
    ) -> int:
        """Write all noisy numbers of a sum; return how many were not finite. Unless that is 0, release nothing.

        The random bits are the key stream of AES-256 in counter mode. ``counter`` is the upper half of the first
        counter block; the lower half is zero. The result does not depend on the number of ``threads`` (torch's).
        """
        _check(key)
        crew = team() if threads > 1 and parts.count >= _SHARED else None
        scales = 1 / spacing, std / spacing, spacing / divisor
        not_finite: int = self._encrypted(
            key, counter, parts.count, parts.totals, parts.outs, parts.ends, *scales, crew, threads
        )
        return not_finite


def _check(key: bytes) -> None:
    if len(key) != _KEY:
        raise ValueError("AES-256 takes a key of 32 bytes")


class Parts:
    """Addresses of a sum in several pieces (float32, contiguous), and of as many pieces of equal size for the result.

    The caller owns the memory and must keep it alive.

    >>> Parts([1, 2], [3, 4], [10, 5]).count
    15
    """

    def __init__(self, totals: Sequence[int], outs: Sequence[int], counts: Sequence[int]):
        if not len(totals) == len(outs) == len(counts):
            raise ValueError("every part needs a place to go")
        self._columns = array("Q", totals), array("Q", outs), array("q", accumulate(counts))
        self.totals, self.outs, self.ends = [column.buffer_info()[0] for column in self._columns]
        self.count = self._columns[2][-1]


def reference(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the normals of whole blocks of random words, computed in numpy: the loops are compared with them.

    >>> reference(np.full(BLOCK, 2**63, np.uint64))[[0, 512]].round(3).tolist()
    [-8.572, -0.0]
    """
    upper = ((words.reshape(-1, 2, BLOCK // 2) ^ np.uint64(1 << 63)) >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((upper[:, 0] + 1.0) * 2.0**-53))
    angle = 2.0 * np.pi * (upper[:, 1] * 2.0**-53 - 0.5)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def check_loops(candidate: Loops) -> bool:
    """Return whether the loops agree with numpy and OpenSSL, on extreme and ordinary words."""
    ends = np.array([0, 1, 2**11, 2**62, 2**63 - 1, 2**63, 2**63 + 2**11, 2**64 - 1], np.uint64)
    words = np.random.default_rng(0).integers(0, 2**64, sum(_COUNTS) // BLOCK * BLOCK + BLOCK, np.uint64)
    words[: BLOCK // 2] = np.resize(ends, BLOCK // 2)
    words[BLOCK // 2 : BLOCK] = np.resize(np.repeat(ends, len(ends)), BLOCK // 2)
    normals, expected = np.empty(len(words)), reference(words)
    candidate.normals(words.ctypes.data, normals.ctypes.data, len(words) // BLOCK)
    if not bool((np.abs(normals - expected) <= _PRECISE * (1 + np.abs(expected))).all()):
        return False
    total = np.linspace(-3, 3, sum(_COUNTS), dtype=np.float32)
    return (
        _released_right(candidate, words, total, expected, 0.7, 2.0**-10)
        and _released_right(candidate, words, total, expected, 0.0, 2.0**-3)
        and _released_right(
            candidate, words, np.where(np.arange(len(total)) % 1500, total, np.nan), expected, 0.7, 2.0**-10
        )
        and _released_right(candidate, words, np.where(total == total[-5], np.inf, total), expected, 0.7, 2.0**-10)
        and (
            not candidate.encrypts
            or all(_encrypted_right(candidate, total, step) for step in (0, 2**57 + 2**33 + 7, 0xFEDCBA9876543210))
        )
    )


def _released_right(
    candidate: Loops,
    words: NDArray[np.uint64],
    total: NDArray[np.float32],
    normals: NDArray[np.float64],
    std: float,
    spacing: float,
) -> bool:
    """Return whether finite numbers agree bit by bit and the others are counted: in two calls, and in place."""
    outs, cuts = [np.zeros(count, np.float32) for count in _COUNTS], list(accumulate(_COUNTS))[:-1]
    sums = [np.ascontiguousarray(part) for part in np.split(total.astype(np.float32), cuts)]
    parts = Parts([part.ctypes.data for part in sums], [part.ctypes.data for part in outs], _COUNTS)
    odd = candidate.release(words.ctypes.data, 0, 2 * BLOCK, parts, std, spacing, 2.0)
    odd += candidate.release(words[2 * BLOCK :].ctypes.data, 2 * BLOCK, parts.count, parts, std, spacing, 2.0)
    finite = np.isfinite(total)
    on_grid = np.rint(np.where(finite, total, 0.0).astype(np.float64) / spacing)
    noisy = np.rint(on_grid + normals[: len(total)] * (std / spacing)) * (spacing / 2.0)
    over = Parts([part.ctypes.data for part in sums], [part.ctypes.data for part in sums], _COUNTS)
    again = candidate.release(words.ctypes.data, 0, over.count, over, std, spacing, 2.0)
    return odd == again == int((~finite).sum()) and all(
        bool((np.concatenate(pieces) == noisy.astype(np.float32))[finite].all()) for pieces in (outs, sums)
    )


def _encrypted_right(candidate: Loops, total: NDArray[np.float32], step: int) -> bool:
    """Return whether the result is, bit by bit, that of the key stream which OpenSSL computes.

    Tried in pieces, one of them empty, in one thread and in two, with numbers that are not finite, and far into the
    stream.
    """
    key = hashlib.sha256(step.to_bytes(8, "big")).digest()
    total = np.resize(total, _SHARED + BLOCK + 7)
    total[[5, -9]] = np.nan, np.inf
    words = _openssl(key, step, 0, len(total) // BLOCK + 1)
    ends = (0, 3, BLOCK + 1, BLOCK + 1, len(total))
    outs = np.zeros((3, len(total)), np.float32)
    parts = [Parts(*zip(*_places(total, out, ends), strict=True)) for out in outs]
    odd = [candidate.release(words.ctypes.data, 0, len(total), parts[0], 0.7, 2.0**-10, 2.0)]
    odd += [
        candidate.encrypted(key, step, pieces, 0.7, 2.0**-10, 2.0, n) for n, pieces in enumerate(parts[1:], start=1)
    ]
    return (
        odd == [2, 2, 2]
        and np.array_equal(outs[0], outs[1], equal_nan=True)
        and np.array_equal(outs[0], outs[2], equal_nan=True)
        and all(_keyed_right(candidate, key, step, first) for first in (0, 2**7, 2**23, 2**39))
    )


def _places(total: NDArray[np.float32], out: NDArray[np.float32], ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (address in, address out, length) of the pieces between these ends."""
    size = total.itemsize
    return [(total.ctypes.data + size * a, out.ctypes.data + size * a, b - a) for a, b in pairwise(ends)]


def _keyed_right(candidate: Loops, key: bytes, step: int, first: int) -> bool:
    """Return whether the normals around a block far into the stream are those of OpenSSL's bits."""
    words, normals = _openssl(key, step, first - bool(first), 2), np.empty(2 * BLOCK)
    candidate.normals(words.ctypes.data, normals.ctypes.data, 2)
    return np.array_equal(candidate.keyed(key, step, first - bool(first), 2), normals)


def _openssl(key: bytes, step: int, first: int, blocks: int) -> NDArray[np.uint64]:
    """Return the random words of some blocks of a step, computed by OpenSSL."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    start = step.to_bytes(8, "big") + (first * BLOCK // 2).to_bytes(8, "big")
    stream = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor().update(bytes(8 * BLOCK * blocks))
    return np.frombuffer(stream, np.uint64)


loops = functools.cache(NativeLibrary("_noise.so", Loops, check_loops).load)
"""Return the compiled loops, or None if they are not there or do not compute what they should."""
