"""Blocks of records that are summed in float32: decided by each record's own key, so that one record more changes one.

A key is a secret random number of the record. Blocks are the leaves of the binary tree over the keys' digits in which
every node with too many records is split. A record more can split one leaf; all others keep exactly their records.
Proof: docs/proofs/float_sums.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.summation import KEY_BITS, MOST_ROWS, Summation


@dataclass(frozen=True)
class Blocks:
    """The rows of a batch in blocks.

    Args:
      size: rows of the batch.
      keys: one key per row, ascending; None numbers the rows, for sums that no promise rests on.
      summation: sizes of blocks and of a batch that float32 can hold; None takes the largest blocks.
      whole: the weight of a record depends on the others, so one record more may change every block. Then only a
        batch that is one block is summed in float32.
      part: these are not all records of the batch; sums over several blocks stay float64 for what is added to them.
      batch: how many records the whole batch has; None if these are all.

    Examples:
      >>> Blocks(5).of(3)
      [slice(0, 3, None), slice(3, 5, None)]
    """

    size: int
    keys: NDArray[np.uint64] | None = None
    summation: Summation | None = None
    whole: bool = False
    part: bool = False
    batch: int | None = None
    _found: dict[int, list[slice]] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        """Return the most records of a block whose records add one vector each."""
        return MOST_ROWS if self.summation is None else self.summation.rows

    @property
    def rounds(self) -> bool:
        """Return whether the sum of these records is a total, and may be rounded to float32."""
        return not self.part and (self.summation is None or (self.batch or self.size) <= self.summation.most)

    @property
    def expected(self) -> int | None:
        """Return how many records are expected, if that is known."""
        return None if self.summation is None else math.ceil(self.summation.expected_batch)

    def exact(self, parts: list[slice]) -> bool:
        """Return whether sums over these blocks must be float64 from the first addition on."""
        return self.whole and (self.part or len(parts) > 1)

    def of(self, most: int) -> list[slice]:
        """Return the blocks of at most ``most`` rows, in the order of the rows; a batch without rows has none."""
        if most not in self._found:
            self._found[most] = chunks_of(self.size, most) if self.keys is None else leaves(self.keys, most)
        return self._found[most]

    def runs(self, parts: list[slice], usable: Tensor | None) -> list[slice]:
        """Return the blocks without the rows that cannot be used: runs of rows that can, block by block.

        Which block a row is in stays what it was, and the others of its block are summed in the same way or in shorter
        runs: a record that cannot be used changes no other block.
        """
        if usable is None:
            return parts
        good = usable[: self.size].cpu().numpy()
        runs = []
        for part in parts:
            flags = np.concatenate([[False], good[part], [False]])
            edges = np.flatnonzero(flags[1:] != flags[:-1]).reshape(-1, 2) + part.start
            runs += [slice(int(start), int(stop)) for start, stop in edges]
        return runs

    def take(self, rows: slice) -> Blocks:
        """Return the blocks of some of the rows."""
        size, keys = rows.stop - rows.start, None if self.keys is None else self.keys[rows]
        part = self.part or size < self.size
        return Blocks(size, keys, self.summation, self.whole, part, self.batch or self.size)


def chunks_of(size: int, most: int) -> list[slice]:
    """Return slices of ``range(size)`` of at most ``most`` rows.

    Examples:
      >>> chunks_of(4, 3), chunks_of(0, 3)
      ([slice(0, 3, None), slice(3, 4, None)], [])
    """
    return [slice(start, min(start + most, size)) for start in range(0, size, most)]


def leaves(keys: NDArray[np.uint64], most: int) -> list[slice]:
    """Return the leaves of the tree over ascending ``keys`` as slices of rows; levels are always apart.

    Guarantee: inserting one key changes the records of one leaf only, which keeps them or becomes several leaves.

    Examples:
      >>> keys = np.array([0, 1, 2, 3], dtype=np.uint64) << np.uint64(54)
      >>> leaves(keys, 4), leaves(keys, 3)
      ([slice(0, 4, None)], [slice(0, 2, None), slice(2, 4, None)])
    """
    if 0 < len(keys) <= most and (int(keys[0]) ^ int(keys[-1])) >> KEY_BITS == 0:
        return [slice(0, len(keys))]
    levels = keys >> np.uint64(KEY_BITS)
    edges = [0, *(np.flatnonzero(levels[1:] != levels[:-1]) + 1).tolist(), len(keys)]
    blocks: list[slice] = []
    for start, stop in pairwise(edges):
        if stop > start:
            _split(keys, start, stop, int(levels[start]) << KEY_BITS, KEY_BITS, most, blocks)
    return blocks


def _split(
    keys: NDArray[np.uint64], start: int, stop: int, low: int, bits: int, most: int, blocks: list[slice]
) -> None:
    """Append the leaves of the node whose keys begin like ``low`` and differ in their last ``bits`` digits."""
    if start == stop:
        return
    if stop - start <= most or bits == 0:
        blocks.extend(slice(start + part.start, start + part.stop) for part in chunks_of(stop - start, most))
        return
    middle = low + (1 << (bits - 1))
    half = start + int(np.searchsorted(keys[start:stop], np.uint64(middle)))
    _split(keys, start, half, low, bits - 1, most, blocks)
    _split(keys, half, stop, middle, bits - 1, most, blocks)


Sums = Mapping[str, Tensor]


def add_up(parts: list[slice], weights: Tensor, one: Callable[[Tensor, slice], Sums]) -> dict[str, Tensor]:
    """Return the sum over all blocks: that of a single block as it comes, of several in float64.

    ``one(weights, rows)`` gives the sum of one block by parameter name.

    Examples:
      >>> rows = torch.arange(4.0).view(4, 1)
      >>> add_up([slice(0, 2), slice(2, 4)], torch.ones(4), lambda w, own: {"a": w @ rows[own]})
      {'a': tensor([6.], dtype=torch.float64)}
    """
    if len(parts) == 1:
        (rows,) = parts
        return dict(one(weights if rows.stop - rows.start == weights.shape[0] else weights[rows], rows))
    total: dict[str, Tensor] = {}
    for rows in parts:
        for name, part in one(weights[rows], rows).items():
            if name in total:
                total[name] += part
            else:
                total[name] = part.to(torch.float64, copy=True)
    return total


class PerRecordGradients(Protocol):
    """Norms of all records and their weighted sum.

    ``slip`` is how far rounding may have moved a record's gradient (None: nowhere), ``clean`` says that every norm is
    finite and in the range of float32.
    """

    loss: Tensor
    norm: Tensor
    slip: Tensor | None
    clean: bool

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks, last: bool = False
    ) -> dict[str, Tensor]:
        """Return ``sum_i weights_i g_i`` by parameter name over the rows where ``usable`` is true (None: everywhere).

        What is added up over several blocks is float64. After the ``last`` sum there can be no other: what a layer saw
        is let go once it is added up.
        """


T = TypeVar("T")


def drain(items: list[T]) -> Iterator[T]:
    """Yield the items in order and remove each from the list, so that its memory can be freed.

    >>> items = [1, 2]
    >>> [(item, len(items)) for item in drain(items)]
    [(1, 1), (2, 0)]
    """
    items.reverse()
    while items:
        yield items.pop()
