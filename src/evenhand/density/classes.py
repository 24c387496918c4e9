"""One density per class: which class is most likely to have produced a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenhand.density.kernels import log_density
from evenhand.density.neighbours import Bandwidth


@dataclass(frozen=True)
class ClassDensities:
    """Kernel densities of classes, kept as points with a variance each. Not private by itself: it stores its points.

    Examples:
      >>> points, labels = torch.tensor([[0.0], [0.1], [4.0], [4.1]]), torch.tensor([0, 0, 1, 1])
      >>> made = ClassDensities.of(points, labels, 2, Bandwidth(h=0.5, k=1))
      >>> made.log_densities(torch.tensor([[0.2], [3.0]])).argmax(1)
      tensor([0, 1])
    """

    points: tuple[Tensor, ...]
    variances: tuple[Tensor, ...]

    @classmethod
    def of(cls, points: Tensor, labels: Tensor, classes: int, bandwidth: Bandwidth) -> ClassDensities:
        """The points of each class, with bandwidths from how sparse the whole set is around them."""
        variances = bandwidth.variances(points)
        rows = [labels == label for label in range(classes)]
        return cls(tuple(points[mine] for mine in rows), tuple(variances[mine] for mine in rows))

    def log_densities(self, queries: Tensor) -> Tensor:
        """(Q, classes): ``log p_j(query)``."""
        columns = [log_density(queries, *pair) for pair in zip(self.points, self.variances, strict=True)]
        return torch.stack(columns, dim=1)


def auc_by_class(scores: Tensor, labels: Tensor) -> list[float]:
    """ROC-AUC of each class against all others (Mann-Whitney, ties halved); NaN where a class or its rest is empty.

    ``labels`` are class numbers, or one column of 0 and 1 per class where a record may have several.

    Examples:
      >>> auc_by_class(torch.tensor([[2.0, 0.0], [1.0, 1.5], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
      [1.0, 0.5]
    """
    return [_auc(scores[:, j], labels == j if labels.dim() == 1 else labels[:, j] > 0) for j in range(scores.shape[1])]


def _auc(score: Tensor, mine: Tensor) -> float:
    hits, misses = int(mine.sum()), int((~mine).sum())
    if not hits or not misses:
        return float("nan")
    _, place, counts = torch.unique(score, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts.double() - 1) / 2)[place]
    return float((ranks[mine].sum() - hits * (hits + 1) / 2) / (hits * misses))


def probabilities(log_densities: Tensor, priors: Sequence[float] | None = None) -> Tensor:
    """Class probabilities from log densities; equal priors unless given.

    Examples:
      >>> probabilities(torch.tensor([[0.0, 0.0]]), [0.75, 0.25])
      tensor([[0.7500, 0.2500]])
    """
    known = torch.zeros(log_densities.shape[1]) if priors is None else torch.tensor(priors).log()
    return torch.softmax(torch.nan_to_num(log_densities + known.to(log_densities), neginf=-1e300), dim=1)
