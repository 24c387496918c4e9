"""Computes every metric of held-out records from what a model said of each, for all kinds of targets.

Each function equals the one of scikit-learn or fairlearn that its docstring names (the tests compare them), without
their checks of every call: metrics per group are computed at every evaluation. NaN stands for what is not defined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.reporting.held_out.effective_records import FIRST, SECOND, SELECTED
from evenhand.reporting.metrics import CLASSES, LABELS, NUMBERS, ORDINAL, TOKENS

Array = NDArray[Any]
BINS = 15
"""Of equal width, for the calibration error."""
_LEAST = 1e-300

_OF_SEVERAL = ("balanced_accuracy", "mcc", "selection_rate", "tpr", "fpr", "tnr", "precision")
"""Metrics that say nothing of records of a single class among more than two."""


@dataclass(frozen=True)
class Outcomes:
    """Held-out records: the truth about each, and the answer of a model.

    Attributes:
        kind: of the targets: classes, ordinal, labels, numbers or tokens.
        truth: class numbers; 0 and 1 per label; real numbers; of tokens nothing.
        guess: predictions in the same form; of tokens how many of each record are right.
        probabilities: one column per class or label; of numbers and tokens nothing.
        losses: -log probability of the truth, one per record (of labels their mean, of tokens their sum).
        tokens: how many tokens each record has.
        labels: the names of the labels, where a record may have several.
        classes: how many classes there are.
    """

    kind: str
    truth: Array
    guess: Array
    probabilities: Array = field(default_factory=lambda: np.empty((0, 0)))
    losses: Array = field(default_factory=lambda: np.empty(0))
    tokens: Array = field(default_factory=lambda: np.empty(0))
    labels: tuple[str, ...] = ()
    classes: int = 2

    def __len__(self) -> int:
        return len(self.guess)

    def take(self, rows: Array) -> Outcomes:
        """Return these records only."""
        names = ("truth", "guess", "probabilities", "losses", "tokens")
        return replace(
            self, **{name: part[rows] if len(part := getattr(self, name)) == len(self) else part for name in names}
        )

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Return every metric of these records by name, computed once: a copy of it may be changed, this may not."""
        if self.kind == NUMBERS:
            return _numbers(self.truth, self.guess)
        if self.kind == TOKENS:
            return _tokens(self)
        return _labels(self) if self.kind == LABELS else _classes(self)

    @property
    def right(self) -> Array:
        """Return the share of each record that is answered correctly; NaN for real numbers."""
        if self.kind == NUMBERS:
            return np.full(len(self), math.nan)
        if self.kind == TOKENS:
            return np.asarray(self.guess / np.maximum(self.tokens, 1))
        same: Array = np.asarray(self.truth == self.guess)
        return np.asarray(same.all(axis=1) if self.kind == LABELS else same, dtype=float)

    @property
    def sides(self) -> dict[str, Array]:
        """Return which records are of either of two classes, are answered with the second, or have each label or not.

        Nothing of other targets. Names are those of ``effective_records``.
        """
        if self.kind == LABELS:
            columns = zip(self.labels, self.truth.T > 0, strict=True)
            return {f"{side}[{name}]": has == (side == SECOND) for name, has in columns for side in (SECOND, FIRST)}
        if self.kind not in (CLASSES, ORDINAL) or self.classes != 2:
            return {}
        return {SECOND: self.truth == 1, FIRST: self.truth == 0, SELECTED: self.guess == 1}

    @property
    def majority(self) -> float:
        """Return the share of the most frequent class (set of labels); NaN where there is none."""
        if self.kind in (NUMBERS, TOKENS) or not len(self):
            return math.nan
        return float(np.unique(self.truth, axis=0, return_counts=True)[1].max() / len(self))


def values(outcomes: Outcomes) -> dict[str, float]:
    """Return every metric of these records by name.

    Examples:
        >>> truth, guess = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
        >>> metrics = values(Outcomes("classes", truth, guess, np.eye(2)[guess] * 0.6 + 0.2, classes=2))
        >>> metrics["accuracy"], metrics["tpr"], metrics["fpr"]
        (0.75, 0.5, 0.0)
    """
    return dict(outcomes.metrics)


def by_group(outcomes: Outcomes, code: Array, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return every metric by group: metric -> group -> value, for the groups that occur.

    Where a group has one class only, as if groups are the classes, metrics that compare several classes are NaN.

    Args:
        outcomes: all records.
        code: the number of each record's group.
        names: the groups.

    Examples:
        >>> every = Outcomes("numbers", np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 3.0]))
        >>> by_group(every, np.array([0, 1, 1]), ("a", "b"))["mae"]
        {'a': 0.0, 'b': 0.5}
    """
    parts = {name: _part(_of_group(outcomes, code == place)) for place, name in enumerate(names) if place in code}
    metrics = dict.fromkeys(metric for part in parts.values() for metric in part)
    return {metric: {name: part[metric] for name, part in parts.items() if metric in part} for metric in metrics}


def _of_group(outcomes: Outcomes, inside: Array) -> Outcomes:
    """Return these records only; the very object if they are all, since its metrics may be computed already."""
    return outcomes if inside.all() else outcomes.take(inside)


def _part(outcomes: Outcomes) -> dict[str, float]:
    """Return the metrics of one group's records; NaN for those that one class among several leaves undefined."""
    metrics = values(outcomes)
    if outcomes.kind == CLASSES and outcomes.classes > 2 and len(np.unique(outcomes.truth)) == 1:
        metrics |= {name: math.nan for name in _OF_SEVERAL if name in metrics}
    return metrics


def _classes(outcomes: Outcomes) -> dict[str, float]:
    truth, guess, likely = outcomes.truth, outcomes.guess, outcomes.probabilities
    width = outcomes.classes
    table = np.bincount(truth * width + guess, minlength=width * width).reshape(width, width).astype(float)
    finite = likely.size > 0 and bool(np.isfinite(likely).all())
    roc, precision = _one_against_rest(truth, likely) if finite else (math.nan, math.nan)
    metrics = {
        "accuracy": float(np.mean(truth == guess)),
        "balanced_accuracy": _mean(_over(np.diag(table), table.sum(1))),
        "mcc": _mcc(table),
        "roc_auc": roc,
        "pr_auc": precision,
        "brier": _brier(truth, likely) if finite else math.nan,
        "calibration_error": calibration_error(truth == guess, likely.max(1)) if finite else math.nan,
        "log_loss": float(np.mean(outcomes.losses)) if len(outcomes.losses) else math.nan,
        **_rates(table),
    }
    if outcomes.kind == ORDINAL:
        metrics["rank_mae"] = float(np.mean(np.abs(truth - guess)))
    return metrics


def _rates(table: Array) -> dict[str, float]:
    """Return rates of the second of two classes; of more, their means over the classes where they are defined."""
    total, true, said, hits = table.sum(), table.sum(1), table.sum(0), np.diag(table)
    recall, alarms = _over(hits, true), _over(said - hits, total - true)
    exact = _over(hits, said)
    if len(table) == 2:
        return {
            "base_rate": float(true[1] / total),
            "selection_rate": float(said[1] / total),
            "tpr": float(recall[1]),
            "fpr": float(alarms[1]),
            "tnr": float(1 - alarms[1]),
            "precision": float(exact[1]),
        }
    return {"tpr": _mean(recall), "fpr": _mean(alarms), "tnr": _mean(1 - alarms), "precision": _mean(exact)}


def _mcc(table: Array) -> float:
    """Return Matthews correlation coefficient; zero if either column is constant, as in scikit-learn."""
    rows, columns, total = table.sum(1), table.sum(0), table.sum()
    scale = (total**2 - rows @ rows) * (total**2 - columns @ columns)
    return 0.0 if scale <= 0 else float((np.trace(table) * total - rows @ columns) / math.sqrt(scale))


def _brier(truth: Array, likely: Array) -> float:
    """Return scikit-learn's ``brier_score_loss``: of the second of two classes, of more the sum over all of them."""
    wrong = (likely - np.eye(likely.shape[1])[truth]) ** 2
    return float(np.mean(wrong[:, 1] if likely.shape[1] == 2 else wrong.sum(1)))


def calibration_error(right: Array, confidence: Array, bins: int = BINS) -> float:
    """Return the expected calibration error: mean distance of confidence and share of right answers, over bins.

    Examples:
        >>> calibration_error(np.array([True, False]), np.array([0.75, 0.75]))
        0.25
    """
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    apart = np.bincount(place, weights=right.astype(float) - confidence, minlength=bins)
    return float(np.abs(apart).sum() / len(right))


def _one_against_rest(truth: Array, likely: Array) -> tuple[float, float]:
    """Return both areas (``_areas``) of the second of two classes; of more, their means over the classes that occur."""
    present = np.unique(truth)
    if len(present) < 2:
        return math.nan, math.nan
    if likely.shape[1] == 2:
        roc, precision = _areas(truth[:, None] == 1, likely[:, 1:])
    else:
        roc, precision = _areas(truth[:, None] == present[None, :], likely[:, present])
    return _mean(roc), _mean(precision)


def _areas(mine: Array, scores: Array) -> tuple[Array, Array]:
    """Return scikit-learn's ``roc_auc_score`` and ``average_precision_score`` of each column.

    Records of equal score are answered together: a curve has points only where such a run of records ends.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    score = np.take_along_axis(scores, order, axis=0)
    caught = np.take_along_axis(mine, order, axis=0).cumsum(0, dtype=float)
    answered = np.arange(1.0, len(mine) + 1)[:, None]
    ends = np.vstack([score[1:] != score[:-1], np.ones((1, score.shape[1]), dtype=bool)])
    before, gained = _steps(caught, ends)
    _, alarms = _steps(answered - caught, ends)
    hits = mine.sum(0).astype(float)
    roc = (alarms * (before + gained / 2)).sum(0)
    return _over(roc, hits * (len(mine) - hits)), _over((gained * caught / answered).sum(0), hits)


def _steps(counts: Array, ends: Array) -> tuple[Array, Array]:
    """Return for each row of growing counts that of the last end before it, and what an end adds to that (else 0)."""
    reached = np.maximum.accumulate(np.where(ends, counts, 0.0), axis=0)
    before = np.vstack([np.zeros((1, counts.shape[1])), reached[:-1]])
    return before, np.where(ends, counts - before, 0.0)


def _labels(outcomes: Outcomes) -> dict[str, float]:
    truth, guess, likely = outcomes.truth, outcomes.guess, outcomes.probabilities
    finite = bool(np.isfinite(likely).all())
    blank = np.full(truth.shape[1], math.nan)
    mixed = np.ptp(truth, axis=0) > 0 if finite else np.zeros(truth.shape[1], dtype=bool)
    areas, precisions = (
        np.where(mixed, area, math.nan) for area in (_areas(truth > 0, likely) if finite else (blank, blank))
    )
    metrics = {
        "accuracy": float(np.mean((truth == guess).all(axis=1))),
        "label_accuracy": float(np.mean(truth == guess)),
        "roc_auc": _mean(areas),
        "pr_auc": _mean(precisions),
        "brier": float(np.mean((likely - truth) ** 2)) if finite else math.nan,
        "calibration_error": calibration_error((truth > 0).ravel(), likely.ravel()) if finite else math.nan,
        "log_loss": float(np.mean(outcomes.losses)),
    }
    for place, name in enumerate(outcomes.labels):
        metrics |= {f"roc_auc[{name}]": float(areas[place]), f"pr_auc[{name}]": float(precisions[place])}
        metrics[f"base_rate[{name}]"] = float(np.mean(truth[:, place] > 0))
    return metrics


def _numbers(truth: Array, guess: Array) -> dict[str, float]:
    """Return mean absolute error, root mean squared error, R2 (of several columns: their mean) and bias."""
    wrong = (guess - truth).reshape(len(truth), -1)
    spread = ((truth - truth.mean(0)) ** 2).reshape(len(truth), -1).sum(0)
    explained = np.where(spread > 0, 1 - _over((wrong**2).sum(0), spread), math.nan)
    return {
        "mae": float(np.mean(np.abs(wrong))),
        "rmse": float(np.mean(np.sqrt(np.mean(wrong**2, axis=0)))),
        "r2": _mean(explained),
        "bias": float(np.mean(wrong)),
    }


def _tokens(outcomes: Outcomes) -> dict[str, float]:
    total = float(outcomes.tokens.sum())
    if not total:
        return dict.fromkeys(("log_loss", "perplexity", "token_accuracy"), math.nan)
    loss = float(outcomes.losses.sum() / total)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"log_loss": loss, "perplexity": perplexity, "token_accuracy": float(outcomes.guess.sum() / total)}


def _over(parts: Array, whole: Array) -> Array:
    """Return a quotient, NaN where nothing is counted."""
    share: Array = np.full(np.shape(whole), math.nan)
    np.divide(parts, whole, out=share, where=np.asarray(whole) > 0)
    return share


def _mean(numbers: Array) -> float:
    """Return the mean of what is defined; NaN if nothing is."""
    defined = numbers[~np.isnan(numbers)]
    return float(defined.mean()) if len(defined) else math.nan


def losses_of(truth: Array, likely: Array) -> Array:
    """Return ``-log`` of the probability of each record's class.

    Examples:
        >>> losses_of(np.array([1]), np.array([[0.5, 0.5]])).round(3)
        array([0.693])
    """
    chosen: Array = np.clip(likely[np.arange(len(truth)), truth], _LEAST, None)
    return np.asarray(-np.log(chosen))


__all__ = ["CLASSES", "Outcomes", "by_group", "calibration_error", "losses_of", "values"]
