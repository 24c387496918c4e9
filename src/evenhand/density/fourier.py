"""Random-feature densities: a record becomes a vector of norm 1 whose class means are kernel densities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.density.chunks import Chunk, chunks
from evenhand.density.moments import Embedding
from evenhand.density.summing import Query, Releases, total


@dataclass(frozen=True)
class Features:
    """``z(t) = m^(-1/2) [cos(t w); sin(t w)]`` with public frequencies w ~ N(0, 1/h^2): ``z(s) z(t)`` is about
    ``exp(-|s - t|^2 / (2 h^2))``, and ``|z| = 1`` for every record.

    ``smoothing`` widens the kernel of a record that lies in a sparse place, as paper 002 wants: z is multiplied by
    ``exp(-h'^2 |w|^2 / 2)`` with ``h' = smoothing * h * max(0, r / sqrt(p) - 1)``, where r is the distance to the
    nearest released class mean. The norm can only fall, and h' depends on the record and on private releases alone.

    Examples:
      >>> features = Features.public(2, 500, 1.0, seed=0)
      >>> z = features(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
      >>> bool((z.norm(dim=1) - 1).abs().max() < 1e-6), abs(float(z[0] @ z[1]) - math.exp(-0.5)) < 0.1
      (True, True)
    """

    frequencies: Tensor
    h: float
    smoothing: float = 0.0
    means: Tensor | None = None

    @classmethod
    def public(
        cls, dimension: int, count: int, h: float, seed: int, smoothing: float = 0.0, means: Tensor | None = None
    ) -> Features:
        """``count`` frequencies from a public seed."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(dimension, count, generator=generator) / h, h, smoothing, means)

    def __call__(self, rows: Tensor) -> Tensor:
        """Of new records: without extra smoothing."""
        angles = rows @ self.frequencies.to(rows.dtype)
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1) / math.sqrt(self.frequencies.shape[1])

    def smoothed(self, rows: Tensor) -> Tensor:
        """Of training records: those in sparse places smoothed more."""
        plain = self(rows)
        if not self.smoothing or self.means is None:
            return plain
        exactly = "donot_use_mm_for_euclid_dist"  # by default more than 25 rows are compared in a cruder way than fewer
        nearest = torch.cdist(rows, self.means.to(rows.dtype), compute_mode=exactly).min(1).values
        extra = self.smoothing * self.h * (nearest / math.sqrt(rows.shape[1]) - 1).clamp(min=0.0)
        damping = torch.exp(-0.5 * extra.square().unsqueeze(1) * self.frequencies.to(rows.dtype).square().sum(0))
        return plain * damping.repeat(1, 2)


def query(share: float, count_weight: float, most_labels: int) -> Query:
    """Class sums and ``k`` times the counts: ``sqrt(L (1 + k^2))`` for up to L labels of a record."""
    return Query("densities", share, math.sqrt(most_labels * (1 + count_weight**2)))


def class_sums(
    data: Data, releases: Releases, embedding: Embedding, features: Features, count_weight: float
) -> tuple[Tensor, Tensor]:
    """Noisy sums of features, (classes, 2 m), and noisy counts, from one release.

    A record with labels y adds ``(z y^T, k y)``, of norm ``|y| sqrt(|z|^2 + k^2)``: every class that it belongs to is
    counted.
    """

    def vector(part: Chunk) -> Tensor:
        made, present = part.usable(features.smoothed(embedding(part.inputs)))
        weights = releases.weights(sum_norms(made, part.labels, count_weight), part.owner) * present
        weighted = part.labels * weights.unsqueeze(1)
        return torch.cat([(weighted.T @ made).reshape(-1), weighted.sum(0) * count_weight])

    noisy = releases.release(total(vector(part) for part in chunks(data)))
    classes = len(data.facts.labels)
    return noisy[:-classes].view(classes, -1), noisy[-classes:] / count_weight


def sum_norms(made: Tensor, labels: Tensor, count_weight: float) -> Tensor:
    """Norm of every record's share in the class sums and counts.

    Examples:
      >>> sum_norms(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), 1.0)  # two labels: sqrt(2 (1 + 1))
      tensor([2.])
    """
    return (labels.square().sum(1) * (made.square().sum(1) + count_weight**2)).sqrt()
