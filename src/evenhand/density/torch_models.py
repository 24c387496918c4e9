"""The released models as torch modules: raw features in, one log score per class out. They hold private values only."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evenhand.density.kernel_density import squared
from evenhand.density.private_features import Embedding, Features
from evenhand.errors import UsageError

ROWS, POINTS = 128, 2048
"""Pairs of so many queries and released rows are looked at together: what they need fits the cache."""


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.float().contiguous(), requires_grad=False)


class DensityModel(nn.Module):
    """Base of all released densities: the embedding, and log scores in chunks."""

    log_densities = True
    """Its outputs are log densities of classes, up to a constant that they share: each is compared with the rest."""
    sketch: nn.Parameter | None
    mean: nn.Parameter | None
    matrix: nn.Parameter | None

    def __init__(self, width: int, embedding: Embedding) -> None:
        super().__init__()
        self.width = width
        for name in ("sketch", "mean", "matrix"):
            value = getattr(embedding, name)
            self.register_parameter(name, None if value is None else _fixed(value))

    def embedded(self, inputs: Tensor) -> Tensor:
        """Return the rows in the space of the density."""
        return Embedding(self.sketch, self.mean, self.matrix)(inputs.flatten(1).float()).float()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return log scores, (rows, classes)."""
        return torch.cat([self.log_scores(part) for part in torch.split(inputs, ROWS)])

    @abstractmethod
    def log_scores(self, inputs: Tensor) -> Tensor:
        """Return log densities of the classes for a chunk of rows, up to a constant that they share."""


class RandomFeatureModel(DensityModel):
    """``z(x) S_c / max(n_c, 1)``: the noisy kernel density of class c at x."""

    def __init__(self, width: int, embedding: Embedding, features: Features, sums: Tensor, counts: Tensor) -> None:
        super().__init__(width, embedding)
        self.h = features.h
        self.frequencies = _fixed(features.frequencies)
        self.centres = _fixed(sums / counts.clamp(min=1.0).unsqueeze(1))
        self.counts = _fixed(counts)

    def log_scores(self, inputs: Tensor) -> Tensor:
        """Return log scores from one product per row, however many records were fitted."""
        return _log(Features(self.frequencies, self.h)(self.embedded(inputs)) @ self.centres.T)


class MomentModel(DensityModel):
    """A Gaussian per class around its noisy mean, all of the spread that the noisy second moments show."""

    def __init__(self, width: int, embedding: Embedding, means: Tensor) -> None:
        super().__init__(width, embedding)
        self.means = _fixed(means)

    def log_scores(self, inputs: Tensor) -> Tensor:
        """Return minus half the squared distance to each class mean."""
        return -0.5 * squared(self.embedded(inputs), self.means)


class NoisyEmbeddingModel(DensityModel):
    """Kernel densities over released noisy rows; each row counts for class c by its noisy label.

    ``log_weights`` say how much a row counts (rows of strict owners carry more noise); labels are unbiased, so they can
    be negative and still add up to the right thing.
    """

    def __init__(
        self, width: int, embedding: Embedding, points: Tensor, labels: Tensor, variance: Tensor, log_weights: Tensor
    ) -> None:
        super().__init__(width, embedding)
        self.points, self.labels = _fixed(points), _fixed(labels)
        self.variance, self.log_weights = _fixed(variance), _fixed(log_weights)

    def log_scores(self, inputs: Tensor) -> Tensor:
        """Return the log of class densities over the density of all rows: finite in any dimension."""
        rows = self.embedded(inputs)
        top = torch.full((len(rows), 1), -math.inf)
        sums, mass = torch.zeros(len(rows), self.labels.shape[1]), torch.zeros(len(rows), 1)
        columns = (self.points, self.labels, self.variance, self.log_weights)
        for points, labels, variance, weight in zip(*(torch.split(part, POINTS) for part in columns), strict=True):
            exponent = weight - squared(rows, points) / (2 * variance)
            higher = torch.maximum(top, exponent.max(1, keepdim=True).values)
            kernel, shrink = torch.exp(exponent - higher), torch.exp(top - higher)
            sums, mass, top = sums * shrink + kernel @ labels, mass * shrink + kernel.sum(1, keepdim=True), higher
        share = (torch.exp(self.log_weights).unsqueeze(1) * self.labels).sum(0).clamp(min=1e-3)
        return _log(sums / mass * (share.sum() / share))


def _log(scores: Tensor) -> Tensor:
    """Return the log of densities; one that noise made negative counts as 1e-12."""
    return scores.clamp(min=1e-12).log()


def rebuilt(tensors: Mapping[str, Tensor]) -> DensityModel:
    """Return the model that has these parameters.

    Examples:
      >>> import torch
      >>> model = MomentModel(3, Embedding(None, torch.zeros(3), torch.eye(3)), torch.eye(2, 3))
      >>> again = rebuilt(model.state_dict())
      >>> bool((again(torch.ones(1, 3)) == model(torch.ones(1, 3))).all())
      True
    """
    try:
        model = _shell(tensors)
        model.load_state_dict(dict(tensors))
    except (KeyError, RuntimeError, IndexError):
        raise UsageError("The saved tensors are not those of a density: the model file was exchanged.") from None
    return model


def _shell(tensors: Mapping[str, Tensor]) -> DensityModel:
    embedding = Embedding(*(tensors.get(name) for name in ("sketch", "mean", "matrix")))
    first = [tensors[name].shape[0] for name in ("sketch", "mean", "matrix", "frequencies") if name in tensors]
    if "frequencies" in tensors:
        features = Features(tensors["frequencies"], 1.0)
        return RandomFeatureModel(first[0], embedding, features, tensors["centres"], tensors["counts"])
    if "means" in tensors:
        return MomentModel(first[0], embedding, tensors["means"])
    width = first[0] if first else tensors["points"].shape[1]
    rows = (tensors[name] for name in ("points", "labels", "variance", "log_weights"))
    return NoisyEmbeddingModel(width, embedding, *rows)
