"""Gaussian kernel densities in log space, in chunks: no matrix of all pairs is ever kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 512
POINTS = 4096
"""Pairs of so many queries and points are looked at together."""


def log_density(queries: Tensor, points: Tensor, variance: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """``log mean_i N(query; point_i, variance_i I)`` for every query; minus infinity where there are no points.

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
    """Squared distances of every row of one to every row of the other, never negative.

    Examples:
      >>> squared(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])).item()
      25.0
    """
    lengths = one.square().sum(1, keepdim=True) + two.square().sum(1)
    return torch.addmm(lengths, one, two.T, alpha=-2.0).clamp(min=0.0)
