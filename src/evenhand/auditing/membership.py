"""Guess membership by the likelihood ratio of Carlini et al. (2022), and measure how well such guesses do.

Everything works on losses: one row per model, one column per record. Some models, the shadows, show which losses a
record has when it is in and when it is out; others, the targets, are attacked. No target takes part in what it is
compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, t

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]
ALARMS = (0.001, 0.01, 0.1)
"""Rates of false alarms at which hits are reported."""
_CURVE = np.geomspace(1e-3, 1.0, 31)
_LEAST_LOSS, _LEAST_SPREAD = 1e-12, 1e-6
_OWN_SPREAD = 64
"""Shadows from which on each record has a variance of its own; with fewer, records share one (Carlini et al.)."""
_LEVEL = 0.95


def confidence_of(losses: Vector) -> Vector:
    """Return the log odds of the right answer where the loss is -log p: about Gaussian over trainings of one record.

    Losses below zero are no such logarithms; then their negatives are returned. What is not finite becomes the median.

    Examples:
      >>> confidence_of(np.array([[math.log(4), math.log(4 / 3)]])).round(6).tolist()  # p = 1/4 and 3/4
      [[-1.098612, 1.098612]]
    """
    if np.nanmin(losses) < 0:
        odds = -losses
    else:
        clipped = np.clip(losses, _LEAST_LOSS, None)
        odds = np.where(clipped > 30, -clipped, -np.log(np.expm1(np.minimum(clipped, 30.0))))
    usable = np.isfinite(odds)
    return np.where(usable, odds, np.median(odds[usable]) if usable.any() else 0.0)


def membership_scores(shadows: Vector, present: Mask, targets: Vector, *, online: bool) -> Vector:
    """Return a score for every record of every target model, high for "in".

    Args:
      shadows: confidences of the shadow models, (models, records).
      present: which records each of them was trained on.
      targets: confidences of the target models.
      online: compare with shadows that have the record and with those that lack it; else with the latter alone, as an
        attacker must who learns of a record only after the shadows were trained.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> coins = rng.random((100, 1)) < 0.5
      >>> scores = membership_scores(rng.normal(2.0 * coins), coins, np.array([[0.0], [2.0]]), online=True)
      >>> bool(scores[0, 0] < 0 < scores[1, 0])
      True
    """
    out = _Gaussians.of(shadows, ~present)
    if not online:
        return (targets - out.mean) / out.spread
    return _Gaussians.of(shadows, present).log_density(targets) - out.log_density(targets)


@dataclass(frozen=True)
class _Gaussians:
    """Mean and standard deviation of every record's confidences."""

    mean: Vector
    spread: Vector

    @classmethod
    def of(cls, confidences: Vector, chosen: Mask) -> _Gaussians:
        count = np.maximum(chosen.sum(0), 1)
        mean = np.where(chosen, confidences, 0.0).sum(0) / count
        square = np.where(chosen, (confidences - mean) ** 2, 0.0).sum(0)
        variance = square / np.maximum(count - 1, 1)
        if len(confidences) < _OWN_SPREAD:
            variance = np.full_like(variance, square.sum() / max(1, int((count - 1).sum())))
        return cls(mean, np.sqrt(np.maximum(variance, _LEAST_SPREAD**2)))

    def log_density(self, values: Vector) -> Vector:
        distance = (values - self.mean) / self.spread
        return np.asarray(-np.log(self.spread) - distance**2 / 2)


def auc(scores: Vector, present: Mask) -> float:
    """Return the chance that a record that is in scores higher than one that is out, ties halved; NaN if one is none.

    Examples:
      >>> auc(np.array([3.0, 1.0, 2.0]), np.array([True, False, False])), auc(np.zeros(2), np.array([True, False]))
      (1.0, 0.5)
    """
    inside = int(present.sum())
    outside = present.size - inside
    if not inside or not outside:
        return math.nan
    ranks = rankdata(scores)
    return float((ranks[present].sum() - inside * (inside + 1) / 2) / (inside * outside))


def blind_auc_interval(inside: int, outside: int) -> tuple[float, float]:
    """Return where the AUC of a blind attacker on one model lies in 95 of 100 cases (Mann-Whitney).

    Examples:
      >>> [round(end, 3) for end in blind_auc_interval(1000, 1000)]
      [0.475, 0.525]
    """
    width = 1.96 * math.sqrt((inside + outside + 1) / (12 * max(1, inside) * max(1, outside)))
    return 0.5 - width, 0.5 + width


@dataclass(frozen=True)
class Mean:
    """A mean over target models with its 95 % interval; trainings are independent, records of one model are not."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of the values that are numbers.

        Examples:
          >>> Mean.of([0.4, 0.6, math.nan]).value
          0.5
        """
        known = np.array([value for value in values if not math.isnan(value)])
        if not known.size:
            return cls(math.nan, math.nan, math.nan)
        value = float(known.mean())
        if known.size < 2:
            return cls(value, -math.inf, math.inf)
        width = float(t.ppf((1 + _LEVEL) / 2, known.size - 1) * known.std(ddof=1) / math.sqrt(known.size))
        return cls(value, value - width, value + width)

    def to_json(self) -> list[float | None]:
        """Return value, low and high; None for what is no finite number."""
        return [number if math.isfinite(number) else None for number in (self.value, self.low, self.high)]


@dataclass(frozen=True)
class Leak:
    """How well guesses do on some of the records.

    Attributes:
      records: how many.
      auc: mean over the target models.
      hits: the rate of hits by the wanted rate of false alarms; missing where too few records are out to tell.
      curve: (false alarms, hits) that thresholds of other target models lead to.
    """

    records: int
    auc: Mean
    hits: dict[float, Mean]
    curve: list[tuple[float, float]]

    @classmethod
    def of(cls, scores: Vector, present: Mask) -> Leak:
        """Measure scores of target models, (models, records).

        Half of the models choose thresholds, the others are counted.

        Examples:
          >>> rng = np.random.default_rng(0)
          >>> coins = rng.random((20, 400)) < 0.5
          >>> leak = Leak.of(rng.normal(coins * 2.0), coins)
          >>> 0.9 < leak.auc.value < 0.94, leak.hits[0.1].value > 0.5
          (True, True)
        """
        half = len(scores) // 2
        outside = np.sort(scores[:half][~present[:half]])
        counted, inside = scores[half:], present[half:]

        def rates(alarms: float) -> tuple[list[float], float, float]:
            place = min(len(outside) - 1, math.floor((1 - alarms) * len(outside)))
            flagged = counted > outside[place] if alarms < 1 else np.ones_like(inside)
            hits = [
                float(row[coins].mean()) if coins.any() else math.nan
                for row, coins in zip(flagged, inside, strict=True)
            ]
            return hits, float(flagged[~inside].mean()), float(flagged[inside].mean())

        known = [alarms for alarms in ALARMS if len(outside) * alarms >= 10]
        curve = [rates(float(alarms))[1:] for alarms in _CURVE if len(outside) * alarms >= 10]
        return cls(
            scores.shape[1],
            Mean.of([auc(row, coins) for row, coins in zip(scores, present, strict=True)]),
            {alarms: Mean.of(rates(alarms)[0]) for alarms in known},
            [(alarms, hits) for alarms, hits in curve],
        )

    def to_json(self) -> dict[str, object]:
        """Return the figures as JSON can carry them."""
        return {
            "records": self.records,
            "auc": self.auc.to_json(),
            "tpr_at_fpr": {f"{alarms:g}": mean.to_json() for alarms, mean in self.hits.items()},
            "curve": [[round(alarms, 6), round(hits, 6)] for alarms, hits in self.curve],
        }
