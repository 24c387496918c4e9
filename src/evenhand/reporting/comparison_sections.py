"""Writes the sections of a comparison from its lines: a method at a promise, metrics with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from evenhand import _numbers
from evenhand._numbers import bare_percent, promised, rounded_up
from evenhand.reporting import replicas
from evenhand.reporting.comparison_charts import dots
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out import small_cells
from evenhand.reporting.page import Block, Notes, Section, Table, Words, figure
from evenhand.reporting.replicas import Rows
from evenhand.reporting.text import label, listed
from evenhand.reporting.uncertainty import LEVEL, Split, distinct, of_values, share_variance

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
        metrics: mean and interval over trainings by name: accuracy, balanced_accuracy, accuracy_group_min, ...
        groups: accuracy per group, likewise; ``count`` is the group's held-out records in one training.
        costs: points that privacy costs each group against the non-private reference; empty without one.
        cost: points that privacy costs over all records.
        cost_gap: the largest difference of cost between two groups.
        owners: accuracy per owner, where owners of the held-out records are known.
        budgets: promised and spent epsilon per owner, where owners have budgets of their own.
        training: accuracy, gradient norm and share clipped on TRAINING records per group: for research only.
        against: differences to the baseline in points, paired by seed: accuracy, worst, gap, owner:NAME.
        changed: those of accuracy and worst at ``level``, which sentences rest on.
        effort: what tuning took; None if nothing was tuned.
        seconds: processor seconds of all its final trainings.
        rows: the last evaluation of each training by seed.
        settings: what its trainings were made with.
        reference: the last evaluations of the non-private reference; empty without one.
        split: whether every seed had a split of its own.
        level: at which a group is named, corrected for all that the comparison looks at.
        cell: digest of everything that decides the trainings but their seeds.
        small: groups with too few held-out records to be named, by number; 0 where even that is not shared.
        asked: metrics that the comparison is about, each by group.
        asked_costs: how much privacy adds to each of them against the non-private reference; empty without one.
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
    changed: Mapping[str, Estimate] = field(default_factory=dict)
    effort: Effort | None = None
    seconds: float = 0.0
    rows: Rows = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: Rows = field(default_factory=dict)
    split: Split = field(default_factory=Split)
    level: float = LEVEL
    cell: str = ""
    small: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    asked_costs: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)

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
        """Return accuracy of the worst group of each training, among those with enough held-out records."""
        return self.metrics.get("accuracy_group_min", NOTHING)

    @property
    def majority(self) -> float:
        """Return the share of the most common label among held-out records; NaN if not known."""
        known = [float(row["majority"]) for row in self.rows.values() if row.get("majority") is not None]
        return sum(known) / len(known) if known else math.nan

    @property
    def gain(self) -> Estimate:
        """Return by how many points the method beats the most common label; not measured if that is not known."""
        rows = {seed: row for seed, row in self.rows.items() if row.get("majority") is not None}
        values = [100 * (float(row["accuracy"]) - float(row["majority"])) for row in rows.values()]
        records = distinct(replicas.independent(rows), len(rows), self.split)
        chance = (
            1e4 * (replicas.variance(rows, self.split) + share_variance(self.majority, records)) if records else 0.0
        )
        return of_values(values, chance, replicas.size(rows), self.split)

    @cached_property
    def worst_group(self) -> str:
        """Return the group that is served worse than all others; empty if none can be told."""
        return replicas.served_worst(self.rows, self.split, level=self.level)

    @cached_property
    def pays_most(self) -> str:
        """Return the group that pays more for privacy than all others; empty if none can be told."""
        if not self.costs or not self.private:
            return ""
        return replicas.pays_most(self.rows, self.reference, self.split, level=self.level)


@dataclass(frozen=True)
class Verdict:
    """A declared claim at one promise: the verdict, the difference in points that it rests on, and the power in words.

    ``difference.count`` is the number of trainings; its interval holds together with those of all other claims.
    """

    text: str
    promise: str
    verdict: str
    difference: Estimate
    power: str = ""
    matters: float = 1.0


NAMES = {"accuracy": "all records", "worst": "worst group", "gap": "gap between groups", "worst_owner": "worst owner"}
OWNERS_COMPARED = 20
"""Owners whose differences a page lists; table.csv has all."""
OWNERS_LISTED = 60
"""Owners that a page lists, strictest promise first; the tables beside it have all."""


def difference(points: Estimate | None) -> str:
    """Return a difference in points with its interval; a plus sign where it is above zero.

    Examples:
        >>> difference(Estimate(1.25, -0.5, 3.0, 5)), difference(None)
        ('+1.2 (-0.5 to +3.0)', 'not measured')
    """
    return _numbers.MISSING if points is None else _numbers.difference(points.value, points.low, points.high)


def mean(estimate: Estimate | None, unit: str) -> str:
    """Return an estimate over seeds with its interval, without its unit; ``"%"`` means that it is a share.

    Examples:
        >>> mean(Estimate(0.5, 0.4, 0.6, 3), "%"), mean(None, "points")
        ('50.0 (40 to 60)', 'not measured')
    """
    scale = 100 if unit == "%" else 1
    if estimate is not None and small_cells.hidden(estimate):
        return small_cells.words(estimate.count)
    return _numbers.MISSING if estimate is None else _numbers.mean(estimate.value, estimate.low, estimate.high, scale)


def difference_names(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the differences that entries have, with the words for them, in order.

    Examples:
        >>> difference_names([Entry("a", 3.0, against={"owner:x": Estimate(1, 0, 2, 3)})])
        {'owner:x': 'owner x'}
    """
    names = dict.fromkeys(name for entry in entries for name in entry.against)
    owners = [name for name in names if name.startswith("owner:")][:OWNERS_COMPARED]
    listed = [name for name in names if not name.startswith("owner:")] + owners
    return {name: NAMES.get(name, name.replace("owner:", "owner ", 1)) for name in listed}


def verdict_line(claim: Verdict) -> str:
    """Return a claim and its verdict, with the figures.

    Examples:
        >>> verdict_line(Verdict("A beats B", "epsilon 3", "holds", Estimate(2.0, 1.0, 3.0, 5)))
        'A beats B (epsilon 3): holds; difference +2.0 (+1.0 to +3.0) points, 5 seeds.'
    """
    power = f" {claim.power[:1].upper()}{claim.power[1:]}." if claim.power else ""
    return (
        f"{claim.text} ({claim.promise}): {claim.verdict}; difference {difference(claim.difference)} points, "
        f"{claim.difference.count} seeds.{power}"
    )


def tuning_line(entry: Entry) -> str:
    """Return in words how much was tried for one method, and the settings that won.

    Examples:
        >>> from evenhand.reporting.comparison_sections import Effort
        >>> tuning_line(Entry("dpsgd", 3.0, effort=Effort(6, 0, 61.0, {"lr": 0.5})))
        'dpsgd at epsilon 3: 6 trials, 61 processor seconds; chosen lr 0.5.'
    """
    effort = entry.effort
    if effort is None:
        return f"{entry.method}: not tuned."
    failed = f" ({effort.failed} failed)" if effort.failed else ""
    at = f" at {entry.promise}" if entry.private else ""
    return (
        f"{entry.method}{at}: {effort.trials} trials{failed}, {effort.seconds:.0f} processor seconds; "
        f"chosen {effort.words}."
    )


def claims(verdicts: Sequence[Verdict]) -> Section | None:
    """Return the section on claims that were declared beforehand; None without claims.

    Examples:
        >>> claims([]) is None
        True
    """
    if not verdicts:
        return None
    rows = [
        [
            *(claim.text, claim.promise, claim.verdict, difference(claim.difference)),
            *(promised(claim.matters), f"{claim.difference.count}", claim.power),
        ]
        for claim in verdicts
    ]
    head = ["claim", "promise", "verdict", "difference", "smallest that matters", "seeds", "power"]
    caption = (
        f"Declared in the experiment's file. Points, with intervals that hold all at once with 95 % (Bonferroni over "
        f"{len(verdicts)} claims)."
    )
    return Section("What was claimed", [Table(head, rows, caption, False)])


def differences(entries: Sequence[Entry], baseline: str) -> Section | None:
    """Return the section on differences to the baseline; None without one.

    Examples:
        >>> differences([], "dpsgd") is None
        True
    """
    names = difference_names(entries)
    rows = [
        [entry.method, entry.promise, *(difference(entry.against.get(name)) for name in names)]
        for entry in entries
        if entry.against
    ]
    if not rows:
        return None
    caption = (
        "Points, mean and 95 % interval, paired by seed: the same start and the same records on both sides. Each "
        "interval stands for itself: of many, one in twenty misses."
    )
    table = Table(["method", "promise", *names.values()], rows, caption, folded=False)
    return Section(f"Against {label(baseline, 40)}", [table])


def tuning(entries: Sequence[Entry], words: str) -> Section | None:
    """Return the section on how much was tried for each method; None without tuning.

    Examples:
        >>> tuning([Entry("dpsgd", 3.0)], "") is None
        True
    """
    rows = [
        [entry.method, entry.promise, str(entry.effort.trials), f"{entry.effort.seconds:.0f}", entry.effort.words]
        for entry in entries
        if entry.effort is not None
    ]
    if not rows:
        return None
    table = Table(["method", "promise", "trials", "processor seconds", "chosen"], rows, folded=False)
    remark = "A method that lacks a setting of the grid has fewer trials."
    return Section("Tuning, the same for all", [Words(words), table, Notes([remark])])


def promises(entries: Sequence[Entry], terms: str, together: float | None, runs: int, unit: str = "record") -> Section:
    """Return the section on the epsilons of the runs: one by one, and all of them together.

    Examples:
        >>> promises([], "", None, 0).blocks[0].text
        'nothing was promised to anyone.'
    """
    heading = "What is promised"
    if not entries:
        return Section(heading, [Words("nothing was promised to anyone.", strong="Not private:")])
    spent: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        if entry.spent is not None:
            spent.setdefault((entry.promise, rounded_up(entry.spent)), []).append(label(entry.method, 40))
    told = [f"{epsilon} at {promise} by {listed(methods)}" for (promise, epsilon), methods in spent.items()]
    words = [
        f"Methods are compared at the same true epsilon ({terms}): every run's spending was recomputed from its "
        f"ledger, by the same accountant for all. Spent: {'; '.join(told)}.",
        f"An epsilon bounds what one released model reveals about one {unit}. It does not cover the held-out records, "
        "preprocessing, or the choice among methods made by looking at this page.",
    ]
    if together is not None:
        words.append(
            f"Whoever sees the results of all {runs} private runs together is bounded by epsilon "
            f"{rounded_up(together)} ({terms}), not by the epsilon of one run."
        )
    return Section(heading, [Words(text) for text in words])


def gradient_norms(entries: Sequence[Entry], numbers: Mapping[str, int], room: int) -> list[Block]:
    """Return mean gradient norm per group as a chart, with training accuracy and share above the bound in a table.

    Args:
        entries: methods with ``training`` values, all at one promise or not private.
        numbers: the page's number of each group, in the order shown.
        room: groups that are drawn.

    Examples:
        >>> one = Estimate(2.0, 1.0, 3.0, 3)
        >>> entry = Entry("dpsgd", 3.0, training={"a": {"norm": one, "accuracy": one, "clipped": one}})
        >>> [block.kind for block in gradient_norms([entry], {"a": 0}, 40)]
        ['figure', 'notes', 'table']
    """
    shown = [entry for entry in entries if entry.training]
    if not shown:
        return []
    rows = [
        (name, {f"{e.method} ({e.promise})": e.training[name]["norm"] for e in shown if name in e.training})
        for name in numbers
    ]
    title = "Mean gradient norm per group at the end of training"
    chart = figure(lambda size: dots(rows[:room], title=title, unit="gradient norm", numbers=numbers, size=size))
    head = ["group"]
    for entry in shown:
        head += [f"{entry.method}: norm", "above bound, %", "bias", "noise", "correct, %"]
    cells = [[name, *(cell for entry in shown for cell in _norm_cells(entry, name))] for name in numbers]
    remarks = [
        "Training records, at most 5,000; means and 95 % intervals over seeds. What is above the bound is cut.",
        "Bias: mean norm above the bound. Noise: its standard deviation over the group's expected records in a batch. "
        "A group's mean gradient is off by both (Xu et al. 2021, equation 1): small groups by more noise, groups that "
        "fit badly by more bias.",
    ]
    return [chart, Notes(remarks), Table(head, cells)]


def _norm_cells(entry: Entry, group: str) -> list[str]:
    values = entry.training.get(group, {})
    names = ("norm", "clipped", "bias", "noise", "accuracy")
    norm, clipped, bias, noise, accuracy = (values.get(name) for name in names)
    return [
        "" if norm is None else f"{norm.value:.3g}",
        "" if clipped is None else bare_percent(clipped.value, 0),
        "" if bias is None else f"{bias.value:.3g}",
        "" if noise is None else f"{noise.value:.3g}",
        "" if accuracy is None else bare_percent(accuracy.value),
    ]


def plain(estimate: Estimate | None) -> str:
    """Return a value with its interval in its own unit; empty if there is none.

    Examples:
        >>> plain(Estimate(0.25, 0.2, 0.3, 40)), plain(None)
        ('0.25 (0.2 to 0.3)', '')
    """
    if estimate is None or not estimate.measured:
        return ""
    ends = f" ({estimate.low:.3g} to {estimate.high:.3g})" if math.isfinite(estimate.low) else ""
    return f"{estimate.value:.3g}{ends}"


def owners(entries: Sequence[Entry], terms: str) -> Section | None:
    """Return a table with one row per owner and one column per method; None unless owners have budgets of their own.

    Examples:
        >>> accuracy = Estimate(0.5, 0.4, 0.6, 3)
        >>> entry = Entry("idp_sample", 3.0, seeds=3, owners={"a": accuracy}, budgets={"a": (1.0, 0.9996)})
        >>> owners([entry], "per record").blocks[1].rows
        [['a', '1', '50.0 (40 to 60); spent 1.000']]
    """
    chosen = [entry for entry in entries if entry.budgets]
    budgets = {name: budget for entry in chosen for name, (budget, _) in entry.budgets.items()}
    if not budgets:
        return None
    names = sorted(budgets, key=lambda name: budgets[name])
    rows = [[name, promised(budgets[name]), *(_owner_cell(entry, name) for entry in chosen)] for name in names]
    head = ["owner", "promised epsilon", *(label(entry.method, 40) for entry in chosen)]
    caption = f"Correct, %: mean and 95 % interval; spent epsilon {terms}."
    remarks = [
        "A method that treats owners alike gives everybody the strictest promise, and leaves the others unspent."
    ]
    if len(names) > OWNERS_LISTED:
        remarks.append(f"{OWNERS_LISTED} of {len(names)} owners are listed here; table.csv has all.")
    intro = Words("Held-out records answered correctly, and what was spent, per owner and method.")
    table = Table(head, rows[:OWNERS_LISTED], caption, folded=False)
    return Section("Who keeps which promise", [intro, table, Notes(remarks)])


def _owner_cell(entry: Entry, name: str) -> str:
    spent = f"spent {rounded_up(entry.budgets[name][1])}" if name in entry.budgets else "not promised"
    return f"{mean(entry.owners.get(name), '%')}; {spent}"
