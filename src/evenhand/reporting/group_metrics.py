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
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from evenhand.errors import DataError
from evenhand.reporting.metrics import CLASSES, NUMBERS, TOKENS, disparities, higher_is_better

if TYPE_CHECKING:
    from evenhand.reporting.outcomes import Outcomes

_Z = 1.959963984540054  # the normal quantile at 97.5 %


@dataclass(frozen=True)
class Estimate:
    """A measured value with the ends of its 95 % interval; ``nan`` when ``count`` is zero: it was not measured.

    ``effective`` is how many independent records the ``count`` are worth, where a person has several of them.
    """

    value: float
    low: float
    high: float
    count: int
    effective: int | None = field(default=None, repr=False)

    @property
    def measured(self) -> bool:
        """Return whether there was anything to measure."""
        return math.isfinite(self.value)

    @property
    def independent(self) -> int:
        """Return the number of independent records behind the value: all of them, unless it is known to be less."""
        return self.count if self.effective is None else self.effective


@dataclass(frozen=True)
class GroupFrame:
    """One metric, over all records and per group, in the order in which the groups are shown."""

    overall: Estimate
    by_group: dict[str, Estimate]


def wilson(share: float, count: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a share of ``count`` records; everything is possible without records.

    Examples:
        >>> [round(end, 3) for end in wilson(0.75, 44)]
        [0.606, 0.854]
        >>> wilson(float("nan"), 0)
        (0.0, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    z = _Z if level == 0.95 else NormalDist().inv_cdf((1 + level) / 2)
    shrink = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / shrink
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / shrink
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def estimate(share: float, count: int, effective: int | None = None) -> Estimate:
    """Return a share of ``count`` records with its interval, which is that of ``effective`` records if these are fewer.

    Examples:
        >>> estimate(1.0, 10).high
        1.0
        >>> [round(estimate(0.75, 176, effective).low, 2) for effective in (None, 44)]
        [0.68, 0.61]
    """
    effective = None if effective == count else effective
    low, high = wilson(share, count if effective is None else effective)
    return Estimate(share if count else math.nan, low, high, count, effective)


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
    order = list(dict.fromkeys([str(name) for name in names] + sorted(set(named), key=natural)))
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


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that counts: "class 2" before "class 10"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d{1,18})", name)]


@dataclass(frozen=True)
class Measures:
    """All metrics of one set of predictions.

    Attributes:
        overall: every metric of ``metrics.METRICS`` that these targets have, over all records, and the count.
        by_group: metric -> group -> value, and the count. Rates are of the second class when there are two, else the
            mean over the classes where they are defined.
        by_owner: metric -> owner -> value; empty if no owners were given.
        across: how groups differ: ``<metric>_{difference,ratio,group_min,group_max,std}``, and demographic parity,
            equalised odds and equal opportunity.
        worst_group: the group with the lowest accuracy (largest error, where there is no accuracy); empty without
            groups.
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
    """Return every metric of these predicted classes.

    Args:
        y_true: the class of each record, 0 to K-1.
        y_pred: the predicted class of each record.
        groups: the group of each record.
        owners: the owner of each record, if owners are to be compared too.
        probabilities: one row per record and one column per class; without it the metrics of scores are undefined.

    Examples:
        >>> measures = measure([0, 1, 0, 1], [0, 1, 0, 0], groups=["a", "a", "b", "b"])
        >>> measures.overall["accuracy"], measures.by_group["accuracy"], measures.across["accuracy_difference"]
        (0.75, {'a': 1.0, 'b': 0.5}, 0.5)
        >>> measures.worst_group, measures.undefined["roc_auc"]
        ('b', 'no class probabilities were given')
    """
    import numpy as np

    from evenhand.reporting.outcomes import Outcomes, losses_of

    truth, guess = np.asarray(y_true), np.asarray(y_pred)
    likely = np.empty((0, 0)) if probabilities is None else np.asarray(probabilities, dtype=float)
    if len(truth) == len(guess) and (probabilities is None or len(likely) == len(truth)):
        losses = np.full(len(truth), math.nan) if probabilities is None else losses_of(truth, likely)
        every = Outcomes(CLASSES, truth, guess, likely, losses, classes=_width(truth, guess, likely))
        return measure_outcomes(every, groups=groups, owners=owners)
    raise DataError(_LENGTHS)


def _width(truth: Any, guess: Any, likely: Any) -> int:
    """Return the number of classes, at least two."""
    if likely.size or not len(truth):
        return likely.shape[1]  # type: ignore[no-any-return]
    return max(2, int(max(truth.max(), guess.max())) + 1)


_LENGTHS = "The columns differ in length: pass one label, prediction, group and owner per record."
_SCORES = ("roc_auc", "pr_auc", "brier", "calibration_error", "log_loss")


def measure_outcomes(outcomes: Outcomes, *, groups: Sequence[str], owners: Sequence[str] | None = None) -> Measures:
    """Return every metric of held-out records, overall, by group and by owner, through fairlearn's MetricFrame."""
    if len(outcomes) != len(groups) or (owners is not None and len(owners) != len(outcomes)):
        raise DataError(_LENGTHS)
    if not len(outcomes):
        raise DataError("There are no records to measure: pass at least one.")
    frame = _frame(outcomes, groups)
    overall = {str(name): float(number) for name, number in frame.overall.items()}
    by_group = _columns(frame)
    leading = next(name for name in ("accuracy", "mae", "log_loss") if name in by_group)
    ranked = sorted(by_group[leading], key=lambda name: by_group[leading][name])
    return Measures(
        overall=overall,
        by_group=by_group,
        by_owner={} if owners is None else _columns(_frame(outcomes, owners)),
        across=_across(frame) | _deviations(by_group) | disparities(by_group),
        worst_group=ranked[0 if higher_is_better(leading) else -1],
        undefined=_undefined(outcomes, overall),
    )


def _undefined(outcomes: Outcomes, overall: Mapping[str, float]) -> dict[str, str]:
    """Return why metrics over all records are NaN."""
    import numpy as np

    absent = [name for name in _SCORES if math.isnan(overall.get(name, 0.0))]
    if outcomes.kind in (NUMBERS, TOKENS) or not absent:
        return {}
    if not outcomes.probabilities.size:
        return dict.fromkeys(absent, "no class probabilities were given")
    if not np.isfinite(outcomes.probabilities).all():
        return dict.fromkeys(absent, "the model's outputs are not finite")
    return dict.fromkeys(absent, "the records belong to one class only")


def _frame(outcomes: Outcomes, names: Sequence[str]) -> Any:
    """Return one MetricFrame over all metrics; the metrics of one group are computed together."""
    import numpy as np
    from fairlearn.metrics import MetricFrame, count

    from evenhand.reporting.outcomes import values

    computed: dict[bytes, dict[str, float]] = {}

    def metric(name: str) -> Any:
        def of_rows(y_true: Any, y_pred: Any, *, rows: Any) -> float:
            key = np.asarray(rows).tobytes()
            if key not in computed:
                computed[key] = _with_recall(values(outcomes.take(np.asarray(rows))))
            return computed[key].get(name, math.nan)

        return of_rows

    places = np.arange(len(outcomes))
    functions = {name: metric(name) for name in _with_recall(values(outcomes))}
    return MetricFrame(
        metrics={**functions, "count": count},
        y_true=places,
        y_pred=places,
        sensitive_features=np.asarray(names, dtype=object).astype(str),
        sample_params={name: {"rows": places} for name in functions},
    )


def _with_recall(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with ``recall``, the other name of the true positive rate."""
    return {**metrics, "recall": metrics["tpr"]} if "tpr" in metrics else metrics


def _columns(frame: Any) -> dict[str, dict[str, float]]:
    table = frame.by_group
    return {name: {str(group): float(value) for group, value in table[name].items()} for name in table.columns}


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
    return {
        f"{name}_{kind}": float(numbers[name])
        for kind, numbers in columns.items()
        for name in frame.by_group.columns
        if name != "count"
    }


def _deviations(by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the standard deviation over groups, each counted once."""
    import numpy as np

    return {f"{name}_std": float(np.std(list(part.values()))) for name, part in by_group.items() if name != "count"}
