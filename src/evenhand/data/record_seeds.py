"""Gives each record a seed of its own for what a Dataset draws while it is fetched; shared generators are not used.

Random crops and flips in ``__getitem__`` draw from the global generators of torch, numpy or ``random``. Left alone, a
record more in a batch would shift what all later ones draw, and so move a clipped sum by many times its bound. Here
every record is fetched with all three set anew: in training from a secret of (key, step, record), elsewhere from a
constant, so that the fetched record is a function of the stored one alone. Afterwards the caller's generators go on as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from evenhand import generators
from evenhand.errors import DataError

Fetch: TypeAlias = Callable[[Tensor], tuple[Any, Any]]
Seeds: TypeAlias = Callable[[Sequence[int]], Iterable[bytes | int]]
"""Gets the numbers of records and gives the seed of each."""


def _constant(numbers: Sequence[int]) -> Iterable[int]:
    return repeat(0, len(numbers))


_seeds: ContextVar[Seeds] = ContextVar("evenhand_seeds", default=_constant)


@contextmanager
def seeds(of: Seeds) -> Iterator[None]:
    """Use these seeds for every fetch inside the block; outside it every record has one public seed."""
    token = _seeds.set(of)
    try:
        yield
    finally:
        _seeds.reset(token)


@dataclass(frozen=True, eq=False)
class Quiet:
    """A fetch that draws nothing of its own: it indexes tensors, or passes row numbers on to another fetch.

    Examples:
      >>> Quiet(lambda rows: (torch.eye(3)[rows], rows))(torch.tensor([1]))[0].tolist()
      [[0.0, 1.0, 0.0]]
    """

    read: Fetch

    def __call__(self, rows: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of these rows, in this order."""
        return self.read(rows)


class Guarded:
    """A fetch by somebody else's code, with a seed for each record.

    ``record(number)`` reads one record and ``collate`` makes a batch of several; nothing else of the code is called, so
    records are never fetched together (``__getitems__`` is not used).

    Formal guarantees:
      What is returned for a record is what its code makes of it with all global generators set from the record's own
      seed: whichever others are fetched. Code that draws nothing is not seeded. Whether it drew is looked at after
      every batch, since it may draw for some records only; if it did, the batch is fetched again with seeds, and so is
      every later one.

    Examples:
      >>> def record(number): return torch.rand(1), number
      >>> fetch = Guarded(record, torch.utils.data.default_collate, lambda: (torch.empty(0, 1), torch.empty(0)))
      >>> with seeds(lambda numbers: numbers):
      ...     one, more = fetch(torch.tensor([7]))[0], fetch(torch.tensor([5, 7]))[0]
      >>> bool(one[0] == more[1])
      True
    """

    def __init__(
        self,
        record: Callable[[int], Any],
        collate: Callable[[list[Any]], tuple[Any, Any]],
        nothing: Callable[[], tuple[Any, Any]],
    ) -> None:
        self._record, self._collate, self._nothing = record, collate, nothing
        self.draws = False

    def __call__(self, rows: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of these rows, in this order."""
        numbers = rows.tolist()
        if not numbers:
            return self._nothing()
        before = generators.Snapshot()
        if not self.draws:
            records = [self._record(number) for number in numbers]
            if not before.moved():
                return self._collate(records)
            self.draws = True
        try:
            return self._collate([self._seeded(*each) for each in zip(numbers, _seeds.get()(numbers), strict=True)])
        finally:
            before.restore()

    def _seeded(self, number: int, seed: bytes | int) -> Any:
        generators.seed(seed)
        return self._record(number)


def guarded(fetch: Fetch) -> Fetch:
    """Return a fetch that is safe whatever it draws: ours unchanged, a user's function with a seed for each record.

    Examples:
      >>> fetch = guarded(lambda rows: (torch.rand(len(rows), 1), rows))
      >>> bool((fetch(torch.arange(3))[0] == fetch(torch.tensor([2]))[0]).all())
      True
    """
    if isinstance(fetch, Quiet | Guarded):
        return fetch
    return Guarded(
        lambda number: fetch(torch.tensor([number])), _joined, lambda: fetch(torch.empty(0, dtype=torch.long))
    )


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Join the batches of several fetches into one: tensors are concatenated."""
    trees = [tree_flatten(part) for part in parts]
    every = list(zip(*(leaves for leaves, _ in trees), strict=True))
    if not all(isinstance(leaf, Tensor) for leaves in every for leaf in leaves):
        raise DataError("A fetch of your own must give tensors, or dicts and tuples of them.")
    batch: tuple[Any, Any] = tree_unflatten([torch.cat(leaves) for leaves in every], trees[0][1])
    return batch
