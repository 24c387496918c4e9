"""Writes the report of one run: who is served how well, how it got there, what privacy was spent.

``ReportData`` holds everything that the page shows. A section is a function from it to a ``Section`` of ``page`` (or
None where there is nothing to say), listed in ``_SECTIONS``; the page's head is in ``templates/run.html.j2``. The page
loads nothing and works without its script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from evenhand._numbers import (
    bare_percent,
    count,
    delta,
    interval,
    percent,
    promised,
    rounded_up,
    spent_range,
)
from evenhand.reporting import run_findings
from evenhand.reporting.charts import bars, lines, multiples
from evenhand.reporting.group_metrics import Estimate, GroupFrame
from evenhand.reporting.held_out import effective_records
from evenhand.reporting.held_out.small_cells import SMALL_CELLS, at_most, hidden, instead
from evenhand.reporting.metrics import METRICS, Drop, initial_drops, sentence
from evenhand.reporting.page import (
    Block,
    Bullets,
    Choice,
    Chooser,
    Figure,
    Notes,
    Section,
    Table,
    Words,
    document,
    facts_and_commands,
    figure,
)
from evenhand.reporting.run_findings import against_majority, span_of_large, worst_group
from evenhand.reporting.text import label, listed

_OWNERS = 60  # owners that are drawn, lowest first
_TOGETHER = 8  # groups whose curves share one chart; more get a small one each
_SMALL = 30  # held-out records below which a group's value says little


@dataclass(frozen=True)
class OwnerClass:
    """One owner class, ready to print: what it was promised and has spent, and what a step does to its records."""

    name: str
    records: int
    promised: str
    spent: str
    rate: str
    bound: str
    noise: str


@dataclass(frozen=True)
class ReportData:
    """Everything that a page shows; nothing else is looked up, so what is here is what may be read.

    Attributes:
        title: names the run.
        headline: the finding in one sentence, by ``headline``.
        overall: accuracy over all held-out records.
        groups: accuracy per group.
        curves: evaluations while training: {"step", "epoch", "accuracy", "groups": {name: accuracy}}.
        spending: (step, epsilon) per owner; empty or not finite when the training is not private.
        budgets: the promised epsilon per owner, None when none was promised.
        statement: the privacy statement in words, one paragraph each.
        warnings: what the reader must know first.
        facts: method, data, steps, noise and so on, in the order shown.
        reproduce: the commands that make this run again.
        research: whether the page contains values that are not private and must not be shared.
        delta: the delta that belongs to every epsilon on the page.
        owners: accuracy per owner of held-out records, where owners were given.
        classes: one entry per owner class, where there are several and not too many.
        summary: quantiles over many owner classes, in words.
        majority: share of the largest class among the held-out records.
        metrics: further metrics, each by group; ``together`` has those over all records, ``sides`` how many independent
            records rates are shares of, where a person has several.
        further: sections that others made, behind the first.
        audit: the section on the audit of the promise, before the statement.
        unit: whom the promise is about: "record" or "person"; ``counted`` is what is counted and drawn.
    """

    title: str
    headline: str
    overall: Estimate
    groups: Mapping[str, Estimate]
    curves: Sequence[Mapping[str, Any]]
    spending: Mapping[str, Sequence[tuple[int, float]]]
    budgets: Mapping[str, float | None]
    statement: Sequence[str]
    warnings: Sequence[str]
    facts: Mapping[str, str]
    reproduce: str
    research: bool = False
    delta: float | None = None
    owners: Mapping[str, Estimate] = field(default_factory=dict)
    classes: Sequence[OwnerClass] = ()
    summary: Sequence[str] = ()
    majority: float | None = None
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    sides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    together: Mapping[str, float | None] = field(default_factory=dict)
    further: Sequence[Section] = ()
    audit: Section | None = None
    unit: str = "record"
    counted: str = "record"

    @property
    def worst(self) -> str | None:
        """Return the group that may be called worst; it has one colour on the whole page."""
        return worst_of(self.groups)

    @property
    def terms(self) -> str:
        """Return the words that every epsilon on the page needs: unit, adjacency and delta."""
        at = "delta: see the statement" if self.delta is None else f"delta\u00a0{delta(self.delta)}"
        return f"per {self.unit}, add/remove, {at}"

    @property
    def ranked(self) -> list[str]:
        """Return the groups from the lowest accuracy to the highest; the place is the number the script uses."""
        return sorted(self.groups, key=lambda name: (not self.groups[name].measured, self.groups[name].value))

    @property
    def numbers(self) -> dict[str, int]:
        """Return each group's number in charts and buttons."""
        return {name: number for number, name in enumerate(self.ranked)}

    @property
    def spent(self) -> dict[str, float]:
        """Return epsilon at the end by owner; infinite for an owner without any bound."""
        owners = dict.fromkeys([*self.spending, *self.budgets])
        return {owner: float(self.spending[owner][-1][1]) if self.spending.get(owner) else math.inf for owner in owners}


@dataclass(frozen=True)
class Card:
    """One of the large figures at the top of the page."""

    name: str
    value: str
    detail: str


def headline(overall: Estimate, groups: Mapping[str, Estimate]) -> str:
    r"""Return the finding in one or two plain sentences: who is served worst, and whether the held-out set can tell.

    Examples:
        >>> headline(Estimate(0.96, 0.94, 0.97, 450), {"class 8": Estimate(0.74, 0.66, 0.81, 130),
        ...          "class 1": Estimate(0.98, 0.96, 0.99, 320)}).replace("\u00a0", " ").replace("\u2013", "-")
        'Class 8 is served worst: 74 % correct (66-81 %) against 96 % overall.'
    """
    if not overall.measured:
        return "Nothing was measured: there are no held-out records."
    whole = percent(overall.value, overall.count)
    named_worst = worst_of(groups)
    measured = {name: group for name, group in groups.items() if group.measured}
    few = sum(hidden(group) for group in groups.values())
    missing = len(groups) - len(measured) - few
    if len(measured) < 2:
        words = f"{whole} of held-out records are answered correctly ({_interval(overall)}). No groups to compare."
    elif len({group.value for group in measured.values()}) == 1:
        words = f"All {len(measured)} groups score the same: {whole} correct."
    elif named_worst is None:
        words = f"{whole} of held-out records are answered correctly; no group can be told apart as worst"
        words += f"{span_of_large([(group.value, group.independent) for group in measured.values()])}."
    else:
        group, subject = measured[named_worst], label(named_worst)
        words = (
            f"{subject[:1].upper()}{subject[1:]} is served worst: {percent(group.value, group.count)} correct "
            f"({_interval(group)}) against {whole} overall."
        )
    unmeasured = f" {missing} group{'s have' if missing > 1 else ' has'} no held-out records." if missing else ""
    least = max((group.count for group in groups.values() if hidden(group)), default=0)
    left_out = f" {few} group{'s are' if few > 1 else ' is'} not shown: {at_most(least)}." if few else ""
    return words + unmeasured + left_out


def _lead(headline: str) -> tuple[str, str]:
    """Return the first sentence of a headline, and the others, which a page prints smaller."""
    first, stop, rest = headline.partition(". ")
    return first + stop.strip(), rest


def opening(last: Mapping[str, Any], frame: GroupFrame) -> str:
    """Return the finding in plain sentences; where there is no accuracy, the metrics of these targets."""
    if frame.overall.measured or not last.get("metrics"):
        return headline(frame.overall, frame.by_group)
    return sentence(last)


def worst_of(groups: Mapping[str, Estimate]) -> str | None:
    """Return the group that is served worse than every other by more than chance explains; None if none is."""
    measured = {name: group for name, group in groups.items() if group.measured}
    return worst_group(
        {name: group.value for name, group in measured.items()},
        {name: group.independent for name, group in measured.items()},
    )


def render(data: ReportData) -> str:
    """Return the whole page.

    Examples:
        >>> nothing = Estimate(float("nan"), 0.0, 1.0, 0)
        >>> page = render(ReportData("Run", "Nothing yet.", nothing, {}, [], {}, {}, [], [], {}, ""))
        >>> page.startswith("<!doctype html>") and "Not private" in page
        True
    """
    accuracy = data.overall.value if data.overall.measured else None
    told = against_majority(accuracy, data.majority, data.overall.independent)
    if told is not None:
        data = replace(data, warnings=[told, *data.warnings])
    sections = [part for make in _SECTIONS if (part := make(data)) is not None]
    sections[1:1] = data.further
    sections += facts_and_commands(data.facts, data.reproduce)
    lead, beside = _lead(data.headline)
    return document(
        "run.html.j2", data.title, report=data, lead=lead, beside=beside, cards=_cards(data), sections=sections
    )


def _cards(data: ReportData) -> list[Card]:
    cards = [Card("Overall", percent(data.overall.value, data.overall.count), _detail(data.overall))]
    if data.worst is not None:
        group = data.groups[data.worst]
        cards.append(Card(f"Worst: {label(data.worst)}", percent(group.value, group.count), _detail(group)))
    ends = sorted(data.spent.values())
    if not ends or math.isinf(ends[-1]):
        privacy = "not private" if not ends or math.isinf(ends[0]) else "partly private"
        return [*cards, Card("Privacy", privacy, "see below")]
    return [*cards, Card("Spent epsilon", spent_range(ends[0], ends[-1]), data.terms)]


def _groups(data: ReportData) -> Section:
    """Return accuracy per group."""
    rows = sorted(data.groups.items(), key=lambda item: (not item[1].measured, item[1].value, -item[1].count))
    heading = "Accuracy per group"
    if not rows:
        return Section(heading, [Words("No groups were given, so none were measured.")])
    title = "Share of held-out records answered correctly, per group"
    constant = None if data.majority is None else ("always answering the largest class", data.majority)
    look: dict[str, Any] = {"numbers": data.numbers, "worst": data.worst, "baseline": constant}
    first = figure(lambda size: bars(rows, title=title, reference=("overall", data.overall), size=size, **look))
    rates = _by_rate(data)
    chart: Block = Choice("Metric", {"accuracy": first, **rates}) if rates else first
    cells = [[name, *_cells(e)] for name, e in rows]
    few = [label(name, 40) for name, e in rows if e.measured and e.independent < _SMALL]
    remarks = [
        "Measured on held-out records, which the privacy promise does not cover. Whiskers are 95 % Wilson intervals"
        + (", one group at a time: among many groups the lowest is partly so by chance." if len(rows) > 1 else "."),
        *effective_records.words(data.overall.count, data.overall.independent),
    ]
    if few:
        named = listed(few[:5] + ([f"{len(few) - 5} more"] if len(few) > 5 else []))
        fewer = "Fewer than" if data.overall.effective is None else "Counted as fewer than"
        remarks.append(f"{fewer} {_SMALL} held-out records: {named}. Read these values with care.")
    if any(hidden(e) for _, e in rows):
        remarks.append(f"Left out, because held-out records are people too: {SMALL_CELLS}.")
    if not data.research:
        remarks.append("Not measured here, because it would not be private: accuracy on the training records.")
    numbers = Table(["group", "correct, %", "95 % interval", "records"], cells)
    return Section(heading, [Words(f"{title}, lowest first."), Chooser(data.numbers), chart, Notes(remarks), numbers])


def _by_rate(data: ReportData) -> dict[str, Figure]:
    """Return a chart for each further rate of two classes, in the order and colours of the first one."""
    measured = {name: e for name, e in data.groups.items() if e.measured}
    sizes = {"group_records": {name: e.count for name, e in measured.items()}}
    worth = {effective_records.BY_GROUP: {name: e.independent for name, e in measured.items()}}
    row = {**sizes, **worth, effective_records.BY_SIDE: data.sides, "group_metrics": data.metrics}
    rates, missing = run_findings.per_group(row), Estimate(math.nan, math.nan, math.nan, 0)

    def drawn(name: str) -> Figure:
        rows = [(group, rates[name].get(group, missing)) for group in data.ranked]
        look: dict[str, Any] = {"numbers": data.numbers, "worst": data.worst}
        return figure(lambda size: bars(rows, title=METRICS[name].words, size=size, **look))

    return {name: drawn(name) for name in rates if name != "accuracy" and rates[name]}


def _metrics(data: ReportData) -> Section | None:
    return run_findings.metrics_section(data.metrics, data.groups, data.ranked, data.together)


def _owners(data: ReportData) -> Section | None:
    """Return accuracy per owner, where there are several."""
    if len(data.owners) < 2:
        return None
    rows = sorted(data.owners.items(), key=lambda item: (not item[1].measured, item[1].value))[:_OWNERS]
    title = "Share of held-out records answered correctly, per owner"
    chart = figure(lambda size: bars(rows, title=title, reference=("overall", data.overall), size=size))
    budgets = {name: promised(limit) for name, limit in data.budgets.items()}
    budgets |= {owner.name: owner.promised for owner in data.classes}
    cells = [[name, *_cells(e), budgets.get(name, "")] for name, e in rows]
    head = ["owner", "correct, %", "95 % interval", "records", "promised epsilon"]
    intro = Words(f"{title}, lowest first: does a stricter promise cost its owner more?")
    return Section("Accuracy per owner", [intro, chart, Table(head, cells, f"Epsilon {data.terms}.")])


def _curves(data: ReportData) -> Section:
    """Return how each group learned: a curve per group, the longest initial drop shaded, the values as a table."""
    heading, curves = "While training", [row for row in data.curves if row["accuracy"] is not None]
    if not curves:
        return Section(heading, [Words("No evaluation was recorded during training, so there is no curve to draw.")])
    drops = initial_drops(curves)
    names = list(dict.fromkeys([*data.ranked, *(name for row in curves for name in row.get("groups", {}))]))
    whole = next(key for key in ("overall", "all records", "all held-out records together") if key not in names)
    series = {whole: [(float(row["epoch"]), 100 * float(row["accuracy"])) for row in curves]}
    for name in names:
        known = [row for row in curves if row.get("groups", {}).get(name) is not None]
        series[name] = [(float(row["epoch"]), 100 * float(row["groups"][name])) for row in known]
    longest = drops[0] if drops else None
    many = len(series) - 1 > _TOGETHER
    title = "Accuracy per group on held-out records while training"
    axes: dict[str, Any] = {"title": title, "x_label": "epoch", "y_label": "correct, %", "highlight": data.worst}
    small = (
        figure(lambda size: multiples(series, whole=whole, numbers=data.numbers, size=size, **axes)) if many else None
    )
    chart = small or figure(
        lambda size: lines(
            series,
            **axes,
            band=None if longest is None else (longest.start, longest.end, f"{label(longest.group, 40)}: initial drop"),
            numbers=data.numbers,
            size=size,
        )
    )
    last = len(curves) - 1
    picked = [curves[i] for i in sorted({last * part // 4 for part in range(5)})]
    head = ["group", *(f"{float(row['epoch']):.3g}" for row in picked)]
    cells = [[whole, *(bare_percent(row.get("accuracy"), 0) for row in picked)]]
    cells += [[name, *(bare_percent(row.get("groups", {}).get(name), 0) for row in picked)] for name in names]
    remarks = _drops_in_words(drops)
    intro = Words("Accuracy on the same held-out records after each evaluation, per group.")
    return Section(heading, [intro, chart, Notes(remarks), Table(head, cells, "Correct, %, after this many epochs.")])


def _bounds(data: ReportData) -> Section | None:
    return run_findings.bounds_section(data.curves, data.worst)


def _spending(data: ReportData) -> Section:
    """Return what each step spent, by owner, and what a step does to a record of each owner class."""
    heading = "Privacy spent"
    drawn = {owner: points for owner, points in data.spending.items() if math.isfinite(data.spent[owner])}
    unbounded = [label(owner, 40) for owner, end in data.spent.items() if math.isinf(end)]
    open_end = "nothing bounds what this model reveals about a single record, so there is no epsilon to draw."
    if not drawn:
        return Section(heading, [Words(open_end, strong="Not private:")])
    limits = {owner: limit for owner in drawn if (limit := data.budgets.get(owner)) is not None}
    chart = figure(
        lambda size: lines(
            drawn,
            title=f"Spent epsilon over steps ({data.terms})",
            x_label="step",
            y_label=f"spent epsilon (per {data.unit}, add/remove)",
            limits=limits,
            printed=rounded_up,
            size=size,
        )
    )
    rows = [
        [owner, count(points[-1][0]), rounded_up(points[-1][1]), promised(limits.get(owner))]
        for owner, points in drawn.items()
    ]
    remarks = [f"Epsilon {data.terms}. Dashed: what was promised. Spent values are rounded up."]
    if unbounded:
        remarks.append(f"Not private, for records of {listed(unbounded)}: {open_end}")
    intro = Words("What each step of the training spent of the promise made to each " + data.unit + ", by owner.")
    numbers = Table(["owner", "steps", "spent epsilon", "promised"], rows, f"Epsilon {data.terms}.")
    return Section(heading, [intro, chart, Notes(remarks), numbers, *_owner_classes(data)])


def _owner_classes(data: ReportData) -> list[Block]:
    """Return what a step does to a record of each owner class: a table of a few, quantiles of many."""
    if data.summary:
        intro = f"Over all owner classes ({data.terms}); owners.csv in the run folder has them all:"
        return [Words(intro), Bullets([Words(line) for line in data.summary])]
    if not data.classes:
        return []
    head = ["owner", f"{data.counted}s", "promised epsilon", "spent epsilon"]
    head += ["sampling rate", "clip bound", "noise multiplier"]
    cells = [[c.name, count(c.records), c.promised, c.spent, c.rate, c.bound, c.noise] for c in data.classes]
    caption = f"What a step does to a {data.counted} of each owner. Epsilon {data.terms}."
    return [Table(head, cells, caption, folded=False)]


def _statement(data: ReportData) -> Section:
    """Return the privacy statement in words."""
    words = data.statement or ["There is no privacy statement for this run."]
    return Section("What is promised", [Words(paragraph) for paragraph in words])


def _rates(data: ReportData) -> Section | None:
    """Return errors of both kinds by group, after the last evaluation."""
    return run_findings.section(data.curves[-1]) if data.curves else None


_SECTIONS = (_groups, _metrics, _rates, _owners, _curves, _bounds, _spending, attrgetter("audit"), _statement)
"""What the page consists of, in order; a section that has nothing to say is None."""


def _interval(estimate: Estimate) -> str:
    return interval(estimate.low, estimate.high, "%", estimate.count)


def _cells(estimate: Estimate) -> list[str]:
    """Return value, interval and number of records for a table."""
    if not estimate.measured:
        return [instead(estimate), "", "" if hidden(estimate) else count(estimate.count)]
    return [bare_percent(estimate.value), _ends(estimate), count(estimate.count)]


def _ends(estimate: Estimate) -> str:
    return f"{bare_percent(estimate.low)}\u2013{bare_percent(estimate.high)}" if estimate.measured else ""


def _detail(estimate: Estimate) -> str:
    if not estimate.measured:
        return "no held-out records"
    return f"{_interval(estimate)}, {count(estimate.count)} held-out records"


def _drops_in_words(drops: Sequence[Drop]) -> list[str]:
    """Return one remark on the longest three drops; none if there is no drop."""
    if not drops:
        return []
    told = [
        f"{label(drop.group, 40)} stayed {'at zero' if drop.depth == 0 else 'below its start'} "
        + (f"until epoch {drop.end:.3g}" if drop.recovered else "to the end")
        + (f", at most {bare_percent(drop.depth, 0)} points" if drop.depth else "")
        for drop in drops[:3]
    ]
    rest = f"; and {len(drops) - 3} more groups" if len(drops) > 3 else ""
    meaning = "Initial drop: a group falls below its first value, or stays at zero, while the overall value rises."
    return [f"{meaning} {'; '.join(told)}{rest}."]
