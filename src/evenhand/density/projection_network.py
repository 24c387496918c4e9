"""The projection network of paper 002 and its loss: classes apart by a margin of log density. Not private."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from evenhand.density.kernel_density import squared

MARGIN = 10.0


def contrastive_loss(
    batch: Tensor, labels: Tensor, points: Tensor, known: Tensor, variance: Tensor, margin: float = MARGIN
) -> Tensor:
    """Compute ``max(-log p_y(x) + log p_not_y(x) + m, 0)`` for every record of a batch.

    Gradients flow through the batch and through the points.

    A record does not count as its own neighbour: where a point is the same as a batch record it is left out.

    Args:
      batch: projected records, (B, p).
      labels: their classes.
      points: projected records that make up the densities, (n, p).
      known: their classes.
      variance: kernel variance per point.
      margin: m of the paper.

    Examples:
      >>> points, known = torch.tensor([[0.0], [9.0]]), torch.tensor([0, 1])
      >>> contrastive_loss(torch.tensor([[0.5]]), torch.tensor([0]), points, known, torch.ones(2)).item()
      0.0
    """
    far = squared(batch, points)
    kernel = -far / (2 * variance) - 0.5 * points.shape[1] * torch.log(2 * math.pi * variance)
    same = (labels.unsqueeze(1) == known) & (far > 0)
    other = labels.unsqueeze(1) != known
    return torch.relu(_log_mean(kernel, other) - _log_mean(kernel, same) + margin)


def _log_mean(kernel: Tensor, chosen: Tensor) -> Tensor:
    floor = torch.finfo(kernel.dtype).min / 4
    total = torch.logsumexp(kernel.masked_fill(~chosen, floor), dim=1)
    return total - chosen.sum(1).clamp(min=1).to(kernel.dtype).log()


def train_projection(
    features: Tensor,
    labels: Tensor,
    *,
    dimension: int = 64,
    h: float = 1.0,
    margin: float = MARGIN,
    epochs: int = 20,
    batch: int = 256,
    points: int = 2048,
    lr: float = 1e-2,
    seed: int = 0,
) -> Tensor:
    """Train the matrix W (features, dimension) on the loss above and raw records: NOT private.

    Starts from random orthogonal directions. The densities of a step are made of up to ``points`` drawn records.

    Examples:
      >>> generator = torch.Generator().manual_seed(0)
      >>> features, labels = torch.randn(60, 8, generator=generator), torch.arange(60) % 2
      >>> train_projection(features, labels, dimension=4, epochs=1).shape
      torch.Size([8, 4])
    """
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(orthogonal(features.shape[1], dimension, generator).to(features.dtype))
    optimizer = torch.optim.Adam([weight], lr=lr)
    variance = torch.full((1,), h**2, dtype=features.dtype)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(features), generator=generator), batch):
            drawn = torch.randperm(len(features), generator=generator)[:points]
            around = features[drawn] @ weight, labels[drawn], variance.expand(len(drawn))
            losses = contrastive_loss(features[rows] @ weight, labels[rows], *around, margin)
            optimizer.zero_grad()
            torch.autograd.backward(losses.mean())
            optimizer.step()
    return weight.detach()


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw random orthonormal columns, at most as many as there are rows; equal generators give equal columns.

    Examples:
      >>> basis = orthogonal(6, 3, torch.Generator().manual_seed(0))
      >>> bool(torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6))
      True
    """
    basis: Tensor = torch.linalg.qr(torch.randn(rows, min(rows, columns), generator=generator))[0]
    return basis
