"""Writes the report of a comparison: who pays under which method, accuracy against the worst group, what was promised.

Built in the same way as the page of a run: ``ComparisonData`` holds everything, a section is a function listed in
``_SECTIONS``, the page's head is in ``templates/comparison.html.j2``. Values of the non-private reference appear only
in the research form, marked so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand._numbers import bare_percent, count, delta
from evenhand.reporting import comparison_sections
from evenhand.reporting.comparison_charts import MethodLine, accuracy_by_promise, dots
from evenhand.reporting.comparison_findings import findings, lead
from evenhand.reporting.comparison_sections import Entry, Verdict, mean
from evenhand.reporting.held_out.small_cells import LEAST, hidden, instead
from evenhand.reporting.page import (
    Bullets,
    Chooser,
    Fold,
    Notes,
    Section,
    Table,
    Words,
    document,
    facts_and_commands,
    figure,
)
from evenhand.reporting.text import label
from evenhand.reporting.uncertainty import FEWEST

_DRAWN, _LISTED, _PROMISES = 120, 2000, 6  # marks and table cells of all promises together, and promises: page size
RESEARCH = "not private \u2013 research only"


@dataclass(frozen=True)
class ComparisonData:
    """Everything that the page of a comparison shows.

    Attributes:
        title: names the comparison.
        entries: methods and promises, in order; without non-private ones and without costs unless ``research``.
        delta: the delta of every epsilon on the page.
        together: epsilon of all private runs together; None if there are none.
        runs: private runs that finished.
        records: held-out records behind every accuracy.
        facts: data, model, steps and so on, in the order shown.
        reproduce: the command that makes it again.
        research: whether values that are not private are on the page.
        public: whether the data are public, so that a research page may be shared.
        baseline: the method that differences are counted against.
        tuning: how all methods were tuned, and that no epsilon covers it; empty if they were not.
        grid: the values that were tried, by name.
        verdicts: claims declared beforehand.
        setting: public facts of data and model, for programs.
        split: how held-out records were chosen, in a sentence.
        least: held-out records that a group needs for its figures to be on the page.
        unit: whom the promises are about: "record" or "person".
    """

    title: str
    entries: Sequence[Entry]
    delta: float
    together: float | None
    runs: int
    records: int
    facts: Mapping[str, str]
    reproduce: str
    research: bool = False
    public: bool = False
    baseline: str = ""
    tuning: str = ""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)
    split: str = ""
    least: int = LEAST
    unit: str = "record"

    @property
    def private(self) -> list[Entry]:
        """Return the entries that keep a promise and have a finished run."""
        return [entry for entry in self.entries if entry.private and entry.seeds]

    @property
    def promises(self) -> list[str]:
        """Return the promises in words, strictest first."""
        ordered = sorted(self.private, key=lambda entry: entry.epsilon or 0.0)
        return list(dict.fromkeys(entry.promise for entry in ordered))

    @property
    def costed(self) -> bool:
        """Return whether there is a reference to count costs against."""
        return any(entry.costs for entry in self.private)

    @property
    def terms(self) -> str:
        """Return the words that every epsilon on the page needs: unit, adjacency and delta."""
        return f"per {self.unit}, add/remove, delta\u00a0{delta(self.delta)}"

    @property
    def room(self) -> tuple[int, int]:
        """Return how many groups can be drawn and listed for every promise, so that the page stays small."""
        width = max(1, len({entry.method for entry in self.private}) * len(self.promises[:_PROMISES]))
        return max(8, min(40, _DRAWN // width)), max(20, _LISTED // width)

    @property
    def numbers(self) -> dict[str, int]:
        """Return each group's number in charts and buttons: who pays most, or is served worst, comes first."""
        names = list(dict.fromkeys(name for entry in self.entries for name in entry.groups))
        return {name: number for number, name in enumerate(sorted(names, key=self._rank))}

    def _rank(self, name: str) -> float:
        values = [
            -entry.costs[name].value if self.costed else entry.groups[name].value
            for entry in self.private
            if name in (entry.costs if self.costed else entry.groups)
        ]
        known = [value for value in values if math.isfinite(value)]
        return sum(known) / len(known) if known else math.inf


def render_comparison(data: ComparisonData) -> str:
    """Return the whole page.

    Examples:
        >>> page = render_comparison(ComparisonData("T", [], 1e-4, None, 0, 0, {}, ""))
        >>> page.startswith("<!doctype html>")
        True
    """
    sections = [part for make in _SECTIONS if (part := make(data)) is not None]
    headline = lead(data.entries)
    further = [sentence for sentence in findings(data.entries, data.least, data.baseline) if sentence not in headline]
    return document(
        "comparison.html.j2",
        data.title,
        comparison=data,
        lead=headline,
        mark=RESEARCH,
        failures=[reason for entry in data.entries for reason in entry.failures][:20],
        findings=Bullets([Words(sentence, mark=_mark(data.costed)) for sentence in further]),
        sections=sections + facts_and_commands(data.facts, data.reproduce),
    )


def _groups(data: ComparisonData) -> Section | None:
    """Return cost or accuracy per group: a chart and a table for each promise, the middle one unfolded."""
    if not data.private or not data.numbers:
        return None
    title = "What privacy costs each group" if data.costed else "Accuracy per group"
    words = (
        "Points of accuracy that each group loses against the same model trained without privacy. To the right of zero "
        "the group pays; to the left it gains."
        if data.costed
        else "Share of held-out records answered correctly, per group and method."
    )
    charts = []
    middle = data.promises[len(data.promises) // 2]
    for promise in data.promises[:_PROMISES]:
        chosen = [entry for entry in data.private if entry.promise == promise]
        charts.append(_at_promise(data, promise, chosen, promise == middle))
    remarks = [
        f"Means over seeds with 95 % intervals, each for itself, that hold both how much one training differs from the "
        f"next and how well {count(data.records)} held-out records stand for others. {data.split}",
        f"A group is named in words only if it is told apart from all others, corrected for all groups, methods and "
        f"promises; one with fewer than {FEWEST} held-out records never is.",
        "Held-out records are not covered by the privacy promise.",
    ]
    drawn, listed = data.room
    if len(data.numbers) > drawn:
        remarks.append(
            f"Of {len(data.numbers)} groups, worst first, {drawn} are drawn and "
            f"{min(listed, len(data.numbers))} are in the tables here; table.csv has all."
        )
    return Section(title, [Words(words, mark=_mark(data.costed)), Chooser(data.numbers), *charts, Notes(remarks)])


def _at_promise(data: ComparisonData, promise: str, chosen: Sequence[Entry], unfolded: bool) -> Fold:
    unit = "points" if data.costed else "%"
    methods = {entry.method: entry.costs if data.costed else entry.groups for entry in chosen}
    rows = [
        (name, {method: values[name] for method, values in methods.items() if name in values}) for name in data.numbers
    ]
    title = f"{'Privacy cost' if data.costed else 'Accuracy'} per group at {promise}, {data.terms}"
    worst = {entry.pays_most if data.costed else entry.worst_group for entry in chosen}
    look: dict[str, Any] = {"numbers": data.numbers, "worst": worst}
    chart = figure(lambda size: dots(rows[: data.room[0]], title=title, unit=unit, size=size, **look))
    cells = [
        [name, _records(name, chosen), *(mean(values.get(method), unit) for method in methods)]
        for name, values in rows[: data.room[1]]
    ]
    measure = "Privacy cost in points" if data.costed else "Correct, %"
    caption = f"{measure}, mean and 95 % interval; {promise}, {data.terms}. Records: held out in one training."
    summary = f"{promise[:1].upper()}{promise[1:]} ({data.terms})"
    return Fold(summary, [chart, Table(["group", "records", *methods], cells, caption)], open=unfolded)


def _records(name: str, entries: Sequence[Entry]) -> str:
    """Return a group's held-out records, and whether they are too few to tell."""
    shown = next((entry.groups[name] for entry in entries if name in entry.groups), None)
    if shown is None or not shown.count:
        return ""
    if hidden(shown):
        return f"below {shown.count}"
    return count(shown.count) + (" (too few to tell)" if shown.independent < FEWEST else "")


def metrics_asked(entries: Sequence[Entry], numbers: Mapping[str, int], costed: bool) -> Section | None:
    """Return a table per metric that the comparison was asked for: groups by methods; None if nothing was asked.

    With ``costed``, what privacy adds to the metric against the non-private reference stands behind each value.

    Examples:
        >>> from evenhand.reporting.group_metrics import Estimate
        >>> one = Estimate(0.25, 0.2, 0.3, 40)
        >>> metrics_asked([Entry("dpsgd", 3.0, asked={"fpr": {"a": one}})], {"a": 0}, False).blocks[0].rows
        [['a', '0.25 (0.2 to 0.3)']]
    """
    tables = []
    for metric in dict.fromkeys(name for entry in entries for name in entry.asked):
        known = [entry for entry in entries if entry.asked.get(metric)]
        cells = [[name, *(_asked_cell(entry, metric, name, costed) for entry in known)] for name in numbers]
        head = ["group", *(f"{entry.method}, {entry.promise}" for entry in known)]
        caption = f"{metric}: mean and 95 % interval over trainings" + (
            "; after it what privacy adds against the non-private model." if costed else "."
        )
        if known:
            tables.append(Table(head, cells, caption, folded=False))
    return Section("The metrics asked for, per group", tables) if tables else None


def _asked_cell(entry: Entry, metric: str, group: str, costed: bool) -> str:
    estimate, cost = (part.get(metric, {}).get(group) for part in (entry.asked, entry.asked_costs))
    if estimate is None or hidden(estimate):
        return "" if estimate is None else instead(estimate)
    return comparison_sections.plain(estimate) + (f"; {cost.value:+.3g}" if costed and cost is not None else "")


def _asked(data: ComparisonData) -> Section | None:
    return metrics_asked(data.private, data.numbers, data.costed)


def _owners(data: ComparisonData) -> Section | None:
    return comparison_sections.owners(data.private, data.terms)


def _worst_groups(data: ComparisonData) -> Section | None:
    """Return accuracy of all records beside that of the worst group, over the promises."""
    done = [entry for entry in data.entries if entry.seeds and entry.worst.measured]
    if not done:
        return None
    methods = list(dict.fromkeys(entry.method for entry in sorted(done, key=lambda entry: not entry.private)))
    places = data.promises + (["not private"] if any(not entry.private for entry in done) else [])
    climbs = []
    for number, method in enumerate(methods):
        entries = [entry for entry in done if entry.method == method]
        for words, worst in (("all records", False), ("worst group", True)):
            values = {entry.promise: entry.worst if worst else entry.accuracy for entry in entries}
            climbs.append(MethodLine(f"{method}, {words}", values, number, worst))
    title = f"Accuracy of all records and of the worst group, by promise ({data.terms})"
    chart = figure(lambda size: accuracy_by_promise(climbs, places, title=title, size=size))
    intro = Words(
        "Full marks: all held-out records. Hollow marks: the worst group of each training. The further apart, the "
        "more the average hides."
    )
    return Section("Accuracy against the worst group", [intro, chart, Notes([f"Correct, %. Epsilon {data.terms}."])])


def _table(data: ComparisonData) -> Section:
    """Return one row per method and promise; what needs no learning stands beside every accuracy."""
    rated = any(math.isfinite(entry.majority) for entry in data.entries)
    head = [
        "method",
        "promise",
        "all records",
        *(["most common label"] if rated else []),
        "worst group",
        "served worst",
    ]
    asked = list(dict.fromkeys(name for entry in data.entries for name in entry.asked if name != "accuracy"))
    head = [*head[:2], *asked, *head[2:]] + (["cost", "gap"] if data.costed else [])
    rows = []
    for entry in data.entries:
        if not entry.seeds:
            rows.append([entry.method, entry.promise, "failed", *[""] * (len(head) - 3)])
            continue
        costs = [mean(entry.cost, "points"), mean(entry.cost_gap, "points")] if entry.costs else ["", ""]
        name = entry.method + ("" if entry.private else f" ({RESEARCH})")
        rows.append(
            [
                *(name, entry.promise, *(comparison_sections.plain(entry.metrics.get(metric)) for metric in asked)),
                mean(entry.accuracy, "%"),
                *([bare_percent(entry.majority)] if rated else []),
                *(mean(entry.worst, "%"), label(entry.worst_group) if entry.worst_group else "too close to tell"),
                *(costs if data.costed else []),
            ]
        )
    caption = f"Correct, %: mean and 95 % interval. Worst group: of those with at least {FEWEST} held-out records."
    caption += " Most common label: right without any learning." if rated else ""
    caption += " Cost in points; gap: between who pays most and least." if data.costed else ""
    return Section("All methods", [Table(head, rows, caption, folded=False)])


def _claims(data: ComparisonData) -> Section | None:
    return comparison_sections.claims(data.verdicts)


def _differences(data: ComparisonData) -> Section | None:
    return comparison_sections.differences(data.entries, data.baseline)


def _tuning(data: ComparisonData) -> Section | None:
    return comparison_sections.tuning(data.entries, data.tuning)


def _gradients(data: ComparisonData) -> Section | None:
    """Return gradient norms per group on training records; None unless this is the research form."""
    if not data.research or not data.promises:
        return None
    middle = data.promises[len(data.promises) // 2]
    chosen = [entry for entry in data.entries if entry.seeds and entry.promise in (middle, "not private")]
    chosen.sort(key=lambda entry: not entry.private)
    blocks = comparison_sections.gradient_norms(chosen, data.numbers, data.room[0])
    intro = Words("How large each group's gradients were on the training records.", mark=RESEARCH)
    return Section("Inside the training", [intro, *blocks]) if blocks else None


def _promises(data: ComparisonData) -> Section:
    together = data.together if data.runs > 1 else None
    return comparison_sections.promises(data.private, data.terms, together, data.runs, data.unit)


_SECTIONS = (
    *(_asked, _groups, _owners, _worst_groups, _table, _claims),
    *(_differences, _tuning, _gradients, _promises),
)
"""What the page consists of, in order; a section that has nothing to say is None."""


def _mark(research: bool) -> str:
    return RESEARCH if research else ""
