"""Priors: how many records there are of each label, from charged noisy counts or from counts declared public.

A prior enters a per-record loss, or moves a finished model's decisions, as constant offsets: neither changes what a
record can do to a gradient. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.types import PRIOR_KINDS, PriorKind

FLOOR = 2.0
"""Standard deviations of the noise that a count is taken for at least: a label that looks empty gets no huge offset."""
_LEAST = 0.5
"""What a count without noise is taken for at least."""


@dataclass(frozen=True)
class Prior:
    """Counts of records by label: one row for all records, or one row per group.

    ``noise`` is the standard deviation of the noise in every count, 0 where the counts are declared public. With
    several labels per record (``kind`` "each label") the row counts the records that have each label, out of
    ``records``.

    Examples:
      >>> prior = Prior(((5400.0, 500.0, -3.0),), noise=20.0)
      >>> [round(share, 4) for share in prior.shares()[0]]  # the last is taken for 2 standard deviations
      [0.9091, 0.0842, 0.0067]
    """

    counts: tuple[tuple[float, ...], ...]
    noise: float = 0.0
    kind: PriorKind = "labels"
    records: int = 0

    def __post_init__(self) -> None:
        _validate.known(self.kind, PRIOR_KINDS, "kind of prior")
        widths = {len(row) for row in self.counts}
        if len(widths) != 1 or not all(math.isfinite(count) for row in self.counts for count in row):
            raise UsageError("A prior needs one finite count per label, in rows of equal length.")
        if self.kind == "each label" and self.records < 1:
            raise UsageError("With several labels per record a prior needs the number of records: records=.")
        _validate.number(self.noise, "noise", low=0, open_low=False)

    @classmethod
    def declared(cls, counts: Sequence[float] | Mapping[Any, float]) -> Prior:
        """Return the prior of counts, or shares, that are publicly known, one per label in the order of the labels.

        Examples:
          >>> Prior.declared([90, 10]).shares()
          ((0.9, 0.1),)
        """
        values = list(counts.values()) if isinstance(counts, Mapping) else list(counts)
        numbers = [_validate.number(value, "a count", low=0, open_low=False) for value in values]
        total = sum(numbers)
        if len(numbers) < 2 or total <= 0:
            raise UsageError("Give one count per label, at least two labels, and not all of them 0.")
        scale = 1.0 if total > 1.5 else 1e6  # shares: far enough above the floor of a count
        return cls((tuple(number * scale for number in numbers),))

    @property
    def labels(self) -> int:
        """Return the number of labels."""
        return len(self.counts[0])

    def floored(self) -> tuple[tuple[float, ...], ...]:
        """Return the counts, each at least ``FLOOR`` standard deviations of its noise."""
        least = max(FLOOR * self.noise, _LEAST)
        most = self.records - least if self.kind == "each label" else math.inf
        return tuple(tuple(max(least, min(count, max(most, least))) for count in row) for row in self.counts)

    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Return the share of each label: within its row, or of all records where a record may have several."""
        rows = self.floored()
        totals = [self.records if self.kind == "each label" else sum(row) for row in rows]
        return tuple(
            tuple(min(count / total, 1 - 1e-9) for count in row) for row, total in zip(rows, totals, strict=True)
        )

    def offsets(self) -> tuple[tuple[float, ...], ...]:
        """Return what a model's logits owe to the prior: log shares, or log odds where a record may have several.

        Examples:
          >>> [round(offset, 3) for offset in Prior.declared([90, 10]).offsets()[0]]
          [-0.105, -2.303]
        """
        if self.kind == "each label":
            return tuple(tuple(math.log(share / (1 - share)) for share in row) for row in self.shares())
        return tuple(tuple(math.log(share) for share in row) for row in self.shares())

    def pooled(self) -> Prior:
        """Return the prior of the labels without regard to groups; the noise of a sum over groups adds up."""
        if len(self.counts) == 1:
            return self
        sums = tuple(math.fsum(column) for column in zip(*self.counts, strict=True))
        return Prior((sums,), self.noise * math.sqrt(len(self.counts)), "labels")
