"""Keyed random streams: AES-256 in counter mode, addressed by (domain, step, offset), so nothing depends on call order.

Sampling and noise both draw from here. The key comes from operating-system entropy and never leaves the process; the
ledger holds its hash, so a key that is used twice shows.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Domain = Literal["sampling", "gradient", "queries"]
_DOMAINS: dict[Domain, int] = {"sampling": 1, "gradient": 2, "queries": 3}


@dataclass(frozen=True)
class Stream:
    """Random numbers of one segment of one run.

    Formal guarantees:
      Distinct (domain, step, offset) never share a cipher block; the same address gives the same numbers. Uniforms
      have 53 bits, so rates down to 1e-15 are met; normals reach 8.5 standard deviations.

    Examples:
      >>> stream = Stream.insecure(seed=0, segment=0)
      >>> bool((stream.uniforms("sampling", step=3, count=4) < 1).all())
      True
    """

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Stream:
        """A stream nobody can predict: 256 bits from the operating system."""
        return cls(os.urandom(32))

    @classmethod
    def insecure(cls, seed: int, segment: int) -> Stream:
        """A reproducible stream for research; statements name it, since who knows the seed can remove the noise."""
        return cls(hashlib.sha256(f"evenhand insecure seed {seed} segment {segment}".encode()).digest())

    @property
    def fingerprint(self) -> str:
        """Hash of the key, safe to publish: equal fingerprints would mean repeated noise."""
        return hashlib.sha256(b"evenhand key fingerprint" + self.key).hexdigest()

    def uniforms(self, domain: Domain, step: int, count: int) -> NDArray[np.float64]:
        """``count`` numbers in [0, 1), multiples of 2^-53."""
        blocks = -(-count // 2)
        words = self._words(domain, step, 0, blocks)[:count] >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53

    def normals(self, domain: Domain, step: int, count: int, offset: int = 0) -> NDArray[np.float64]:
        """``count`` standard normals from position ``offset`` of this step (Box-Muller in float64)."""
        first, last = offset // 2, -(-(offset + count) // 2)
        words = (self._words(domain, step, first, last - first) >> np.uint64(11)).reshape(-1, 2)
        radius = np.sqrt(-2.0 * np.log((words[:, 0] + np.uint64(1)) * 2.0**-53))
        angle = words[:, 1] * (2.0 * np.pi * 2.0**-53)
        pairs = np.empty((words.shape[0], 2))
        np.multiply(radius, np.cos(angle), out=pairs[:, 0])
        np.multiply(radius, np.sin(angle), out=pairs[:, 1])
        start = offset - 2 * first
        return pairs.reshape(-1)[start : start + count]

    def _words(self, domain: Domain, step: int, block: int, blocks: int) -> NDArray[np.uint64]:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        address = bytes([_DOMAINS[domain]]) + step.to_bytes(7, "big") + block.to_bytes(8, "big")
        stream = Cipher(algorithms.AES(self.key), modes.CTR(address)).encryptor().update(bytes(16 * blocks))
        return np.frombuffer(stream, dtype="<u8")
