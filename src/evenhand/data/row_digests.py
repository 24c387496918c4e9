"""One look at the records before anything is spent: which are not finite, and a digest of each row.

Digests tell later whether data that are called held-out hold training records (``overlap``). They are as secret as the
records: whoever has them and their key can test guesses. They stay in the run's ``private`` folder.
"""

from __future__ import annotations

import io
import os
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from evenhand import untrusted
from evenhand.data.dataset import Data
from evenhand.data.record_seeds import Quiet
from evenhand.errors import VerificationError

SECONDS, ROWS = 2.0, 2**20
"""Where reading is slow or rows are many, a look ends here and has seen a part, in blocks that are chosen at random."""
_BLOCK, _SLOW_BLOCK = 512, 32
_KINDS = {"rows": np.int64, "inputs": np.uint64, "both": np.uint64}


@dataclass(frozen=True)
class Survey:
    """What one look found: of each row that was read a digest of its inputs, and one of inputs and target together.

    ``rows`` are the numbers of the rows, ascending; ``records`` is how many there are; ``not_finite`` counts rows with
    a value that is not finite among those that were read. All but ``records`` is secret.
    """

    records: int
    rows: NDArray[np.int64] = field(repr=False)
    inputs: NDArray[np.uint64] = field(repr=False)
    both: NDArray[np.uint64] = field(repr=False)
    not_finite: int = field(repr=False)
    key: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """Return the form that is kept in ``private``; `from_bytes` reads it."""
        kept, key = io.BytesIO(), np.frombuffer(self.key, np.uint8)
        counts = np.array([self.records, self.not_finite])
        np.savez(kept, counts=counts, rows=self.rows, inputs=self.inputs, both=self.both, key=key)
        return kept.getvalue()

    @classmethod
    def from_bytes(cls, kept: bytes) -> Survey:
        """Return the survey that was kept.

        Examples:
          >>> from evenhand.data import wrap
          >>> found = survey(wrap(torch.eye(3), [0, 1, 2]))
          >>> bool((Survey.from_bytes(found.to_bytes()).inputs == found.inputs).all())
          True
        """
        file = io.BytesIO(kept)
        untrusted.check_stored(file, "rows.npz")
        try:
            with np.load(file, allow_pickle=False) as held:
                records, not_finite = (int(count) for count in held["counts"])
                rows, inputs, both = (held[name].astype(kind, casting="no") for name, kind in _KINDS.items())
                key = held["key"].astype(np.uint8, casting="no").tobytes()
        except (ValueError, TypeError, LookupError, OSError, EOFError, MemoryError, zipfile.BadZipFile):
            raise VerificationError("rows.npz cannot be read: it was damaged or edited.") from None
        if not (rows.shape == inputs.shape == both.shape == (len(rows),) and len(rows) <= records and len(key) == 32):
            raise VerificationError("rows.npz cannot be read: it was damaged or edited.")
        return cls(records, rows, inputs, both, not_finite, key)

    @classmethod
    def read(cls, path: Path) -> Survey:
        """Return the survey that lies in a file.

        Raises:
          VerificationError: it is not a file of the kind that ``to_bytes`` makes.
        """
        return cls.from_bytes(untrusted.read_bytes(path))


def survey(data: Data, key: bytes | None = None) -> Survey:
    """Return what one look at the records finds; a second call with the same key looks no more.

    Every record is read with the same public seed, so that random transforms do the same to all of them. Numbers are
    compared as float32 and in their order, whatever their shape. Without a key a new one is taken.

    Examples:
      >>> from evenhand.data import wrap
      >>> found = survey(wrap(torch.tensor([[1.0], [float("nan")], [1.0]]), [0, 0, 1]))
      >>> found.not_finite, bool(found.inputs[0] == found.inputs[2]), bool(found.both[0] == found.both[2])
      (1, True, False)
    """
    held: Survey | None = data.__dict__.get("_survey")
    if held is not None and key in (None, held.key):
        return held
    found = _looked(data, key or os.urandom(32))
    data.__dict__["_survey"] = found
    return found


def _looked(data: Data, key: bytes) -> Survey:
    count, size = len(data), _BLOCK if isinstance(data.fetch, Quiet) else _SLOW_BLOCK
    hashing, until = _Hashing(key), time.monotonic() + SECONDS
    starts = np.arange(0, count, size)
    if count > size:
        np.random.default_rng(list(key)).shuffle(starts)
    parts: list[tuple[NDArray[Any], ...]] = []
    for start in starts[: -(-ROWS // size)].tolist():
        rows = torch.arange(start, min(start + size, count))
        parts.append((rows.numpy(), *hashing.block(*data.fetch(rows))))
        if time.monotonic() > until:
            break
    rows_, inputs, both, finite = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(rows_)
    return Survey(count, rows_[order], inputs[order], both[order], int((~finite).sum()), key)


class _Hashing:
    """Digests of rows of numbers: two sums of products (NH of UMAC), in each of which two rows agree once in 2^32."""

    def __init__(self, key: bytes) -> None:
        self._secret = list(key)
        self._words: dict[tuple[int, int], NDArray[np.uint32]] = {}

    def block(self, inputs: Any, targets: Any) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.bool_]]:
        """Return the digests of inputs, those of inputs and targets, and which rows are finite."""
        x, finite_x = self._digested(0, inputs)
        y, finite_y = self._digested(1, targets)
        mixed = (x ^ (x >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + y
        return x, mixed, finite_x & finite_y

    def _digested(self, which: int, tree: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        leaves = [leaf.detach().cpu() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]
        if not leaves:
            size = len(tree) if hasattr(tree, "__len__") else 0
            return np.zeros(size, np.uint64), np.ones(size, np.bool_)
        columns = [leaf.reshape(len(leaf), -1).float() for leaf in leaves]
        flat = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        finite = torch.isfinite(flat.sum(1))
        if not bool(finite.all()):  # or the sum was too large
            finite = torch.isfinite(flat).all(1)
        values = (flat + 0.0).numpy()  # -0 and 0 are the same number
        if values.shape[1] % 2:
            values = np.pad(values, ((0, 0), (0, 1)))
        words = values.view(np.uint32)
        first, second = (self._sum(words, self._key(2 * which + turn, words.shape[1])) for turn in (0, 1))
        return first ^ (second * np.uint64(0xD6E8FEB86659FD93) + np.uint64(values.shape[1])), finite.numpy()

    def _key(self, turn: int, width: int) -> NDArray[np.uint32]:
        if (turn, width) not in self._words:
            generator = np.random.default_rng([*self._secret, turn, width])
            self._words[turn, width] = generator.integers(0, 2**32, width, dtype=np.uint32)
        return self._words[turn, width]

    @staticmethod
    def _sum(words: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint64]:
        shifted = words + key
        half = shifted.shape[1] // 2
        products = shifted[:, :half].astype(np.uint64)
        products *= shifted[:, half:]
        found: NDArray[np.uint64] = products.sum(1)
        return found
