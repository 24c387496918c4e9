"""Tells whether two runs used the same data, so that their budgets can be added up."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from evenhand import untrusted
from evenhand.data.dataset import Data, hash_together
from evenhand.data.record_seeds import Quiet
from evenhand.errors import DataError, VerificationError
from evenhand.model_io import Shared, of_one_width

if TYPE_CHECKING:
    from evenhand.data.tables import Table

ROWS = 512


def fingerprint(data: Data) -> str:
    """Return a hash that is equal for all data made from the same records.

    It is the hash of the name of a source, of the bytes of a file, or of the records themselves.

    Of records that were passed from Python it is a hash of their number and of the inputs of up to 512 evenly spaced
    ones, as float32 numbers of whatever shape: with other labels they are still the same people's. Parts, splits and
    features of data have that of the whole. It depends on private records, so it must stay on the trainer's machine:
    whoever knows all records but one could test guesses for that one against it.

    Examples:
      >>> from evenhand.data import wrap
      >>> one, two, other = wrap(torch.ones(2, 2), [0, 1]), wrap(torch.ones(2, 2), [1, 0]), wrap(torch.eye(2), [0, 1])
      >>> fingerprint(one) == fingerprint(two), fingerprint(one) == fingerprint(other)
      (True, False)
      >>> fingerprint(one.take(torch.tensor([1]))) == fingerprint(one)
      True
    """
    if data.origin is None:
        return _contents(data)
    return data.origin if isinstance(data.origin, str) else data.origin()


def of_source(name: str) -> str:
    """Return the fingerprint of all records of a named source; it depends on the name only.

    Other files under the same name count as the same records: budgets are then added up too often, never too seldom.

    Examples:
      >>> of_source("mnist") == of_source("cifar10")
      False
    """
    return hashlib.sha256(f"evenhand source {name}".encode()).hexdigest()


def of_files(paths: Sequence[Path]) -> str:
    """Return the fingerprint of data read from these files: a hash of their bytes, in any order and under any names.

    Examples:
      >>> import tempfile
      >>> one, two = (Path(tempfile.mkdtemp()) / name for name in "ab")
      >>> one.write_bytes(b"1"), two.write_bytes(b"2")
      (1, 1)
      >>> of_files([one, two]) == of_files([two, one]) != of_files([one])
      True
    """
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def of_table(table: Table, label: str | None = None) -> str:
    """Return the fingerprint of a table in memory: a hash of cells of up to 512 records, whatever is declared of them.

    Examples:
      >>> from evenhand.data.tables import Table
      >>> one, two = Table({"age": [1, 2], "ill": ["n", "y"]}), Table({"ill": ["y", "y"], "age": [1.0, 2.0]})
      >>> of_table(one, "ill") == of_table(two, "ill"), of_table(one) == of_table(two)
      (True, False)
    """
    digest = hashlib.sha256(str(len(table)).encode())
    rows = np.unique(np.linspace(0, max(0, len(table) - 1), min(ROWS, len(table))).round().astype(np.int64))
    for name in sorted(set(table.columns) - {label}):
        cells = [table.columns[name][row] for row in rows.tolist()]
        digest.update(json.dumps([name, [_as_text(cell) for cell in cells]]).encode())
    return digest.hexdigest()


def _as_text(cell: Any) -> str:
    """Return a cell as text: a number in the precision of float32, whatever kind of number it is."""
    try:
        return str(np.float32(cell))
    except (TypeError, ValueError, OverflowError):
        return str(cell)


def assignment(data: Data) -> str:
    """Return a hash of which record belongs to which owner class.

    Only where it is equal do equal owner names mean the same records.

    As secret as the fingerprint. It sees the records themselves, since parts of the same data may have equal owners.

    Examples:
      >>> from evenhand.data import wrap
      >>> one, two = (wrap(torch.arange(3.0)[:, None], [0, 1, 0], owners=owners) for owners in ("aab", "aba"))
      >>> assignment(one) == assignment(one), assignment(one) == assignment(two)
      (True, False)
    """
    names = data.facts.owner_names
    digest = hashlib.sha256(json.dumps(names).encode())
    if len(names) > 1:
        digest.update(_contents(data).encode())
        digest.update(data.owner.cpu().contiguous().numpy().data)
    if data.facts.promised == "record" or data.partition is None:
        return digest.hexdigest()
    return f"{data.partition()}/{digest.hexdigest()}"


def persons_of(data: Data) -> str:
    """Return a hash of which records are one person's, whatever the persons are called; "" for data by record.

    As secret as the fingerprint.

    Examples:
      >>> from evenhand.data import wrap
      >>> one, two, three = (wrap(torch.eye(3), [0, 1, 0], persons=names) for names in ("aab", "xxy", "xyy"))
      >>> persons_of(one) == persons_of(two), persons_of(one) == persons_of(three)
      (True, False)
    """
    if data.facts.person_cap and data.together is not None:
        return f"{hash_together(data.together)}, at most {data.facts.person_cap} records each"
    if data.persons is None:
        return ""
    sizes = data.persons.starts.diff()
    whose = torch.empty_like(data.persons.order)
    whose[data.persons.order] = torch.repeat_interleave(data.persons.first, sizes)
    digest = hashlib.sha256(_contents(data.persons.records).encode())
    digest.update(whose.numpy().data)
    return digest.hexdigest()


def identity(data: Data) -> str:
    """Return a hash of the records, their order and the owner of each: a run can only continue with an equal one.

    Parts of the same data differ in it, unlike in their fingerprint. As secret as that, and of as many records.

    Examples:
      >>> from evenhand.data import wrap
      >>> one, two = (wrap(torch.arange(3.0)[:, None], [0, 1, 0], owners=owners) for owners in ("aab", "bba"))
      >>> identity(one) == identity(one), identity(one) == identity(two)
      (True, False)
    """
    digest = hashlib.sha256(json.dumps(data.facts.owner_names).encode())
    digest.update(_contents(data).encode())
    digest.update(data.owner.cpu().contiguous().numpy().data)
    digest.update(persons_of(data).encode())
    return digest.hexdigest()


def _contents(data: Data) -> str:
    """Return a hash of the number of records and of the inputs of some; computed once for each Data.

    These records are read twice, and refused if they differ.

    The second time they are read in reverse, so that what depends on the record before shows too. Both times every
    record has the same seed in all global generators: what differs was drawn from somewhere else.
    """
    digest: str | None = data.__dict__.get("_contents")
    if digest is None:
        rows = torch.linspace(0, len(data) - 1, min(ROWS, len(data)), dtype=torch.float64).round().long()
        chosen = torch.unique(rows)
        first = data.fetch(chosen)
        again = tree_map_only(torch.Tensor, lambda leaf: _even(leaf).flip(0), data.fetch(chosen.flip(0)))
        digest = _hashed(len(data), first[0])
        if digest != _hashed(len(data), again[0]) or not _same(first[1], again[1]):
            raise DataError(
                "Reading the same records twice gives different ones, so that a run could not go on after a stop, runs "
                "on these data could not be added up, and what one record draws could depend on others. The dataset "
                "has a generator of its own (torch.Generator, numpy.random.default_rng, random.Random), draws from the "
                "operating system, or remembers what was read before. Let it draw from the global generators "
                "(torch.rand, np.random.rand, random.random), which get a secret seed for every record and step; or "
                "take random transforms out of it and pass augment=."
            )
        data.__dict__["_contents"] = digest
    return digest


def _even(leaf: Tensor) -> Tensor:
    """Return a tensor whose rows have one width."""
    return of_one_width(leaf) if leaf.is_nested else leaf


def _hashed(count: int, inputs: Any) -> str:
    digest = hashlib.sha256(str(count).encode())
    _feed(digest, inputs)
    return digest.hexdigest()


def _same(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(_hashed(0, a) == _hashed(0, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            _feed(digest, part)
    elif isinstance(value, Shared):
        return  # a public constant, no part of a record
    elif isinstance(value, torch.Tensor):
        numbers = _even(value).detach().cpu().float() + 0.0  # -0 and 0 are the same number
        digest.update(numbers.contiguous().view(-1).view(torch.uint8).numpy().data)
    else:
        raise DataError(
            f"A record has an input of type {type(value).__name__}: give tensors, or dicts and lists of them."
        )


SECONDS, ROWS = 2.0, 2**20
"""Where reading is slow or rows are many, a look ends here and has seen a part, in blocks that are chosen at random."""
_BLOCK, _SLOW_BLOCK = 512, 32
_KINDS = {"rows": np.int64, "inputs": np.uint64, "both": np.uint64}


@dataclass(frozen=True)
class Survey:
    """Result of one look at the records: for each row that was read, a digest of its inputs and one with the target.

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
        """Return the bytes that are stored in ``private``; `from_bytes` reads them."""
        buffer, key = io.BytesIO(), np.frombuffer(self.key, np.uint8)
        counts = np.array([self.records, self.not_finite])
        np.savez(buffer, counts=counts, rows=self.rows, inputs=self.inputs, both=self.both, key=key)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Survey:
        """Return the survey that ``to_bytes`` stored; raise VerificationError if it is damaged.

        Examples:
          >>> from evenhand.data import wrap
          >>> original = survey(wrap(torch.eye(3), [0, 1, 2]))
          >>> bool((Survey.from_bytes(original.to_bytes()).inputs == original.inputs).all())
          True
        """
        file = io.BytesIO(content)
        untrusted.check_stored(file, "rows.npz")
        try:
            with np.load(file, allow_pickle=False) as arrays:
                records, not_finite = (int(count) for count in arrays["counts"])
                rows, inputs, both = (arrays[name].astype(kind, casting="no") for name, kind in _KINDS.items())
                key = arrays["key"].astype(np.uint8, casting="no").tobytes()
        except (ValueError, TypeError, LookupError, OSError, EOFError, MemoryError, zipfile.BadZipFile):
            raise VerificationError("rows.npz cannot be read: it was damaged or edited.") from None
        if not (rows.shape == inputs.shape == both.shape == (len(rows),) and len(rows) <= records and len(key) == 32):
            raise VerificationError("rows.npz cannot be read: it was damaged or edited.")
        return cls(records, rows, inputs, both, not_finite, key)

    @classmethod
    def read(cls, path: Path) -> Survey:
        """Return the survey stored in a file.

        Raises:
          VerificationError: it is not a file of the kind that ``to_bytes`` makes.
        """
        return cls.from_bytes(untrusted.read_bytes(path))


def survey(data: Data, key: bytes | None = None) -> Survey:
    """Read the records once and return their digests; a second call with the same key reads nothing.

    Of data by person all records are read. Every record is read with the same public seed, so that random transforms do
    the same to all of them. Numbers are compared as float32 and in their order, whatever their shape. Without a key a
    new one is taken.

    Examples:
      >>> from evenhand.data import wrap
      >>> seen = survey(wrap(torch.tensor([[1.0], [float("nan")], [1.0]]), [0, 0, 1]))
      >>> seen.not_finite, bool(seen.inputs[0] == seen.inputs[2]), bool(seen.both[0] == seen.both[2])
      (1, True, False)
    """
    if data.persons is not None:
        return survey(data.persons.records, key)
    previous: Survey | None = data.__dict__.get("_survey")
    if previous is not None and key in (None, previous.key):
        return previous
    new_survey = _looked(data, key or os.urandom(32))
    data.__dict__["_survey"] = new_survey
    return new_survey


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
        leaves = [_even(leaf).detach().cpu() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]
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
        sums: NDArray[np.uint64] = products.sum(1)
        return sums
