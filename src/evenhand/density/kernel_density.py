"""Gaussian kernel densities in log space, in chunks: no matrix of all pairs is ever kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand import _validate
from evenhand.errors import UsageError

ROWS = 512
POINTS = 4096
"""Pairs of so many queries and points are looked at together."""


def log_density(queries: Tensor, points: Tensor, variance: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Compute ``log mean_i N(query; point_i, variance_i I)`` for every query; minus infinity without points.

    Densities in 64 dimensions lie far outside of what floats can hold, so everything is added up as logarithms.

    Args:
      queries: (Q, p).
      points: (n, p).
      variance: one for all points, or one per point: the adaptive kernel of paper 002.
      weights: how much each point counts, not negative, in place of 1; divided by their sum.

    Examples:
      >>> at = torch.zeros(1, 1)
      >>> round(log_density(at, torch.tensor([[0.0]]), 1.0).exp().item(), 4)
      0.3989
    """
    spread = torch.as_tensor(variance, dtype=queries.dtype, device=queries.device).expand(len(points))
    given = torch.ones(len(points), dtype=queries.dtype) if weights is None else weights.to(queries.dtype)
    constant = torch.log(given / given.sum()) - 0.5 * points.shape[1] * torch.log(2 * math.pi * spread)
    if not len(points):
        return torch.full((len(queries),), -math.inf, dtype=queries.dtype)
    return torch.cat([_log_sum(part, points, spread, constant) for part in torch.split(queries, ROWS)])


def _log_sum(queries: Tensor, points: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    total = torch.full((len(queries),), -math.inf, dtype=queries.dtype)
    parts = zip(*(torch.split(column, POINTS) for column in (points, variance, constant)), strict=True)
    for some, spread, known in parts:
        total = torch.logaddexp(total, torch.logsumexp(known - squared(queries, some) / (2 * spread), dim=1))
    return total


def squared(one: Tensor, two: Tensor) -> Tensor:
    """Compute the squared distances of every row of one to every row of the other, never negative.

    Examples:
      >>> squared(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])).item()
      25.0
    """
    lengths = one.square().sum(1, keepdim=True) + two.square().sum(1)
    return torch.addmm(lengths, one, two.T, alpha=-2.0).clamp(min=0.0)


NEAR = 1e-3
"""Neighbours nearer than this part of the bandwidth count as that far: equal records would be infinitely dense."""


@dataclass(frozen=True)
class Bandwidth:
    """The adaptive kernel of paper 002: a base bandwidth, and an extra one where the data are sparse.

    The density at a record is 1 / (mean distance to its ``k`` nearest neighbours). Where it is below the ``quantile``
    over all records (the threshold lambda), the kernel's variance is ``h^2 + (h c / density)^2``, elsewhere ``h^2``.
    The paper takes lambda from distances and tests it as a density; we use the density throughout. It gives no c:
    ``extra`` is c in units of lambda, so that 1 doubles the variance at the threshold.

    Examples:
      >>> Bandwidth(h=0.5, k=1).variances(torch.tensor([[0.0], [1.0], [2.0], [6.0]]))
      tensor([0.2500, 0.2500, 0.2500, 4.2500])
    """

    h: float = 1.0
    k: int = 5
    quantile: float = 0.5
    extra: float = 1.0

    def __post_init__(self) -> None:
        _validate.number(self.h, "h", low=0)
        _validate.whole(self.k, "k")
        _validate.number(self.quantile, "quantile", low=0, high=1, open_low=False)
        _validate.number(self.extra, "extra", low=0, open_low=False)

    def variances(self, points: Tensor, among: Tensor | None = None) -> Tensor:
        """Return one kernel variance per record; the neighbours come from ``among``, by default the records."""
        density = 1 / mean_distances(points, self.k, among).clamp(min=NEAR * self.h)
        threshold = torch.quantile(density, self.quantile)
        wider = torch.where(density < threshold, self.extra * threshold / density, 0.0)
        return self.h**2 * (1 + wider.square())


def mean_distances(points: Tensor, k: int, among: Tensor | None = None) -> Tensor:
    """Compute the mean distance of every record to its k nearest neighbours, itself not counted.

    Examples:
      >>> mean_distances(torch.tensor([[0.0], [1.0], [3.0]]), 1)
      tensor([1., 1., 2.])
    """
    others = points if among is None else among
    self_count = 1 if among is None else 0
    if len(others) < k + self_count:
        raise UsageError(f"{k} neighbours need at least {k + self_count} records: pass a smaller k, or more records.")
    means = []
    for start in range(0, len(points), ROWS):
        here = points[start : start + ROWS]
        nearest = torch.full((len(here), k), torch.inf, dtype=points.dtype)
        for begin in range(0, len(others), POINTS):
            far = squared(here, others[begin : begin + POINTS])
            if self_count:
                same = torch.arange(start, start + len(here)).unsqueeze(1) == torch.arange(begin, begin + far.shape[1])
                far = far.masked_fill(same, torch.inf)
            nearest = torch.cat([nearest, far], dim=1).topk(k, largest=False).values
        means.append(nearest.sqrt().mean(1))
    return torch.cat(means)


def histograms(
    points: Tensor, labels: Tensor, k: int = 5, bins: int = 30
) -> tuple[NDArray[np.float64], Mapping[int, NDArray[np.int64]]]:
    """Return Figure 1 of paper 002: bin edges, and by class the number of records per mean distance to k neighbours.

    Made of raw records: for research on public data, not for sharing.

    Examples:
      >>> edges, counts = histograms(torch.arange(12.0).unsqueeze(1) ** 2, torch.arange(12) % 2, k=2, bins=4)
      >>> len(edges), sum(int(column.sum()) for column in counts.values())
      (5, 12)
    """
    classes = torch.unique(labels).tolist()
    distances = {label: mean_distances(points[labels == label], k).numpy() for label in classes}
    edges = np.histogram_bin_edges(np.concatenate(list(distances.values())), bins=bins)
    return edges, {label: np.histogram(values, bins=edges)[0] for label, values in distances.items()}
