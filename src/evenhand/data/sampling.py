"""Poisson sampling: every record enters a step by its own coin, whose probability depends on its owner class only.

The draw that runs is the draw that is accounted (law 7): rates come from the plan, coins from the secret stream. So do
the seeds that records are fetched with, one for each (step, record).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from evenhand.data.drawing import seeds
from evenhand.data.wrapping import Data
from evenhand.types import Batch

if TYPE_CHECKING:
    from evenhand.streams import Stream


class PoissonSampler:
    """Draws the rows of each step.

    Formal guarantees:
      Inclusions are independent over records and steps, with probability ``rates[owner]`` (up to 2^-53 above). The
      draw is a function of (key, step) alone: asking twice gives the same rows, never a second chance.

    Examples:
      >>> import torch
      >>> from evenhand.streams import Stream
      >>> sampler = PoissonSampler(torch.zeros(100, dtype=torch.long), [0.1], Stream.insecure(0, 0))
      >>> bool((sampler.rows(0) == sampler.rows(0)).all())
      True
    """

    def __init__(self, owner: Tensor, rates: Sequence[float], stream: Stream) -> None:
        self._thresholds = np.asarray(rates, dtype=np.float64)[owner.cpu().numpy()]
        self._stream = stream

    def record_seeds(self, step: int, records: Sequence[int]) -> Iterator[bytes]:
        """Yield the secret seed of each record of step ``step``."""
        return self._stream.record_seeds(step, records)

    def rows(self, step: int) -> Tensor:
        """Numbers of the rows that step ``step`` uses, ascending; possibly none."""
        coins = self._stream.uniforms("sampling", step, self._thresholds.size)
        return torch.from_numpy(np.flatnonzero(coins < self._thresholds))


def draw(data: Data, sampler: PoissonSampler, position: int, token: int) -> Batch:
    """Fetch exactly the rows drawn for ``position``."""
    rows = sampler.rows(position)
    with seeds(partial(sampler.record_seeds, position)):
        inputs, targets = data.fetch(rows)
    return Batch(inputs, targets, data.group[rows], data.owner[rows], rows, position, token)
