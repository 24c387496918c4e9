"""Holds one line of a comparison: a method at a promise, every metric as mean and interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand._numbers import NO_BREAK, bare_percent, ends_in_words, points, promised
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.text import label

NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Effort:
    """Cost of tuning one method at one promise: trials, those that failed, processor seconds, and the choice."""

    trials: int
    failed: int
    seconds: float
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Return the chosen settings in words.

        Examples:
            >>> Effort(6, 0, 9.0, {"lr": 0.5, "optimizer": "adam"}).words
            'lr 0.5, optimizer adam'
        """
        numbers = {key: f"{value:g}" if isinstance(value, int | float) else value for key, value in self.chosen.items()}
        return ", ".join(f"{key} {value}" for key, value in numbers.items()) or "nothing to choose"


@dataclass(frozen=True)
class Entry:
    """A method at one promise.

    Attributes:
        method: its name.
        epsilon: what was promised to every record; None for a method that is not private.
        spent: the largest epsilon that the ledgers of its runs charge.
        seeds: trainings that finished.
        failures: why others did not.
        metrics: mean and t-interval over seeds by name: accuracy, balanced_accuracy, accuracy_group_min, ...
        groups: accuracy per group, likewise.
        costs: points that privacy costs each group against the non-private reference; empty without one.
        cost: points that privacy costs over all records.
        cost_gap: the largest difference of cost between two groups.
        owners: accuracy per owner, where owners of the held-out records are known.
        budgets: promised and spent epsilon per owner, where owners have budgets of their own.
        training: accuracy, gradient norm and share clipped on TRAINING records per group: for research only.
        against: differences to the baseline in points, paired by seed: accuracy, worst, gap, owner:NAME.
        effort: what tuning took; None if nothing was tuned.
        seconds: processor seconds of all its final trainings.
        rows: the last evaluation of each training by seed.
        settings: what its trainings were made with.
    """

    method: str
    epsilon: float | None
    spent: float | None = None
    seeds: int = 0
    failures: Sequence[str] = ()
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    groups: Mapping[str, Estimate] = field(default_factory=dict)
    costs: Mapping[str, Estimate] = field(default_factory=dict)
    cost: Estimate = NOTHING
    cost_gap: Estimate = NOTHING
    owners: Mapping[str, Estimate] = field(default_factory=dict)
    budgets: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    training: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    against: Mapping[str, Estimate] = field(default_factory=dict)
    effort: Effort | None = None
    seconds: float = 0.0
    rows: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Return whether a promise is kept."""
        return self.epsilon is not None

    @property
    def promise(self) -> str:
        """Return the promise in words, for charts and tables."""
        if self.budgets:
            budgets = [budget for budget, _ in self.budgets.values()]
            return f"budgets {promised(min(budgets))} to {promised(max(budgets))}"
        return "not private" if self.epsilon is None else f"epsilon {promised(self.epsilon)}"

    @property
    def accuracy(self) -> Estimate:
        """Return accuracy over all held-out records."""
        return self.metrics.get("accuracy", NOTHING)

    @property
    def worst(self) -> Estimate:
        """Return accuracy of the worst group of each training."""
        return self.metrics.get("accuracy_group_min", NOTHING)

    @property
    def worst_group(self) -> str:
        """Return the group with the lowest mean accuracy; empty if none was measured."""
        shares = {name: group.value for name, group in self.groups.items() if group.measured}
        return min(shares, key=lambda name: shares[name], default="")

    @property
    def pays_most(self) -> str:
        """Return the group with the highest mean cost; empty without a reference."""
        costs = {name: cost.value for name, cost in self.costs.items() if cost.measured}
        return max(costs, key=lambda name: costs[name], default="")


@dataclass(frozen=True)
class Verdict:
    """A declared claim at one promise: the verdict, and the difference in points that it rests on."""

    text: str
    promise: str
    verdict: str
    difference: Estimate


def finding(entry: Entry) -> str:
    r"""Return one sentence on what one method does to the group that it serves worst.

    Examples:
        >>> cost = Estimate(41.2, 30.4, 52.0, 3)
        >>> entry = Entry("dpsgd", 3.0, seeds=3, costs={"class 8": cost}, cost=Estimate(6.0, 5.0, 7.0, 3))
        >>> print(finding(entry).replace("\u00a0", " ").replace("; ", ";\n"))
        class 8 pays 41 points under dpsgd at epsilon 3 (95 % interval 30 to 52, 3 seeds);
        all records together 6 points.
    """
    if not entry.seeds:
        return f"{entry.method} at {entry.promise} has no finished run."
    at = f"{label(entry.method, 40)}{f' at {entry.promise}' if entry.private else ', which is not private'}"
    if entry.pays_most and entry.private:
        cost = entry.costs[entry.pays_most]
        if cost.value <= 0:
            return f"No group pays under {at}: none is less accurate than without privacy."
        chance = "" if not cost.low <= 0 else "; too few seeds to tell this from no cost"
        return (
            f"{label(entry.pays_most, 60)} pays {points(cost.value)} under {at} ({_seeds(cost)}){chance}; "
            f"all records together {points(entry.cost.value)}."
        )
    if not entry.worst_group or len(entry.groups) < 2:
        return f"{_percent(entry.accuracy)} of all held-out records are answered correctly under {at}."
    worst = entry.groups[entry.worst_group]
    return (
        f"Under {at}, {label(entry.worst_group, 60)} is served worst: {_percent(worst)} correct "
        f"({_seeds(worst, 100)}) against {_percent(entry.accuracy)} overall."
    )


def _seeds(estimate: Estimate, scale: float = 1.0) -> str:
    if not math.isfinite(estimate.low):
        return "one seed, so no interval"
    ends = ends_in_words(estimate.low, estimate.high, scale)
    return f"95{NO_BREAK}% interval {ends}, {estimate.count} seeds"


def _percent(estimate: Estimate) -> str:
    return f"{bare_percent(estimate.value, 0)}{NO_BREAK}%"
