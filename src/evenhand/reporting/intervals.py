"""Computes intervals: by bootstrap over held-out records, and over repeated trainings (seeds)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.errors import DataError
from evenhand.reporting.group_metrics import Estimate

RESAMPLES = 2000


def over_seeds(values: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return the mean of several trainings with its 95 % t-interval, cut to ``low`` and ``high``.

    ``count`` of the estimate is the number of trainings. One training has no interval: its ends are NaN.

    Examples:
        >>> mean = over_seeds([0.70, 0.72, 0.74])
        >>> round(mean.value, 3), round(mean.low, 3), round(mean.high, 3)
        (0.72, 0.67, 0.77)
        >>> over_seeds([0.7]).low
        nan
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.special import stdtrit

    variance = sum((value - mean) ** 2 for value in known) / (len(known) - 1)
    half = float(stdtrit(len(known) - 1, 0.975)) * math.sqrt(variance / len(known))
    return Estimate(mean, max(low, mean - half), min(high, mean + half), len(known))


def bootstrap(
    y_true: Sequence[int], y_pred: Sequence[int], groups: Sequence[str], *, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """Return 95 % percentile intervals of accuracy, balanced accuracy, and how groups differ in accuracy.

    Records are drawn with replacement inside each group, so that a small group stays in every resample. Drawing records
    is drawing counts of (class, prediction) pairs, which is one multinomial per group: no loop over resamples.

    Returns:
        Estimates by name: ``accuracy``, ``balanced_accuracy``, ``accuracy_{difference,ratio,group_min,group_max,std}``,
        and ``accuracy[<group>]`` per group; ``count`` is the number of records.

    Examples:
        >>> metrics = bootstrap([0, 1] * 50, [0, 1] * 40 + [1, 1] * 10, ["a"] * 60 + ["b"] * 40)
        >>> metrics["accuracy"].value, 0.8 < metrics["accuracy"].low < 0.9 < metrics["accuracy"].high < 1
        (0.9, True)
    """
    import numpy as np

    truth, guess, names = np.asarray(y_true), np.asarray(y_pred), np.asarray(groups, dtype=object).astype(str)
    if not len(truth) == len(guess) == len(names) or not len(truth):
        raise DataError("Bootstrap needs one label, prediction and group for each of at least one record.")
    rng = np.random.default_rng(seed)
    classes = np.unique(truth)
    cells, place = np.unique(
        np.stack([np.searchsorted(classes, truth), truth == guess], axis=1), axis=0, return_inverse=True
    )
    drawn, exact, sizes = {}, {}, {}
    for name in dict.fromkeys(names.tolist()):
        counts = np.bincount(place.reshape(-1)[names == name], minlength=len(cells))
        exact[name], sizes[name] = counts[None, :], int(counts.sum())
        drawn[name] = rng.multinomial(sizes[name], counts / sizes[name], size=resamples)
    values, spread = _statistics(exact, cells), _statistics(drawn, cells)
    records = {f"accuracy[{name}]": size for name, size in sizes.items()}
    return {key: _percentiles(float(values[key][0]), spread[key], records.get(key, len(truth))) for key in values}


def _statistics(counts: Mapping[str, Any], cells: Any) -> dict[str, Any]:
    """Return every metric for a stack of count vectors: one entry per resample."""
    import numpy as np

    right = cells[:, 1].astype(float)
    per_group = {name: stack @ right / stack.sum(axis=1) for name, stack in counts.items()}
    total = sum(counts.values())
    recalls = []
    for label in np.unique(cells[:, 0]):
        mine = (cells[:, 0] == label).astype(float)
        size = total @ mine
        recalls.append(np.where(size > 0, (total @ (mine * right)) / np.maximum(size, 1), math.nan))
    table = np.stack(list(per_group.values()))
    lowest, highest = table.min(axis=0), table.max(axis=0)
    return {
        "accuracy": total @ right / total.sum(axis=1),
        "balanced_accuracy": np.nanmean(np.stack(recalls), axis=0),
        "accuracy_difference": highest - lowest,
        "accuracy_ratio": np.where(highest > 0, lowest / np.where(highest > 0, highest, 1), math.nan),
        "accuracy_group_min": lowest,
        "accuracy_group_max": highest,
        "accuracy_std": table.std(axis=0),
        **{f"accuracy[{name}]": shares for name, shares in per_group.items()},
    }


def _percentiles(value: float, spread: Any, count: int) -> Estimate:
    import numpy as np

    low, high = np.nanpercentile(spread, [2.5, 97.5]) if np.isfinite(spread).any() else (math.nan, math.nan)
    return Estimate(value, float(low), float(high), count)


def privacy_cost(reference: Mapping[int, float], private: Mapping[int, float]) -> Estimate:
    """Return the cost of privacy in points: reference minus private accuracy, paired by seed (same start, other noise).

    Args:
        reference: accuracy of the non-private model by seed.
        private: accuracy of the private model by seed.

    Examples:
        >>> round(privacy_cost({0: 0.9, 1: 0.9}, {0: 0.5, 1: 0.48}).value, 1)
        41.0
    """
    common = sorted(set(reference) & set(private))
    return over_seeds([100 * (reference[seed] - private[seed]) for seed in common], low=-100.0, high=100.0)
