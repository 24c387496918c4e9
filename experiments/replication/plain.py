"""A second, plain training loop: NumPy alone, nothing of evenhand but its accountant (and readers of public files).

Linear models with a softmax. Poisson sampling, clipping, noise, momentum and averages are written out here anew, from
docs/ and the papers, so that a fault of the library's own steps would show as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Rule = Callable[[Floats, Floats, NDArray[np.int64], np.random.Generator], tuple[Floats, float]]
"""Norms, losses and numbers of the drawn records -> their weights, and the standard deviation of the noise."""


@dataclass(frozen=True)
class Descent:
    """How a model is trained. ``falling`` rates fall to zero in a line; ``decay`` is that of the average, 0 for "
    "none.
    """

    batch: float
    steps: int
    rate: float
    momentum: float = 0.9
    falling: bool = True
    decay: float = 0.9


def train(
    inputs: Floats, targets: NDArray[np.int64], labels: int, chances: Floats, rule: Rule, how: Descent, seed: int
) -> Floats:
    """Return weights with biases in the last column. Record i is drawn with chance ``chances[i]`` at every step."""
    random = np.random.default_rng(seed)
    rows = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    weights, speed = np.zeros((labels, rows.shape[1])), np.zeros((labels, rows.shape[1]))
    mean = weights.copy()
    for step in range(how.steps):
        drawn = np.flatnonzero(random.random(len(rows)) < chances)
        some, truth = rows[drawn], targets[drawn]
        logits = some @ weights.T
        logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        slopes = np.exp(logs)
        slopes[np.arange(len(drawn)), truth] -= 1
        norms = np.linalg.norm(slopes, axis=1) * np.linalg.norm(some, axis=1)
        scale, std = rule(norms, -logs[np.arange(len(drawn)), truth], drawn, random)
        total = (slopes * scale[:, None]).T @ some + std * random.standard_normal(weights.shape)
        speed = how.momentum * speed + total / how.batch
        weights = weights - how.rate * ((how.steps - step) / how.steps if how.falling else 1.0) * speed
        keep = min(how.decay, (1 + step) / (10 + step)) if how.decay else 0.0
        mean = keep * mean + (1 - keep) * weights
    return mean


def clip(bound: float, std: float) -> Rule:
    """Return DP-SGD's rule."""
    return lambda norms, losses, drawn, random: (np.minimum(1.0, bound / norms), std)


def digits() -> tuple[Floats, NDArray[np.int64]]:
    """Return all digits of scikit-learn, centred in the row and of length 3, and their labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    centred = bunch.data - bunch.data.mean(axis=1, keepdims=True)
    return 3.0 * centred / np.linalg.norm(centred, axis=1, keepdims=True), bunch.target.astype(np.int64)


def divided(groups: NDArray[np.int64], random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of training and held-out records, a fifth of every group."""
    members = [random.permutation(np.flatnonzero(groups == group)) for group in range(int(groups.max()) + 1)]
    test = np.concatenate([rows[: len(rows) // 5] for rows in members])
    train = np.concatenate([rows[len(rows) // 5 :] for rows in members])
    return train, test


@dataclass(frozen=True)
class Outcome:
    """A mean over replicas in points, with its 95 % interval."""

    mean: float
    low: float
    high: float
    replicas: int

    def overlaps(self, other: Outcome) -> bool:
        """Return whether both intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def outcome(values: Sequence[float], ratio: float) -> Outcome:
    """Return the mean with the interval of Nadeau and Bengio; ``ratio`` is held-out over training records."""
    found, count = np.array(values), len(values)
    half = stats.t.ppf(0.975, count - 1) * math.sqrt((1 / count + ratio) * found.var(ddof=1))
    return Outcome(float(found.mean()), float(found.mean() - half), float(found.mean() + half), count)
