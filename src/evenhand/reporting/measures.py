"""Metrics over all held-out records and per group, by fairlearn's MetricFrame and scikit-learn.

Names follow fairlearn: ``accuracy_difference``, ``accuracy_ratio``, ``accuracy_group_min``, ``accuracy_group_max``. A
metric that is undefined for the given records (ROC-AUC without both outcomes) is NaN, and ``undefined`` says why.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand.errors import DataError

PER_GROUP = ("accuracy", "recall", "log_loss")
"""What is measured per group; recall of the second class when there are two, else the mean over classes present."""


@dataclass(frozen=True)
class Measures:
    """All metrics of one set of predictions.

    Attributes:
        overall: accuracy, balanced_accuracy, recall, mcc, roc_auc and log_loss over all records, and the count.
        by_group: metric -> group -> value, for ``PER_GROUP`` and the count.
        by_owner: the same per owner; empty if no owners were given.
        across: how groups differ: ``<metric>_{difference,ratio,group_min,group_max,std}``.
        worst_group: the group with the lowest accuracy; empty without groups.
        undefined: metric -> why it is NaN.
    """

    overall: Mapping[str, float]
    by_group: Mapping[str, Mapping[str, float]]
    by_owner: Mapping[str, Mapping[str, float]]
    across: Mapping[str, float]
    worst_group: str
    undefined: Mapping[str, str]


def measure(
    y_true: Any,
    y_pred: Any,
    *,
    groups: Sequence[str],
    owners: Sequence[str] | None = None,
    probabilities: Any = None,
) -> Measures:
    """Every metric of these predictions.

    Args:
        y_true: the class of each record, 0 to K-1.
        y_pred: the predicted class of each record.
        groups: the group of each record.
        owners: the owner of each record, if owners are to be compared too.
        probabilities: one row per record and one column per class; without it ROC-AUC and log loss are undefined.

    Examples:
        >>> found = measure([0, 1, 0, 1], [0, 1, 0, 0], groups=["a", "a", "b", "b"])
        >>> found.overall["accuracy"], found.by_group["accuracy"], found.across["accuracy_difference"]
        (0.75, {'a': 1.0, 'b': 0.5}, 0.5)
        >>> found.worst_group, found.undefined["roc_auc"]
        ('b', 'no class probabilities were given')
    """
    import numpy as np
    from sklearn.metrics import matthews_corrcoef

    truth, guess = np.asarray(y_true), np.asarray(y_pred)
    if not len(truth) == len(guess) == len(groups) or (owners is not None and len(owners) != len(truth)):
        raise DataError("The columns differ in length: pass one label, prediction, group and owner per record.")
    if not len(truth):
        raise DataError("There are no records to measure: pass at least one.")
    losses = _losses(truth, probabilities)
    frame = _frame(truth, guess, losses, groups)
    area, why = roc_auc(truth, probabilities)
    undefined = {} if why is None else {"roc_auc": why}
    if probabilities is None:
        undefined["log_loss"] = "no class probabilities were given"
    overall = {name: float(frame.overall[name]) for name in (*PER_GROUP, "count")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overall |= {"balanced_accuracy": _mean_recall(truth, guess), "mcc": float(matthews_corrcoef(truth, guess))}
    by_group = _columns(frame)
    accuracy = by_group["accuracy"]
    return Measures(
        overall=overall | {"roc_auc": area},
        by_group=by_group,
        by_owner={} if owners is None else _columns(_frame(truth, guess, losses, owners)),
        across=_across(frame) | _deviations(by_group),
        worst_group=min(accuracy, key=lambda name: accuracy[name]),
        undefined=undefined,
    )


def roc_auc(y_true: Any, probabilities: Any) -> tuple[float, str | None]:
    """Area under the ROC curve and None; or NaN and why it is undefined.

    Two classes: of the second one. More: each class against the rest, averaged over the classes that occur.

    Examples:
        >>> roc_auc([0, 1], [[0.9, 0.1], [0.2, 0.8]])
        (1.0, None)
        >>> roc_auc([1, 1], [[0.9, 0.1], [0.2, 0.8]])
        (nan, 'the records belong to one class only')
    """
    if probabilities is None:
        return math.nan, "no class probabilities were given"
    import numpy as np
    from sklearn.metrics import roc_auc_score

    truth, scores = np.asarray(y_true), np.asarray(probabilities)
    if not np.isfinite(scores).all():
        return math.nan, "the model's outputs are not finite"
    present = np.unique(truth)
    if len(present) < 2:
        return math.nan, "the records belong to one class only"
    if scores.shape[1] == 2:
        return float(roc_auc_score(truth, scores[:, 1])), None
    one_against_rest = truth[:, None] == present[None, :]
    return float(roc_auc_score(one_against_rest, scores[:, present], average="macro")), None


def _losses(truth: Any, probabilities: Any) -> Any:
    import numpy as np

    if probabilities is None:
        return np.full(len(truth), math.nan)
    chosen = np.asarray(probabilities, dtype=float)[np.arange(len(truth)), truth]
    return -np.log(np.clip(chosen, 1e-300, None))


def _frame(truth: Any, guess: Any, losses: Any, names: Sequence[str]) -> Any:
    """One MetricFrame over all metrics; groups are coded by number, so any text is a name."""
    import numpy as np
    from fairlearn.metrics import MetricFrame, count
    from sklearn.metrics import accuracy_score

    two = len(np.unique(truth)) <= 2 and int(np.max(truth)) <= 1

    def recall(y_true: Any, y_pred: Any) -> float:
        return _share_found(y_true, y_pred, 1) if two else _mean_recall(y_true, y_pred)

    def log_loss(y_true: Any, y_pred: Any, *, losses: Any) -> float:
        return float(np.mean(losses))

    return MetricFrame(
        metrics={"accuracy": accuracy_score, "recall": recall, "log_loss": log_loss, "count": count},
        y_true=truth,
        y_pred=guess,
        sensitive_features=np.asarray(names, dtype=object).astype(str),
        sample_params={"log_loss": {"losses": losses}},
    )


def _columns(frame: Any) -> dict[str, dict[str, float]]:
    table = frame.by_group
    return {name: {str(group): float(value) for group, value in table[name].items()} for name in (*PER_GROUP, "count")}


def _across(frame: Any) -> dict[str, float]:
    """Differences between groups, computed and named by fairlearn; undefined ones are NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            "difference": frame.difference(errors="coerce"),
            "ratio": frame.ratio(errors="coerce"),
            "group_min": frame.group_min(errors="coerce"),
            "group_max": frame.group_max(errors="coerce"),
        }
    return {f"{name}_{kind}": float(values[name]) for kind, values in found.items() for name in PER_GROUP}


def _deviations(by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The standard deviation over groups, each counted once."""
    import numpy as np

    return {f"{name}_std": float(np.std(list(by_group[name].values()))) for name in PER_GROUP}


def _share_found(truth: Any, guess: Any, wanted: int) -> float:
    import numpy as np

    mine = np.asarray(truth) == wanted
    return float(np.mean(np.asarray(guess)[mine] == wanted)) if mine.any() else math.nan


def _mean_recall(truth: Any, guess: Any) -> float:
    import numpy as np

    return float(np.mean([_share_found(truth, guess, label) for label in np.unique(truth)]))
