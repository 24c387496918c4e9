"""``PublishedSmoothing``: paper 002 as it is printed, for study. No guarantee is established for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand import _validate
from evenhand.density.base_estimator import ADD_REMOVE
from evenhand.density.base_estimator import SpentPrivacy as Promised
from evenhand.density.classifier import DensityClassifier, checked
from evenhand.density.kernel_density import Bandwidth, log_density
from evenhand.density.noisy_sums import as_data
from evenhand.density.projection_network import MARGIN, train_projection
from evenhand.errors import UsageError

WHY = (
    "The method is that of paper 002. Its theorem 1 adds noise in proportion to a record's own influence on the "
    "density, a number that depends on the data, to features that nothing bounds; the sensitivity drops out of its "
    "proof, which looks at one order of divergence only.",
    "The projection is trained on raw records, and the classifier stores its training points.",
    "A membership test breaks the claim: docs/explanation/density.md. Use RandomFeatureDensity, or "
    "NoisyEmbeddingDensity for budgets per record.",
)


class PublishedSmoothing(DensityClassifier):
    """Adaptive kernel densities per class over projected records, with the noise that the paper calls private.

    Frozen features -> projection W (p = 64, trained on the contrastive loss) -> one density per class with a wider
    kernel in sparse places -> noise of standard deviation ``s_i sigma`` on each projected record, where
    ``s_i = K(0) / n`` is the paper's local sensitivity at the record and ``sigma = sqrt(2 ln(1/delta) / rho)``.

    Args:
      rho: the paper's privacy parameter; it decides the noise and guarantees nothing.
      delta: the paper's delta, likewise.
      allow_unproven: must be True: you know that this protects nobody.
      dimension: p.
      h: base bandwidth. At p = 64 the paper's noise is about 1e-30 for h = 1 and about 1e+34 for h = 0.1.
      k: neighbours that tell how sparse a place is.
      quantile: threshold lambda as a quantile of densities (paper: median or 75th percentile of distances).
      extra: c in units of lambda; the paper gives none.
      margin: m of the loss.
      epochs: passes of the projection's training; 0 keeps random directions.
      lr: its learning rate (ours).
      classes: names of the classes.
      seed: everything random in here, the noise too: there is no privacy to lose.

    Examples:
      >>> generator = np.random.default_rng(0)
      >>> y = generator.integers(0, 2, 200)
      >>> X = generator.normal(size=(200, 8)) + 2 * y[:, None]
      >>> fitted = PublishedSmoothing(allow_unproven=True, dimension=4, epochs=2).fit(X, y)
      >>> bool(fitted.score(X, y) > 0.9), fitted.privacy_.epsilon, fitted.privacy_.guarantee
      (True, None, 'not established')
    """

    def __init__(
        self,
        *,
        rho: float = 1.0,
        delta: float = 1e-5,
        allow_unproven: bool = False,
        dimension: int = 64,
        h: float = 1.0,
        k: int = 5,
        quantile: float = 0.5,
        extra: float = 1.0,
        margin: float = MARGIN,
        epochs: int = 20,
        lr: float = 1e-2,
        classes: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.rho, self.delta, self.allow_unproven = rho, delta, allow_unproven
        self.dimension, self.h, self.k, self.quantile, self.extra = dimension, h, k, quantile, extra
        self.margin, self.epochs, self.lr, self.classes, self.seed = margin, epochs, lr, classes, seed

    def fit(self, X: Any, y: Any = None) -> PublishedSmoothing:
        """Project, smooth and store the records, as published."""
        if self.allow_unproven is not True:
            raise UsageError(
                "No guarantee is established for PublishedSmoothing (paper 002): pass allow_unproven=True to study it "
                "without an epsilon, or use RandomFeatureDensity, which is private."
            )
        X, y = checked(self, X, y)
        data, names = as_data(X, y, classes=self.classes)
        features, labels = data.fetch(torch.arange(len(data)))
        if labels.dim() != 1:
            raise UsageError("The published form knows one class per record: pass one column of labels.")
        features = features.flatten(1).double()
        self.projection_ = train_projection(
            features,
            labels,
            dimension=self.dimension,
            h=self.h,
            margin=self.margin,
            epochs=self.epochs,
            lr=self.lr,
            seed=self.seed,
        )
        generator = torch.Generator().manual_seed(self.seed + 1)
        self.densities_ = self.smoothed(features @ self.projection_, labels, len(names), generator)
        self.classes_, self.n_features_in_ = np.asarray(names), features.shape[1]
        self.privacy_ = Promised("not established", ADD_REMOVE, self.delta, {"all": None}, {"all": None}, WHY)
        return self

    def smoothed(self, projected: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> ClassDensities:
        """Return the densities of projected records after the paper's noise, as its classifier releases them."""
        bandwidth = Bandwidth(self.h, self.k, self.quantile, self.extra)
        spread = self.smoothing_noise(bandwidth.variances(projected), projected.shape[1]).unsqueeze(1)
        noisy = projected + spread * torch.randn(projected.shape, generator=generator).to(projected)
        return ClassDensities.of(noisy, labels, classes, bandwidth)

    def smoothing_noise(self, variances: Tensor, dimension: int) -> Tensor:
        """Return the paper's standard deviation ``s_i sigma`` of every record; ``s_i = K(0) / n`` for its kernel."""
        log_kernel = -0.5 * dimension * torch.log(2 * torch.pi * variances) - math.log(len(variances))
        return torch.exp(log_kernel + math.log(ClaimedFigures(self.rho, self.delta).noise))

    def _log_densities(self, rows: Tensor) -> Tensor:
        return self.densities_.log_densities(rows.double() @ self.projection_)


@dataclass(frozen=True)
class ClassDensities:
    """Kernel densities of classes, stored as points with a variance each. Not private: it stores its points.

    Examples:
      >>> points, labels = torch.tensor([[0.0], [0.1], [4.0], [4.1]]), torch.tensor([0, 0, 1, 1])
      >>> densities = ClassDensities.of(points, labels, 2, Bandwidth(h=0.5, k=1))
      >>> densities.log_densities(torch.tensor([[0.2], [3.0]])).argmax(1)
      tensor([0, 1])
    """

    points: tuple[Tensor, ...]
    variances: tuple[Tensor, ...]

    @classmethod
    def of(cls, points: Tensor, labels: Tensor, classes: int, bandwidth: Bandwidth) -> ClassDensities:
        """Return the densities of each class's points; bandwidths depend on how sparse the whole set is around them."""
        variances = bandwidth.variances(points)
        rows = [labels == label for label in range(classes)]
        return cls(tuple(points[mine] for mine in rows), tuple(variances[mine] for mine in rows))

    def log_densities(self, queries: Tensor) -> Tensor:
        """Return ``log p_j(query)``, (queries, classes)."""
        columns = [log_density(queries, *pair) for pair in zip(self.points, self.variances, strict=True)]
        return torch.stack(columns, dim=1)


def auc_by_class(scores: Tensor, labels: Tensor) -> list[float]:
    """Compute ROC-AUC of each class against all others (Mann-Whitney, ties halved); NaN if either side is empty.

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
    """Return class probabilities from log densities; equal priors unless given.

    Examples:
      >>> probabilities(torch.tensor([[0.0, 0.0]]), [0.75, 0.25])
      tensor([[0.7500, 0.2500]])
    """
    known = torch.zeros(log_densities.shape[1]) if priors is None else torch.tensor(priors).log()
    return torch.softmax(torch.nan_to_num(log_densities + known.to(log_densities), neginf=-1e300), dim=1)


@dataclass(frozen=True)
class ClaimedFigures:
    """The numbers that the paper computes from rho and delta.

    Examples:
      >>> claimed = ClaimedFigures(rho=0.02, delta=1e-5)
      >>> round(claimed.noise, 1), round(claimed.error(margin=10.0), 3), claimed.records(h=1.0, alpha=2.0)
      (33.9, 1.915, 20)
    """

    rho: float
    delta: float

    def __post_init__(self) -> None:
        _validate.number(self.rho, "rho", low=0)
        _validate.delta(self.delta)

    @property
    def noise(self) -> float:
        """Sigma of theorem 1, ``sqrt(2 ln(1/delta)/rho)``; each record multiplies it by its "local sensitivity"."""
        return math.sqrt(2 * math.log(1 / self.delta) / self.rho)

    def records(self, h: float, alpha: float) -> int:
        """Return the sample-size bound of theorem 2: ``1 / (sqrt(2 pi h^2) rho (alpha - 1))``."""
        return math.ceil(1 / (math.sqrt(2 * math.pi * h**2) * self.rho * (alpha - 1)))

    def error(self, margin: float) -> float:
        """Return the error bound of theorem 3: ``2 exp(-m^2 rho / (4 ln(1/delta)))``; above 1 it says nothing."""
        return 2 * math.exp(-(margin**2) * self.rho / (4 * math.log(1 / self.delta)))

    def log_sensitivity(self, dimension: int, h: float, records: int) -> float:
        """Return the log of the paper's largest local sensitivity ``K_h(0) / n``: tiny for h = 1, huge for h = 0.1."""
        return -0.5 * dimension * math.log(2 * math.pi * h**2) - math.log(records)


def rho_of(epsilon: float, delta: float) -> float:
    """Return the rho whose conversion ``rho + 2 sqrt(rho ln(1/delta))`` gives this epsilon.

    Examples:
      >>> rho = rho_of(1.0, 1e-5)
      >>> round(rho + 2 * math.sqrt(rho * math.log(1e5)), 9)
      1.0
    """
    tail = math.log(1 / _validate.delta(delta))
    return (math.sqrt(tail + _validate.number(epsilon, "epsilon", low=0)) - math.sqrt(tail)) ** 2
