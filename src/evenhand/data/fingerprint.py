"""Telling whether two runs used the same data, so that their budgets can be added up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from evenhand.data.dataset import Data
from evenhand.errors import DataError

ROWS = 512


def fingerprint(data: Data) -> str:
    """What all data made from the same records share: the name of a source, the bytes of a file, or the records.

    Of records that were passed from Python it is a hash of their number and of the inputs of up to 512 evenly spaced
    ones: with other labels they are still the same people's. Parts, splits and features of data have that of the whole.
    It depends on private records, so it must stay on the trainer's machine: whoever knows all records but one could
    test guesses for that one against it.

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
    """The fingerprint of all records of a named source, whatever is made of them; it says nothing about them.

    Other files under the same name count as the same records: budgets are then added up too often, never too seldom.

    Examples:
      >>> of_source("mnist") == of_source("cifar10")
      False
    """
    return hashlib.sha256(f"evenhand source {name}".encode()).hexdigest()


def of_files(paths: Sequence[Path]) -> str:
    """The fingerprint of what is read from these files: of their bytes, in any order and under any names.

    Examples:
      >>> import tempfile
      >>> one, two = (Path(tempfile.mkdtemp()) / name for name in "ab")
      >>> one.write_bytes(b"1"), two.write_bytes(b"2")
      (1, 1)
      >>> of_files([one, two]) == of_files([two, one]) != of_files([one])
      True
    """
    found = []
    for path in paths:
        with path.open("rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()


def assignment(data: Data) -> str:
    """Hash of which record belongs to which owner class: only where it is the same do equal names mean equal records.

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
    return digest.hexdigest()


def identity(data: Data) -> str:
    """Hash of which records these are, in which order, and who owns each: a run must go on with the same.

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
    return digest.hexdigest()


def _contents(data: Data) -> str:
    """Hash of the number of records and of the inputs of some, which are read twice, once for each Data.

    The second time they are read in reverse, so that what depends on the record before shows too. Both times every
    record has the same seed in all global generators: what differs was drawn from somewhere else.
    """
    held: str | None = data.__dict__.get("_contents")
    if held is None:
        rows = torch.linspace(0, len(data) - 1, min(ROWS, len(data)), dtype=torch.float64).round().long()
        chosen = torch.unique(rows)
        first = data.fetch(chosen)
        again = tree_map_only(torch.Tensor, lambda leaf: leaf.flip(0), data.fetch(chosen.flip(0)))
        held = _hashed(len(data), first[0])
        if held != _hashed(len(data), again[0]) or not _same(first[1], again[1]):
            raise DataError(
                "Reading the same records twice gives different ones, so that a run could not go on after a stop, runs "
                "on these data could not be added up, and what one record draws could depend on others. The dataset "
                "has a generator of its own (torch.Generator, numpy.random.default_rng, random.Random), draws from the "
                "operating system, or remembers what was read before. Let it draw from the global generators "
                "(torch.rand, np.random.rand, random.random), which get a secret seed for every record and step; or "
                "take random transforms out of it and pass augment=."
            )
        data.__dict__["_contents"] = held
    return held


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
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            _feed(digest, part)
    elif isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    else:
        raise DataError(
            f"A record has an input of type {type(value).__name__}: give tensors, or dicts and lists of them."
        )
