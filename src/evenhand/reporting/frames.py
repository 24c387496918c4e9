"""Accuracy per group on held-out records, each with its 95 % Wilson interval and its number of records."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
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
        """Whether there was anything to measure."""
        return math.isfinite(self.value)


@dataclass(frozen=True)
class GroupFrame:
    """One metric, over all records and per group, in the order in which the groups are shown."""

    overall: Estimate
    by_group: dict[str, Estimate]


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share of ``count`` records; everything is possible without records.

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
    """A share of ``count`` records with its interval.

    Examples:
        >>> estimate(1.0, 10).high
        1.0
    """
    low, high = wilson(share, count)
    return Estimate(share if count else math.nan, low, high, count)


def across(name: str, values: Sequence[float]) -> dict[str, float]:
    """How groups differ in one metric, by fairlearn's names; nothing without groups, NaN where undefined.

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
    """Share of held-out records whose prediction is right, overall and per group.

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
        >>> {name: found.value for name, found in frame.by_group.items()}
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
    found = {
        code: estimate(float(share), int(size))
        for code, share, size in frame.by_group[["accuracy", "count"]].itertuples(name=None)
    }
    by_group = {name: found.get(code, estimate(math.nan, 0)) for name, code in codes.items()}
    return GroupFrame(estimate(float(frame.overall["accuracy"]), len(named)), by_group)


def _plain(group: Any) -> Any:
    """A number out of a zero-dimensional array or tensor, so that its name is "3" and not "tensor(3)"."""
    return group.item() if hasattr(group, "item") and getattr(group, "ndim", None) == 0 else group


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that counts: "class 2" before "class 10"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d{1,18})", name)]
