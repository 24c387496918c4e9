"""Release the counts of labels that a prior is made of: once, over all records, with the plan's noise.

Every record adds at most 1 to one count, or a vector of norm at most the sensitivity where it may have several labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.errors import UsageError
from evenhand.mechanism import noise_grid
from evenhand.mechanism.add_noise import Ahead, release_few
from evenhand.mechanism.random_streams import Stream
from evenhand.types import Facts, PriorKind, PriorRow

_ROWS = 4096
_GRAIN = 2.0**20
"""Shares of a label are counted in this many parts, so that float64 adds up all counts exactly."""


@dataclass(frozen=True)
class CountTable:
    """Say how records are counted: rows and columns of the table, and how far one record can move it (L2)."""

    kind: PriorKind
    rows: int
    labels: int

    @classmethod
    def of(cls, kind: PriorKind, facts: Facts) -> CountTable:
        """Return how ``kind`` counts data with these facts."""
        return cls(kind, len(facts.groups) if kind == "labels by group" else 1, len(facts.labels))

    @property
    def sensitivity(self) -> float:
        """Return the largest change of the table by one record: 1, or the root of the labels if it may have all."""
        return math.sqrt(self.labels) if self.kind == "each label" else 1.0

    def count(self, data: Data, numbers: Tensor | None = None) -> NDArray[np.float64]:
        """Return the exact counts over the records of these numbers (default: all), which are secret.

        Records are read in order, each by itself. A label or group outside of the declared ones is not counted. All
        sums are exact, in whatever order.
        """
        total = np.zeros((self.rows, self.labels))
        for rows in torch.split(torch.arange(len(data)) if numbers is None else numbers, _ROWS):
            _, targets = data.fetch(rows)
            total += self._part(targets.detach().cpu(), data.group[rows].cpu())
        return total

    def _part(self, targets: Tensor, group: Tensor) -> NDArray[np.float64]:
        if self.kind == "each label":
            if targets.dim() != 2 or targets.shape[1] != self.labels:
                raise UsageError("Counts of each label need one column of 0 and 1 per label.")
            present = torch.nan_to_num(targets.double()).clamp(0.0, 1.0).mul(_GRAIN).round().sum(0, keepdim=True)
            return np.asarray(present.div(_GRAIN).numpy())
        if targets.is_floating_point() or targets.dim() != 1:
            raise UsageError("Counts of labels need one class per record; with several labels use prior='each label'.")
        row = group if self.rows > 1 else torch.zeros_like(group)
        valid = (targets >= 0) & (targets < self.labels) & (row >= 0) & (row < self.rows)
        cells = (row.long() * self.labels + targets.long())[valid]
        return torch.bincount(cells, minlength=self.rows * self.labels).double().numpy().reshape(self.rows, -1)


def _one_of_each(plan: Plan, stream: Stream, data: Data) -> Tensor | None:
    """Return the number of one record of each person, chosen by words that no step uses; None for data by record."""
    if data.persons is None:
        return None
    everybody = torch.arange(len(data))
    return data.persons.choose(everybody, stream.person_words(plan.steps, everybody.numpy()))


def release_counts(plan: Plan, stream: Stream, data: Data) -> PriorRow:
    """Return the noisy counts that ``plan.prior`` names, with the numbers that the ledger records.

    Guarantee:
      A Gaussian mechanism of the returned sensitivity and standard deviation, over all records at rate 1, adjacency
      add/remove one record (one person, of whom one record is counted): the plan charges it with multiplier
      ``plan.prior.noise``. Call it once in a run: a second call with another stream would be a second release.

    Examples:
      >>> from evenhand.accounting.budgets import Privacy
      >>> from evenhand.data import wrap
      >>> from evenhand.mechanism.make_plan import plan
      >>> data = wrap(torch.zeros(200, 2), [0] * 150 + [1] * 50)
      >>> planned = plan("dpsgd", Privacy(3), data=data.facts, prior="labels")
      >>> row = release_counts(planned, Stream.fresh(), data)
      >>> row.std / row.sensitivity >= planned.prior.noise, len(row.counts[0])
      (True, 2)
    """
    if plan.prior is None:
        raise UsageError("The plan has no prior: eh.plan(..., prior='labels').")
    table = CountTable.of(plan.prior.kind, plan.facts)
    exact = table.count(data.by_record, _one_of_each(plan, stream, data))
    spacing = noise_grid.grid(table.sensitivity)
    covered = noise_grid.charged(table.sensitivity, spacing, exact.size, 1.0)
    std = plan.prior.noise * covered
    noisy = release_few(exact.reshape(-1), std, spacing, Ahead(stream), "prior", 0, 0).reshape(exact.shape)
    return PriorRow(plan.prior.kind, covered, std, tuple(tuple(map(float, row)) for row in noisy))
