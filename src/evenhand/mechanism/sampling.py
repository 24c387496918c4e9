"""Poisson sampling: every record enters a step by its own coin, whose probability depends on its owner class only.

The draw that runs is the draw that is accounted (law 7): rates come from the plan, coins from the secret stream. The
seeds for fetching records come from the same stream, one for each (step, record).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.data.record_seeds import seeds
from evenhand.summation import KEY_BITS, levels
from evenhand.types import Batch

if TYPE_CHECKING:
    from evenhand.mechanism.random_streams import Stream


class PoissonSampler:
    """A sampler that draws the rows of each step. The draws are secret: the accounting relies on it.

    Every record has a secret random key for the whole segment, and rows come in the order of their keys. The blocks
    that are summed together follow from them (``gradients/record_blocks.py``). Records whose ``scales`` differ in level
    never share a block.

    Formal guarantees:
      Inclusions are independent over records and steps, with probability ``rates[owner]`` (up to 2^-53 above). The
      draw is a function of (key, step) alone: asking twice gives the same rows, never a second chance.

    Examples:
      >>> import torch
      >>> from evenhand.mechanism.random_streams import Stream
      >>> sampler = PoissonSampler(torch.zeros(100, dtype=torch.long), [0.1], Stream.insecure(0, 0))
      >>> bool((sampler.rows(0) == sampler.rows(0)).all())
      True
    """

    def __init__(
        self, owner: Tensor, rates: Sequence[float], stream: Stream, scales: Sequence[float] | None = None
    ) -> None:
        owners, keys = owner.cpu().numpy(), stream.record_keys(len(owner))
        if scales is not None:
            keys = keys | (levels(scales)[owners] << np.uint64(KEY_BITS))
        self._order = np.argsort(keys)
        self._keys = keys[self._order]
        self._thresholds = np.asarray(rates, dtype=np.float64)[owners[self._order]]
        self._stream = stream

    def record_seeds(self, step: int, records: Sequence[int]) -> Iterator[bytes]:
        """Yield the secret seed of each record of step ``step``."""
        return self._stream.record_seeds(step, records)

    def draw(self, step: int) -> tuple[Tensor, NDArray[np.uint64]]:
        """Return the numbers of the rows that step ``step`` uses, possibly none, and their keys, ascending."""
        coins = self._stream.uniforms("sampling", step, self._thresholds.size)
        drawn = np.flatnonzero(coins < self._thresholds)
        return torch.from_numpy(self._order[drawn]), self._keys[drawn]

    def rows(self, step: int) -> Tensor:
        """Return the numbers of the rows that step ``step`` uses."""
        return self.draw(step)[0]


def draw(data: Data, sampler: PoissonSampler, position: int, token: int) -> Batch:
    """Return the batch of exactly the rows drawn for step ``position``, fetched with their secret seeds."""
    rows, keys = sampler.draw(position)
    with seeds(partial(sampler.record_seeds, position)):
        inputs, targets = data.fetch(rows)
    return Batch(inputs, targets, data.group[rows], data.owner[rows], rows, position, token, keys)
