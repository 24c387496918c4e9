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
from evenhand.model_io import Shared

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


def seeds_of() -> Seeds:
    """Return the function that gives the seeds of the fetches that are made now."""
    return _seeds.get()


def begun(fetch: Fetch, rows: Tensor) -> Callable[[], tuple[Any, Any]]:
    """Let a fetch begin, with the seeds that hold now; return a function that gives its batch.

    Worker processes read in the meantime; any other fetch is done on return.
    """
    begin: Callable[[Tensor], Callable[[], tuple[Any, Any]]] | None = getattr(fetch, "begin", None)
    if begin is not None:
        return begin(rows)
    batch = fetch(rows)
    return lambda: batch


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


@dataclass(frozen=True, eq=False)
class Changed(Quiet):
    """A fetch whose batches are changed by a fixed function, such as one that puts them on a device."""

    change: Callable[[tuple[Any, Any]], tuple[Any, Any]]

    def __call__(self, rows: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of these rows, in this order, changed."""
        return self.change(self.read(rows))

    @property
    def reads_ahead(self) -> bool:
        """Return whether worker processes read."""
        return bool(getattr(self.read, "reads_ahead", False))

    def begin(self, rows: Tensor) -> Callable[[], tuple[Any, Any]]:
        """Let the fetch begin; return a function that gives its batch, changed."""
        batch = begun(self.read, rows)
        return lambda: self.change(batch())


class Guarded:
    """A fetch by somebody else's code, with a seed for each record.

    ``record(number)`` reads one record and ``collate`` makes a batch of several; ``together``, if there is one, does
    both at once for the numbers of several.

    Formal guarantees:
      What is returned for a record is what its code makes of it with all global generators set from the record's own
      seed: whichever others are fetched. Code that draws nothing is not seeded. Whether it drew is looked at after
      every batch, since it may draw for some records only; if it did, the batch is fetched again, each record read and
      collated alone with its seed, and so is every later one: what is drawn for several at once has no seed of each.

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
        together: Callable[[list[int]], tuple[Any, Any]] | None = None,
    ) -> None:
        self._record, self._collate, self._nothing, self._together = record, collate, nothing, together
        self.draws = False

    def __call__(self, rows: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of these rows, in this order."""
        numbers = rows.tolist()
        if not numbers:
            return self._nothing()
        before = generators.Snapshot()
        if not self.draws:
            batch = self._batch(numbers)
            if not before.moved():
                return batch
            self.draws = True
        try:
            return join_batches([self._seeded(*each) for each in zip(numbers, _seeds.get()(numbers), strict=True)])
        finally:
            before.restore()

    def _batch(self, numbers: list[int]) -> tuple[Any, Any]:
        if self._together is not None and len(numbers) > 1:
            return self._together(numbers)
        return self._collate([self._record(number) for number in numbers])

    def _seeded(self, number: int, seed: bytes | int) -> tuple[Any, Any]:
        generators.seed(seed)
        return self._collate([self._record(number)])


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
        *(lambda number: fetch(torch.tensor([number])), join_batches),
        lambda: fetch(torch.empty(0, dtype=torch.long)),
    )


def join_batches(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Join the batches of several fetches into one: tensors are concatenated."""
    trees = [tree_flatten(part) for part in parts]
    every = list(zip(*(leaves for leaves, _ in trees), strict=True))
    if not all(isinstance(leaf, Tensor | Shared) for leaves in every for leaf in leaves):
        raise DataError("A fetch of your own must give tensors, or dicts and tuples of them.")
    joined = [leaves[0] if isinstance(leaves[0], Shared) else torch.cat(leaves) for leaves in every]
    batch: tuple[Any, Any] = tree_unflatten(joined, trees[0][1])
    return batch
