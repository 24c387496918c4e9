"""Measures predictions over all records and per group: accuracy with its interval, and further metrics.

Fairlearn's MetricFrame and scikit-learn compute; names follow fairlearn: ``accuracy_difference``,
``accuracy_ratio``, ``accuracy_group_min``, ``accuracy_group_max``. A metric that is undefined for the given records
(ROC-AUC without both outcomes) is NaN, and ``undefined`` says why. Both libraries are imported on the first use.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand.errors import DataError

_Z = 1.959963984540054  # the normal quantile at 97.5 %


@dataclass(frozen=True)
class Estimate:
    """A measured value with the ends of its 95 % interval; ``nan`` when ``count`` is zero: it was not measured."""

    value: float
    low: float
    high: float
    count: int

    @property
    def measured(self) -> bool:
        """Return whether there was anything to measure."""
        return math.isfinite(self.value)


@dataclass(frozen=True)
class GroupFrame:
    """One metric, over all records and per group, in the order in which the groups are shown."""

    overall: Estimate
    by_group: dict[str, Estimate]


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share of ``count`` records; everything is possible without records.

    Examples:
        >>> [round(end, 3) for end in wilson(0.75, 44)]
        [0.606, 0.854]
        >>> wilson(float("nan"), 0)
        (0.0, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    shrink = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / shrink
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / shrink
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def estimate(share: float, count: int) -> Estimate:
    """Return a share of ``count`` records with its interval.

    Examples:
        >>> estimate(1.0, 10).high
        1.0
    """
    low, high = wilson(share, count)
    return Estimate(share if count else math.nan, low, high, count)


def across(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return how groups differ in one metric, by fairlearn's names; empty without groups, NaN where undefined.

    Examples:
        >>> across("accuracy", [1.0, 0.5])["accuracy_ratio"]
        0.5
    """
    if not values:
        return {}
    low, high, mean = min(values), max(values), sum(values) / len(values)
    return {
        f"{name}_difference": high - low,
        f"{name}_ratio": low / high if high > 0 else math.nan,
        f"{name}_group_min": low,
        f"{name}_group_max": high,
        f"{name}_std": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
    }


def accuracy_by_group(
    y_true: Sequence[Any],
    y_pred: Sequence[Any],
    groups: Sequence[Hashable],
    *,
    names: Iterable[Hashable] = (),
) -> GroupFrame:
    """Return the share of held-out records whose prediction is right, overall and per group.

    Args:
        y_true: the labels, one per record (list, array or CPU tensor).
        y_pred: the predicted labels in the same order.
        groups: the group of each record; any hashable name, shown as text.
        names: groups to list even when no held-out record belongs to them; these come out as not measured.

    Returns:
        A frame whose groups are in the order of ``names``, then in natural order ("class 2" before "class 10").

    Raises:
        DataError: the three columns differ in length.

    Examples:
        >>> frame = accuracy_by_group([0, 1, 1], [0, 1, 0], ["a", "a", "b"], names=["a", "b", "c"])
        >>> {name: e.value for name, e in frame.by_group.items()}
        {'a': 1.0, 'b': 0.0, 'c': nan}
        >>> frame.overall.count
        3
    """
    import numpy as np

    truth, guess, named = np.asarray(y_true), np.asarray(y_pred), [str(_plain(group)) for group in groups]
    if not len(truth) == len(guess) == len(named):
        raise DataError(
            f"y_true has {len(truth)} records, y_pred {len(guess)} and groups {len(named)}: pass one entry per record."
        )
    order = list(dict.fromkeys([str(name) for name in names] + sorted(set(named), key=_natural)))
    if not named:
        return GroupFrame(estimate(math.nan, 0), {name: estimate(math.nan, 0) for name in order})

    from fairlearn.metrics import MetricFrame, count
    from sklearn.metrics import accuracy_score

    codes = {name: code for code, name in enumerate(order)}
    frame = MetricFrame(
        metrics={"accuracy": accuracy_score, "count": count},
        y_true=truth,
        y_pred=guess,
        sensitive_features=[codes[name] for name in named],
    )
    estimates = {
        code: estimate(float(share), int(size))
        for code, share, size in frame.by_group[["accuracy", "count"]].itertuples(name=None)
    }
    by_group = {name: estimates.get(code, estimate(math.nan, 0)) for name, code in codes.items()}
    return GroupFrame(estimate(float(frame.overall["accuracy"]), len(named)), by_group)


def _plain(group: Any) -> Any:
    """Return a number out of a zero-dimensional array or tensor, so that its name is "3" and not "tensor(3)"."""
    return group.item() if hasattr(group, "item") and getattr(group, "ndim", None) == 0 else group


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that counts: "class 2" before "class 10"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d{1,18})", name)]


PER_GROUP = ("accuracy", "recall", "log_loss")
"""What is measured per group; recall of the second class when there are two, else the mean over classes present."""


@dataclass(frozen=True)
class Measures:
    """All metrics of one set of predictions.

    Attributes:
        overall: accuracy, balanced_accuracy, recall, mcc, roc_auc and log_loss over all records, and the count.
        by_group: metric -> group -> value, for ``PER_GROUP`` and the count.
        by_owner: metric -> owner -> value; empty if no owners were given.
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
    """Return every metric of these predictions.

    Args:
        y_true: the class of each record, 0 to K-1.
        y_pred: the predicted class of each record.
        groups: the group of each record.
        owners: the owner of each record, if owners are to be compared too.
        probabilities: one row per record and one column per class; without it ROC-AUC and log loss are undefined.

    Examples:
        >>> measures = measure([0, 1, 0, 1], [0, 1, 0, 0], groups=["a", "a", "b", "b"])
        >>> measures.overall["accuracy"], measures.by_group["accuracy"], measures.across["accuracy_difference"]
        (0.75, {'a': 1.0, 'b': 0.5}, 0.5)
        >>> measures.worst_group, measures.undefined["roc_auc"]
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
    """Return the area under the ROC curve and None; or NaN and why it is undefined.

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
    """Return one MetricFrame over all metrics; groups are coded by number, so any text is a name."""
    import numpy as np
    from fairlearn.metrics import MetricFrame, count
    from sklearn.metrics import accuracy_score

    two = len(np.unique(truth)) <= 2 and int(np.max(truth)) <= 1

    def recall(y_true: Any, y_pred: Any) -> float:
        return _recall(y_true, y_pred, 1) if two else _mean_recall(y_true, y_pred)

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
    """Return differences between groups, computed and named by fairlearn; undefined ones are NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        columns = {
            "difference": frame.difference(errors="coerce"),
            "ratio": frame.ratio(errors="coerce"),
            "group_min": frame.group_min(errors="coerce"),
            "group_max": frame.group_max(errors="coerce"),
        }
    return {f"{name}_{kind}": float(values[name]) for kind, values in columns.items() for name in PER_GROUP}


def _deviations(by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the standard deviation over groups, each counted once."""
    import numpy as np

    return {f"{name}_std": float(np.std(list(by_group[name].values()))) for name in PER_GROUP}


def _recall(truth: Any, guess: Any, wanted: int) -> float:
    import numpy as np

    mine = np.asarray(truth) == wanted
    return float(np.mean(np.asarray(guess)[mine] == wanted)) if mine.any() else math.nan


def _mean_recall(truth: Any, guess: Any) -> float:
    import numpy as np

    return float(np.mean([_recall(truth, guess, label) for label in np.unique(truth)]))
