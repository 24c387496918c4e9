"""Lists metrics by name: for which targets each is defined, which way is better, and between which bounds it lies.

Differences and ratios between groups have fairlearn's names: ``fpr_difference``, ``demographic_parity_ratio``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.errors import UsageError

CLASSES, ORDINAL, LABELS, NUMBERS, TOKENS = "classes", "ordinal", "labels", "numbers", "tokens"
"""Kinds of targets: one class per record, classes with an order, several labels, real numbers, words of a text."""
_CLASSES = (CLASSES, ORDINAL)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: what ``--metric`` takes.
        words: what it is, for a reader.
        kinds: the kinds of targets that it is defined for.
        higher: whether higher is better; None where neither is.
        low: the smallest possible value.
        high: the largest possible value.
    """

    name: str
    words: str
    kinds: tuple[str, ...] = _CLASSES
    higher: bool | None = True
    low: float = 0.0
    high: float = 1.0


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "share of records answered correctly (several labels: all of them)", (*_CLASSES, LABELS)),
        Metric("balanced_accuracy", "mean over classes of the share answered correctly"),
        Metric("roc_auc", "area under the ROC curve", (*_CLASSES, LABELS)),
        Metric("pr_auc", "average precision, the area under precision over recall", (*_CLASSES, LABELS)),
        Metric("brier", "mean squared error of probabilities", (*_CLASSES, LABELS), False, 0.0, 2.0),
        Metric("calibration_error", "expected calibration error, 15 bins", (*_CLASSES, LABELS), False),
        Metric("mcc", "Matthews correlation coefficient", low=-1.0),
        Metric("log_loss", "mean of -log of the truth's probability", (*_CLASSES, LABELS, TOKENS), False, 0, math.inf),
        Metric("base_rate", "share of records in the second class (with the label)", (*_CLASSES, LABELS), None),
        Metric("selection_rate", "share of records predicted as the second class", higher=None),
        Metric("tpr", "true positive rate: recall"),
        Metric("fpr", "false positive rate", higher=False),
        Metric("tnr", "true negative rate"),
        Metric("precision", "share of positive answers that are right"),
        Metric("rank_mae", "mean distance between predicted and true rank", (ORDINAL,), False, 0.0, math.inf),
        Metric("label_accuracy", "share of labels answered correctly", (LABELS,)),
        Metric("mae", "mean absolute error", (NUMBERS,), False, 0.0, math.inf),
        Metric("rmse", "root of the mean squared error", (NUMBERS,), False, 0.0, math.inf),
        Metric("r2", "share of the variance that is explained", (NUMBERS,), True, -math.inf),
        Metric("bias", "mean of prediction minus truth", (NUMBERS,), None, -math.inf, math.inf),
        Metric("token_accuracy", "share of tokens predicted correctly", (TOKENS,)),
        Metric("perplexity", "exp of the loss per token", (TOKENS,), False, 1.0, math.inf),
    )
}
DISPARITIES = ("demographic_parity", "equalized_odds", "equal_opportunity")
"""Named by fairlearn, each as ``_difference`` and ``_ratio``: of selection rates, of TPR and FPR, of TPR."""
BETWEEN = "_between"
"""Ends the name of a metric's distance between two named groups: ``accuracy_between[A|B]``."""
WORST_OWNERS = "worst_owners"
"""Mean accuracy of the owners that are served worst: ``worst_owners[3]`` of three of them."""
ACROSS = ("difference", "ratio", "group_min", "group_max", "std")
HEADLINE = {
    CLASSES: ("accuracy", "balanced_accuracy"),
    ORDINAL: ("rank_mae", "accuracy"),
    LABELS: ("roc_auc", "pr_auc"),
    NUMBERS: ("mae", "rmse", "r2"),
    TOKENS: ("log_loss", "perplexity"),
}
"""What is printed first for each kind of target, if nobody asks for something else."""


def defined_for(kind: str) -> tuple[str, ...]:
    """Return the names of the metrics of a kind of targets.

    Examples:
        >>> defined_for("numbers")
        ('mae', 'rmse', 'r2', 'bias')
    """
    return tuple(name for name, metric in METRICS.items() if kind in metric.kinds)


def base(name: str) -> tuple[str, str]:
    """Divide a name into its metric and what is taken across groups or from one label; empty if nothing is.

    Examples:
        >>> base("fpr_difference"), base("roc_auc[Edema]"), base("mae"), base("equalized_odds_ratio")
        (('fpr', 'difference'), ('roc_auc', '[Edema]'), ('mae', ''), ('equalized_odds', 'ratio'))
    """
    if name in METRICS:
        return name, ""
    if name.endswith("]") and "[" in name:
        stem, _, rest = name.partition("[")
        return stem, f"[{rest}"
    for kind in ACROSS:
        if name.endswith(f"_{kind}"):
            return name.removesuffix(f"_{kind}"), kind
    return name, ""


def known(name: str, what: str = "metric", more: Iterable[str] = ()) -> str:
    """Return the name of a metric, of a difference or ratio between groups, or of one label's metric; refuse others.

    The message calls it ``what``, and names ``more`` that would do too.

    Examples:
        >>> known("fpr_difference"), known("equalized_odds_ratio"), known("roc_auc[Edema]")
        ('fpr_difference', 'equalized_odds_ratio', 'roc_auc[Edema]')
        >>> known("accuracy_between[black|white]"), known("worst_owners[3]")
        ('accuracy_between[black|white]', 'worst_owners[3]')
    """
    stem, across = base(name)
    if stem in DISPARITIES and across in ("difference", "ratio"):
        return name
    inside = across[1:-1]
    if stem == WORST_OWNERS and inside.isdecimal() and int(inside) > 0:
        return name
    if stem.removesuffix(BETWEEN) in METRICS and stem.endswith(BETWEEN) and inside.count("|") == 1:
        return name
    if stem not in METRICS:
        parities = (f"{one}_{part}" for one in DISPARITIES for part in ACROSS[:2])
        _validate.known(name, (*more, *METRICS, *parities), what)
    return name


def listed(text: str) -> tuple[str, ...]:
    """Return the metrics that ``NAME,NAME`` stands for, each once; commas within brackets belong to a name.

    Examples:
        >>> listed("fpr, tpr,fpr"), listed("fpr_between[race = a, sex = f|race = b, sex = f]")[0][-16:]
        (('fpr', 'tpr'), 'ce = b, sex = f]')
    """
    parts = re.split(r",(?![^\[]*\])", text)
    chosen = tuple(dict.fromkeys(known(part.strip()) for part in parts if part.strip()))
    if not chosen:
        raise UsageError("--metric takes names separated by commas, for example --metric balanced_accuracy,fpr.")
    return chosen


def higher_is_better(name: str) -> bool:
    """Return whether a larger value of this metric, or of its difference between groups, is better.

    Examples:
        >>> [higher_is_better(name) for name in ("accuracy", "fpr", "accuracy_difference", "fpr_ratio", "mae")]
        [True, False, False, True, False]
    """
    stem, across = base(name)
    if across == "ratio":
        return True
    if across in ("difference", "std") or stem.endswith(BETWEEN):
        return False
    metric = METRICS.get(stem)
    return metric is None or metric.higher is not False


def bounds(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a metric can have.

    Examples:
        >>> bounds("mcc"), bounds("mcc_difference"), bounds("rmse")
        ((-1.0, 1.0), (0.0, 2.0), (0.0, inf))
    """
    stem, across = base(name)
    metric = METRICS.get(stem.removesuffix(BETWEEN))
    low, high = (0.0, 1.0) if metric is None else (metric.low, metric.high)
    if across == "ratio":
        return -math.inf if low < 0 else 0.0, 1.0
    return (0.0, high - low) if across in ("difference", "std") or stem.endswith(BETWEEN) else (low, high)


def value(row: Mapping[str, Any], name: str, group: str | None = None) -> float | None:
    """Return a metric of one line of metrics.jsonl, over all records or of one group; None if it is not defined.

    Lines of an earlier version have accuracy and log loss per group only. ``METRIC_between[A|B]`` is the distance of
    two named groups, |pi_A - pi_B|; ``worst_owners[K]`` the mean accuracy of the K owners that are served worst.

    Examples:
        >>> row = {"accuracy": 0.75, "groups": {"a": 1.0, "b": 0.5}, "group_metrics": {"fpr": {"a": 0.25, "b": 0.5}}}
        >>> value(row, "accuracy", "b"), value(row, "fpr", "a"), value(row, "fpr_difference"), value(row, "mcc")
        (0.5, 0.25, 0.25, None)
        >>> value(row, "fpr_between[a|b]"), value({"owners": {"x": 0.9, "y": 0.5, "z": 0.7}}, "worst_owners[2]")
        (0.25, 0.6)
    """
    if group is not None:
        return by_group(row, name).get(group)
    metrics = row.get("metrics", {})
    if name in metrics or name in row:
        number = metrics.get(name, row.get(name))
        return None if number is None else float(number)
    stem, across = base(name)
    if stem in DISPARITIES:
        return disparities(row.get("group_metrics", {})).get(name)
    if stem.endswith(BETWEEN):
        pair = [by_group(row, stem.removesuffix(BETWEEN)).get(group.strip()) for group in across[1:-1].split("|")]
        return None if pair[0] is None or pair[1] is None else abs(pair[0] - pair[1])
    if stem == WORST_OWNERS:
        shares = sorted(share for share in row.get("owners", {}).values() if share is not None)[: int(across[1:-1])]
        return math.fsum(shares) / len(shares) if shares else None
    if across.startswith("[") or not across:
        return None
    return differences(stem, by_group(row, stem).values()).get(name)


def by_group(row: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return a metric of one line of metrics.jsonl by group, without groups where it is not defined."""
    old = {"accuracy": row.get("groups", {}), "log_loss": row.get("group_log_loss", {})}
    values = row.get("group_metrics", {}).get(name, old.get(name, {}))
    return {group: float(number) for group, number in values.items() if number is not None}


def differences(name: str, values: Iterable[float | None]) -> dict[str, float]:
    """Return how groups differ in a metric, by fairlearn's names, over the groups where it is defined.

    Examples:
        >>> differences("fpr", [0.2, 0.4, None])["fpr_ratio"]
        0.5
    """
    defined = [value for value in values if value is not None and math.isfinite(value)]
    if not defined:
        return {}
    low, high, mean = min(defined), max(defined), math.fsum(defined) / len(defined)
    return {
        f"{name}_difference": high - low,
        f"{name}_ratio": low / high if high > 0 else math.nan,
        f"{name}_group_min": low,
        f"{name}_group_max": high,
        f"{name}_std": math.sqrt(math.fsum((value - mean) ** 2 for value in defined) / len(defined)),
    }


def disparities(group_metrics: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Return demographic parity, equalised odds and equal opportunity, each as difference and as ratio.

    The values equal those of fairlearn (``agg="worst_case"``) where every rate is defined; a rate without any record
    to count, which fairlearn takes for zero, is left out here.

    Examples:
        >>> rates = {"selection_rate": {"a": 0.5, "b": 0.25}, "tpr": {"a": 1.0, "b": 0.8}, "fpr": {"a": 0.2, "b": 0.1}}
        >>> {name: round(value, 6) for name, value in disparities(rates).items() if name.endswith("difference")}
        {'demographic_parity_difference': 0.25, 'equalized_odds_difference': 0.2, 'equal_opportunity_difference': 0.2}
    """
    apart = {name: differences(name, group_metrics.get(name, {}).values()) for name in ("selection_rate", "tpr", "fpr")}
    parts: Sequence[tuple[str, tuple[str, ...]]] = (
        ("demographic_parity", ("selection_rate",)),
        ("equalized_odds", ("tpr", "fpr")),
        ("equal_opportunity", ("tpr",)),
    )
    values: dict[str, float] = {}
    for name, rates in parts:
        if all(apart[rate] for rate in rates):
            values[f"{name}_difference"] = max(apart[rate][f"{rate}_difference"] for rate in rates)
            ratios = [apart[rate][f"{rate}_ratio"] for rate in rates]
            values[f"{name}_ratio"] = min((ratio for ratio in ratios if math.isfinite(ratio)), default=math.nan)
    return values


def sentence(row: Mapping[str, Any]) -> str:
    """Return the metrics of one line of metrics.jsonl over all records, in one sentence.

    Examples:
        >>> sentence({"records": 100, "metrics": {"mae": 0.5, "r2": None}})
        'On 100 held-out records: mean absolute error 0.5.'
    """
    known_metrics = {name: number for name, number in row["metrics"].items() if name in METRICS and number is not None}
    shown = ", ".join(f"{METRICS[name].words} {number:.4g}" for name, number in known_metrics.items())
    return f"On {row['records']} held-out records: {shown}."


@dataclass(frozen=True)
class Drop:
    """A group's initial drop, in epochs; ``recovered`` is False when it lasts until the last evaluation."""

    group: str
    start: float
    end: float
    depth: float
    recovered: bool

    @property
    def length(self) -> float:
        """Return how long the drop lasts, in epochs."""
        return self.end - self.start


def initial_drops(curves: Sequence[Mapping[str, Any]]) -> list[Drop]:
    """Return the groups that fall behind at the start of training, longest drop first.

    A group is in its initial drop from the first evaluation for as long as its accuracy stays below its own start (or
    at zero) while the overall accuracy is above its start. The drop ends at the first evaluation where that is over.
    Two evaluations in a row are needed: one alone may be chance.

    Args:
        curves: evaluations in order: {"epoch", "accuracy", "groups": {name: accuracy}}.

    Examples:
        >>> rows = [{"epoch": float(e), "accuracy": 0.1 + e / 9, "groups": {"a": e / 9, "b": b}}
        ...         for e, b in enumerate([0.2, 0.0, 0.1, 0.4, 0.6])]
        >>> [(drop.group, drop.start, drop.end, drop.recovered) for drop in initial_drops(rows)]
        [('b', 0.0, 3.0, True)]
    """
    if len(curves) < 3:
        return []
    if any(row["accuracy"] is None for row in curves):
        return []
    drops = [_drop(name, curves) for name, share in curves[0].get("groups", {}).items() if share is not None]
    return sorted((drop for drop in drops if drop is not None), key=lambda drop: -drop.length)


def _drop(name: str, curves: Sequence[Mapping[str, Any]]) -> Drop | None:
    first = curves[0]
    start, overall = float(first["groups"][name]), float(first["accuracy"])
    below: list[Mapping[str, Any]] = []
    for row in curves[1:]:
        value = row.get("groups", {}).get(name)
        if value is None or not ((value < start or value == 0) and row["accuracy"] > overall):
            break
        below.append(row)
    if len(below) < 2:
        return None
    recovered = len(below) < len(curves) - 1
    end = curves[len(below) + 1] if recovered else curves[-1]
    depth = start - min(float(row["groups"][name]) for row in below)
    return Drop(name, float(first["epoch"]), float(end["epoch"]), depth, recovered)
