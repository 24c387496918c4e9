"""Keyed random streams: AES-256 in counter mode, addressed by (domain, step, offset), so nothing depends on call order.

Sampling and noise both draw from here. The key is secret: it comes from the operating system and never leaves the
process. The ledger holds its hash, so a key that is used twice is noticed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.mechanism import noise_native
from evenhand.mechanism.noise_native import BLOCK

Domain = Literal["sampling", "gradient", "queries", "layers", "fetching", "blocks", "checks", "prior"]
Cipher: TypeAlias = Callable[[memoryview, memoryview], object]
"""Gets zeros and where their ciphertext goes."""
_DOMAINS: dict[Domain, int] = {
    "sampling": 1,
    "gradient": 2,
    "queries": 3,
    "layers": 4,
    "fetching": 5,
    "blocks": 6,
    "checks": 7,
    "prior": 8,
}
SECRET = 5040
"""Bytes of a secret seed: what `generators.seed` takes, 315 cipher blocks."""
_SPACING = 512
"""Cipher blocks from one record's seed to the next one's."""


@dataclass(frozen=True)
class Stream:
    """The random numbers of one segment of one run. Key and numbers are secret.

    Formal guarantees:
      Distinct (domain, step) never share a cipher block, and distinct offsets give independent numbers; the same
      address gives the same numbers, however they are asked for. Words have 64 bits, uniforms 53; normals reach 8.5
      standard deviations.

    Examples:
      >>> stream = Stream.insecure(seed=0, segment=0)
      >>> bool((stream.uniforms("sampling", step=3, count=4) < 1).all())
      True
    """

    key: bytes = field(repr=False)
    public: bool = False
    """Whether the key comes from a seed that others may know: then nothing drawn from here protects anybody."""

    @classmethod
    def fresh(cls) -> Stream:
        """Return a stream with a new secret key: 256 bits from the operating system."""
        return cls(os.urandom(32))

    @classmethod
    def insecure(cls, seed: int, segment: int) -> Stream:
        """Return a reproducible stream for research. Whoever knows the seed can remove the noise: statements say so."""
        return cls(hashlib.sha256(f"evenhand insecure seed {seed} segment {segment}".encode()).digest(), public=True)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the key, safe to publish: equal fingerprints mean repeated noise."""
        return hashlib.sha256(b"evenhand key fingerprint" + self.key).hexdigest()

    def uniforms(self, domain: Domain, step: int, count: int) -> NDArray[np.float64]:
        """Return ``count`` uniform numbers in [0, 1), multiples of 2^-53."""
        return (self.words(domain, step, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def record_keys(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return one secret random number of 56 bits for each of these records, the same for the whole segment.

        Examples:
          >>> keys = Stream.insecure(0, 0).record_keys(np.arange(3))
          >>> len(set(keys.tolist())), int(keys.max()) < 2**56
          (3, True)
          >>> bool(Stream.insecure(0, 0).record_keys(np.array([2]))[0] == keys[2])
          True
        """
        words = self._encrypted("blocks", 0, (records >> 1).astype(">u8"))
        keys: NDArray[np.uint64] = words[2 * np.arange(len(records)) + (records & 1)] >> np.uint64(8)
        return keys

    def words(self, domain: Domain, step: int, count: int, first: int = 0) -> NDArray[np.uint64]:
        """Return ``count`` random numbers of 64 bits, two from each cipher block, from block ``first`` on.

        Examples:
          >>> stream = Stream.insecure(0, 0)
          >>> bool((stream.words("sampling", 3, 2, first=1) == stream.words("sampling", 3, 4)[2:]).all())
          True
        """
        return self._encrypted(domain, step, _blocks_from(first, -(-count // 2)))[:count]

    def _encrypted(self, domain: Domain, step: int, blocks: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the two words of each of these cipher blocks, whose numbers are big-endian."""
        counters = np.empty((len(blocks), 2), ">u8")
        counters[:, 0], counters[:, 1] = self.counter(domain, step), blocks
        return np.frombuffer(self._blocks.update(counters.tobytes()), dtype="<u8")

    def seed(self, step: int, part: int = 0) -> bytes:
        """Return the secret seed of the draws within a step (dropout, augmentation), for `generators.seed`.

        A batch that several processes run has a seed of its own for each ``part``.

        Examples:
          >>> stream = Stream.insecure(0, 0)
          >>> stream.seed(1) == stream.seed(1), len({stream.seed(1), stream.seed(2), stream.seed(1, part=1)})
          (True, 3)
        """
        secret: bytes = self._encryptor("layers", step, part * _SPACING).update(bytes(SECRET))
        return secret

    def record_seeds(self, step: int, records: Sequence[int]) -> Iterator[bytes]:
        """Yield for each record the secret seed of the draws while it is fetched; it depends on (step, record) alone.

        Examples:
          >>> stream = Stream.insecure(0, 0)
          >>> list(stream.record_seeds(3, [5, 7]))[1] == next(stream.record_seeds(3, [7]))
          True
        """
        upper, blocks = self.counter("fetching", step), np.arange(SECRET // 16, dtype=np.uint64)
        for first in range(0, len(records), 64):
            begin = np.array(records[first : first + 64], dtype=np.uint64)[:, None] * np.uint64(_SPACING)
            counters = np.empty((len(begin), len(blocks), 2), ">u8")
            counters[:, :, 0], counters[:, :, 1] = upper, begin + blocks
            bits = memoryview(self._blocks.update(counters.tobytes()))
            yield from (bytes(bits[at : at + SECRET]) for at in range(0, len(bits), SECRET))

    def person_words(self, step: int, persons: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return for each person the secret word that chooses their record; it depends on (step, person) alone.

        It lies in the last cipher block before the next seed, which no seed of a record uses.

        Examples:
          >>> stream = Stream.insecure(0, 0)
          >>> bool(stream.person_words(3, np.array([5, 7]))[1] == stream.person_words(3, np.array([7]))[0])
          True
        """
        words = self._encrypted("fetching", step, (persons * _SPACING + _SPACING - 1).astype(">u8"))
        return words[::2]

    def choice_words(self, step: int, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return for each record the secret word by which it is chosen among those of its person.

        It lies in the last but one cipher block before the next seed, and depends on (step, record) alone.

        Examples:
          >>> stream = Stream.insecure(0, 0)
          >>> one = stream.choice_words(3, np.array([7]))[0]
          >>> bool(stream.choice_words(3, np.array([5, 7]))[1] == one != stream.person_words(3, np.array([7]))[0])
          True
        """
        words = self._encrypted("fetching", step, (records * _SPACING + _SPACING - 2).astype(">u8"))
        return words[::2]

    def normals(
        self, domain: Domain, step: int, count: int, offset: int = 0, desk: Desk | None = None
    ) -> NDArray[np.float64]:
        """Return ``count`` standard normals from position ``offset`` of this step (Box-Muller in float64).

        A block of 1024 holds first all normals from a cosine, then those from the sine. With a ``desk`` the array may
        lie in its memory, which its next use overwrites.
        """
        first, last = offset // BLOCK, -(-(offset + count) // BLOCK)
        loops = noise_native.loops()
        if loops is not None and loops.encrypts:
            out = loops.keyed(self.key, self.counter(domain, step), first, last - first)
        else:
            out = self._on_desk(domain, step, first, last - first, desk)
        begin = offset - first * BLOCK
        return out[begin : begin + count]

    def _on_desk(self, domain: Domain, step: int, first: int, blocks: int, desk: Desk | None) -> NDArray[np.float64]:
        """Return the normals of some blocks, without compiled encryption; they lie in the memory of ``desk``."""
        desk = desk or Desk()
        desk.fill(blocks, self.cipher(domain, step, first))
        return desk.normals(blocks)

    def cipher(self, domain: Domain, step: int, first: int = 0) -> Cipher:
        """Return a function that writes the step's random bits from block ``first`` on, call after call."""
        encrypt: Cipher = self._encryptor(domain, step, first * (BLOCK // 2)).update_into
        return encrypt

    def counter(self, domain: Domain, step: int) -> int:
        """Return the upper half of the counter blocks of a step.

        Examples:
          >>> hex(Stream.insecure(0, 0).counter("gradient", 5))
          '0x200000000000005'
        """
        return int.from_bytes(_address(domain, step, 0)[:8], "big")

    def normals_of(self, domain: Domain, step: int, steps: int, count: int, desk: Desk) -> NDArray[np.float64]:
        """Return the first ``count`` normals of several steps, one row per step, equal to those of ``normals``.

        They lie in the memory of ``desk``, which its next use overwrites.

        Examples:
          >>> from evenhand.mechanism.random_streams import Desk
          >>> stream = Stream.insecure(0, 0)
          >>> both = stream.normals_of("gradient", 5, 2, 3, Desk())
          >>> bool((both[1] == stream.normals("gradient", 6, 3)).all())
          True
        """
        blocks = -(-count // BLOCK)
        encryptors = [self._encryptor(domain, step + i, 0) for i in range(steps)]
        left = [8 * BLOCK * blocks] * steps

        def encrypt(zeros: memoryview, bits: memoryview) -> None:
            while len(zeros):
                index = steps - len(left)
                part = min(left[0], len(zeros))
                encryptors[index].update_into(zeros[:part], bits)
                zeros, bits = zeros[part:], bits[part:]
                left[0] -= part
                if not left[0]:
                    left.pop(0)

        desk.fill(steps * blocks, encrypt)
        return desk.normals(steps * blocks).reshape(steps, -1)[:, :count]

    @functools.cached_property
    def _blocks(self) -> Any:
        """Return the cipher of single blocks, which has no state: encrypted counters are the key stream of CTR."""
        aes, modes, cipher = _cipher()
        return cipher(aes(self.key), modes.ECB()).encryptor()

    def _encryptor(self, domain: Domain, step: int, block: int) -> Any:
        aes, modes, cipher = _cipher()
        return cipher(aes(self.key), modes.CTR(_address(domain, step, block))).encryptor()


@functools.lru_cache(maxsize=8)
def _blocks_from(first: int, count: int) -> NDArray[Any]:
    """Return the numbers of ``count`` cipher blocks from ``first`` on, big-endian as AES counts them."""
    return np.arange(first, first + count, dtype=np.uint64).astype(">u8")


def _address(domain: Domain, step: int, block: int) -> bytes:
    return bytes([_DOMAINS[domain]]) + step.to_bytes(7, "big") + block.to_bytes(8, "big")


@functools.cache
def _cipher() -> tuple[Any, Any, Any]:
    """Return AES, the modes and the cipher class of ``cryptography``, imported when first needed."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return algorithms.AES, modes, Cipher


AT_ONCE = 32
"""Blocks that are made together: what they need fits the cache, and torch keeps to one thread."""
_ZEROS = memoryview(bytes(1 << 18))


def box_muller(words: Tensor, out: Tensor, at_once: int) -> None:
    """Write normals made of random words into ``out``; both have shape (blocks, 2, n): (r, a) -> radius * (cos, sin).

    ``out`` may be the memory of the words: those of a part are read before its normals are written.
    """
    start = 0
    while start < words.size(0):
        stop = min(start + at_once, words.size(0))
        both = words[start:stop].bitwise_right_shift(11).double()  # 53 bits, from -2^52 to 2^52 - 1
        radius, angle, normals = both[:, 0], both[:, 1], out[start:stop]
        radius.add_(4503599627370497.0).mul_(1.1102230246251565e-16)  # + 2^52 + 1: from 2^-53 to 1
        radius.log_().mul_(-2.0).sqrt_()
        angle.mul_(6.283185307179586 * 1.1102230246251565e-16)
        torch.cos(angle, out=normals[:, 0]).mul_(radius)
        torch.sin(angle, out=normals[:, 1]).mul_(radius)
        start = stop


@functools.cache
def _scripted() -> Callable[[Tensor, Tensor, int], None]:
    """Return ``box_muller`` as TorchScript: it runs without Python's lock, so a thread can compute beside training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Callable[[Tensor, Tensor, int], None] = torch.jit.script(box_muller)
    return scripted


class Desk:
    """Memory for random bits, which are then replaced by the normals made of them. For one thread at a time.

    Used again in every step, it saves allocating. The desk owns the memory: arrays from it hold until its next use.

    >>> desk = Desk()
    >>> desk.fill(2, lambda zeros, bits: bits[: len(zeros)].__setitem__(slice(None), os.urandom(len(zeros))))
    >>> desk.normals(2).shape
    (2048,)
    """

    def __init__(self) -> None:
        self._capacity = 0

    def fill(self, blocks: int, encrypt: Callable[[memoryview, memoryview], object]) -> None:
        """Write the random bits of so many blocks: ``encrypt`` gets zeros and the memory for their ciphertext.

        It is called several times, for one part after the other. The memory has room for one more cipher block.
        """
        size = 8 * BLOCK * blocks
        if self._capacity < blocks:
            raw = bytearray(size + 15)
            words = torch.frombuffer(raw, dtype=torch.int64, count=BLOCK * blocks)
            self._capacity, self._raw = blocks, memoryview(raw)
            self._words = words.view(blocks, 2, BLOCK // 2)
            self._out = self._words.view(torch.float64)
        for start in range(0, size, len(_ZEROS)):
            encrypt(_ZEROS[: size - start], self._raw[start:])

    @property
    def address(self) -> int:
        """Return the address of the random bits."""
        return self._words.data_ptr()

    def normals(self, blocks: int) -> NDArray[np.float64]:
        """Return the normals made of the random bits, in their memory; the next ``fill`` overwrites them."""
        out, loops = self._out[:blocks], noise_native.loops()
        if loops is None:
            _scripted()(self._words[:blocks], out, AT_ONCE)
        else:
            loops.normals(self.address, self.address, blocks)
        numbers: NDArray[np.float64] = out.view(-1).numpy()
        return numbers
