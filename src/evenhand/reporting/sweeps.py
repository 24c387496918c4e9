"""The report of a comparison: who pays under which method, accuracy against the worst group, and what was promised.

Built like the page of a run. Values of the non-private reference appear only in the research form, marked so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand.reporting.dots import Climb, dots, ladder
from evenhand.reporting.effort import claimed, compared, promised, tuned
from evenhand.reporting.elements import again, chooser, document, figure, made_with, notes, section, table
from evenhand.reporting.entries import Entry, Verdict, finding, points
from evenhand.reporting.frames import Estimate
from evenhand.reporting.inside import inside
from evenhand.reporting.owning import per_owner
from evenhand.reporting.text import escape, label, tiny

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

    @property
    def private(self) -> list[Entry]:
        """Entries that keep a promise and have a finished run."""
        return [entry for entry in self.entries if entry.private and entry.seeds]

    @property
    def promises(self) -> list[str]:
        """What was promised, strictest first."""
        ordered = sorted(self.private, key=lambda entry: entry.epsilon or 0.0)
        return list(dict.fromkeys(entry.promise for entry in ordered))

    @property
    def costed(self) -> bool:
        """Whether there is a reference to count costs against."""
        return any(entry.costs for entry in self.private)

    @property
    def terms(self) -> str:
        """What every epsilon on the page refers to."""
        return f"per record, add/remove, delta\u00a0{tiny(self.delta)}"

    @property
    def room(self) -> tuple[int, int]:
        """How many groups can be drawn and listed for every promise, so that the page stays small."""
        width = max(1, len({entry.method for entry in self.private}) * len(self.promises[:_PROMISES]))
        return max(8, min(40, _DRAWN // width)), max(20, _LISTED // width)

    @property
    def numbers(self) -> dict[str, int]:
        """Each group's number in charts and buttons: who pays most, or is served worst, comes first."""
        names = list(dict.fromkeys(name for entry in self.entries for name in entry.groups))
        return {name: number for number, name in enumerate(sorted(names, key=self._rank))}

    def _rank(self, name: str) -> float:
        found = [
            -entry.costs[name].value if self.costed else entry.groups[name].value
            for entry in self.private
            if name in (entry.costs if self.costed else entry.groups)
        ]
        known = [value for value in found if math.isfinite(value)]
        return sum(known) / len(known) if known else math.inf


def lead(data: ComparisonData) -> str:
    """The headline: what the middle promise does to whom, for every method, worst first.

    Examples:
        >>> lead(ComparisonData("T", [], 1e-4, None, 0, 0, {}, ""))
        'No run was finished, so there is nothing to compare yet.'
    """
    if not data.promises:
        done = [entry for entry in data.entries if entry.seeds]
        return " ".join(finding(entry) for entry in done[:2]) or (
            "No run was finished, so there is nothing to compare yet."
        )
    middle = data.promises[len(data.promises) // 2]
    chosen = [entry for entry in data.private if entry.promise == middle]
    if not data.costed or not all(entry.pays_most for entry in chosen):
        return finding(min(chosen, key=lambda entry: entry.worst.value))
    chosen = sorted(chosen, key=lambda entry: -entry.costs[entry.pays_most].value)
    group = chosen[0].pays_most
    paid = [
        f"{points(entry.costs[group].value)} under {label(entry.method, 40)}{_ends(entry.costs[group])}"
        for entry in chosen
        if group in entry.costs
    ]
    more = f" and {len(paid) - 3} more methods below" if len(paid) > 3 else ""
    whole = f"all records together pay {points(chosen[0].cost.value)}"
    return f"At {middle}, {label(group, 60)} pays most: {', '.join(paid[:3])}{more}; {whole}."


def render_comparison(data: ComparisonData) -> str:
    """The whole page.

    Examples:
        >>> page = render_comparison(ComparisonData("T", [], 1e-4, None, 0, 0, {}, ""))
        >>> page.startswith("<!doctype html>")
        True
    """
    return document(data.title, (part(data) for part in _SECTIONS))


def _top(data: ComparisonData) -> str:
    failures = [reason for entry in data.entries for reason in entry.failures]
    alerts = "".join(f"<li>{escape(reason)}</li>" for reason in failures[:20])
    share = "The data are public, so it may be shared." if data.public else "Do not share this copy."
    secret = (
        f'<p class="alert"><strong>Contains values marked \u201c{RESEARCH}\u201d:</strong> those of a model trained '
        f"without privacy, and differences to it. {share}</p>"
    )
    failed = f'<div class="alert" role="note"><p>Runs that failed:</p><ul>{alerts}</ul></div>' if alerts else ""
    found = "".join(
        f"<li>{escape(finding(entry))}{_research(not entry.private or bool(entry.costs))}</li>"
        for entry in data.entries
        if entry.seeds
    )
    return (
        f'<header><h1>{escape(label(data.title))}</h1><p class="lead">{escape(lead(data))}</p>'
        f"{secret if data.research else ''}{failed}{f'<ul>{found}</ul>' if found else ''}</header>"
    )


def _who(data: ComparisonData) -> str:
    if not data.private or not data.numbers:
        return ""
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
        charts.append(_payers(data, promise, chosen, promise == middle))
    remarks = [
        f"Means over seeds with 95 % t-intervals over seeds, which say how much one training differs from the next; "
        f"they do not say how well {data.records:,} held-out records stand for others.",
        "Held-out records are not covered by the privacy promise.",
    ]
    drawn, listed = data.room
    if len(data.numbers) > drawn:
        remarks.append(
            f"Of {len(data.numbers)} groups, worst first, {drawn} are drawn and "
            f"{min(listed, len(data.numbers))} are in the tables here; table.csv has all."
        )
    body = f"<p>{words}{_research(data.costed)}</p>{chooser(data.numbers)}{''.join(charts)}{notes(remarks)}"
    return section(title, body)


def _payers(data: ComparisonData, promise: str, chosen: Sequence[Entry], shown: bool) -> str:
    unit = "points" if data.costed else "%"
    tables = {entry.method: entry.costs if data.costed else entry.groups for entry in chosen}
    rows = [(name, {method: found[name] for method, found in tables.items() if name in found}) for name in data.numbers]
    title = f"{'Privacy cost' if data.costed else 'Accuracy'} per group at {promise}, {data.terms}"
    chart = figure(lambda size: dots(rows[: data.room[0]], title=title, unit=unit, numbers=data.numbers, size=size))
    cells = [[name, *(_cell(found.get(method), unit) for method in tables)] for name, found in rows[: data.room[1]]]
    measure = "Privacy cost in points" if data.costed else "Correct, %"
    numbers = table(
        ["group", *tables], cells, f"{measure}, mean and 95 % interval over seeds; {promise}, {data.terms}."
    )
    opened = " open" if shown else ""
    heading = f"<summary>{escape(promise[:1].upper() + promise[1:])} ({escape(data.terms)})</summary>"
    return f"<details{opened}>{heading}{chart}{numbers}</details>"


def _owners(data: ComparisonData) -> str:
    body = per_owner(data.private, data.terms)
    return section("Who keeps which promise", body) if body else ""


def _ladder(data: ComparisonData) -> str:
    done = [entry for entry in data.entries if entry.seeds and entry.worst.measured]
    if not done:
        return ""
    methods = list(dict.fromkeys(entry.method for entry in sorted(done, key=lambda entry: not entry.private)))
    places = data.promises + (["not private"] if any(not entry.private for entry in done) else [])
    climbs = []
    for number, method in enumerate(methods):
        own = [entry for entry in done if entry.method == method]
        for words, worst in (("all records", False), ("worst group", True)):
            values = {entry.promise: entry.worst if worst else entry.accuracy for entry in own}
            climbs.append(Climb(f"{method}, {words}", values, number, worst))
    title = f"Accuracy of all records and of the worst group, by promise ({data.terms})"
    chart = figure(lambda size: ladder(climbs, places, title=title, size=size))
    intro = (
        "<p>Full marks: all held-out records. Hollow marks: the worst group of each training. The further apart, the "
        "more the average hides.</p>"
    )
    return section("Accuracy against the worst group", intro + chart + notes([f"Correct, %. Epsilon {data.terms}."]))


def _table(data: ComparisonData) -> str:
    head = ["method", "promise", "all records", "worst group", "lowest", *(["cost", "gap"] if data.costed else [])]
    rows = []
    for entry in data.entries:
        if not entry.seeds:
            rows.append([entry.method, entry.promise, "failed", *[""] * (len(head) - 3)])
            continue
        costs = [_cell(entry.cost, "points"), _cell(entry.cost_gap, "points")] if entry.costs else ["", ""]
        accuracy, worst = _cell(entry.accuracy, "%"), _cell(entry.worst, "%")
        name = entry.method + ("" if entry.private else f" ({RESEARCH})")
        rows.append(
            [name, entry.promise, accuracy, worst, label(entry.worst_group, 24), *(costs if data.costed else [])]
        )
    caption = "Correct, %: mean and 95 % interval over seeds."
    caption += " Cost in points; gap: between who pays most and least." if data.costed else ""
    return section("All methods", f'<div class="wide">{table(head, rows, caption, folded=False)}</div>')


def _inside(data: ComparisonData) -> str:
    if not data.research or not data.promises:
        return ""
    middle = data.promises[len(data.promises) // 2]
    chosen = [entry for entry in data.entries if entry.seeds and entry.promise in (middle, "not private")]
    chosen.sort(key=lambda entry: not entry.private)
    body = inside(chosen, data.numbers, data.room[0])
    intro = f"<p>How large each group's gradients were on the training records.{_research(True)}</p>"
    return section("Inside the training", intro + body) if body else ""


def _promise(data: ComparisonData) -> str:
    return promised(data.private, data.terms, data.together if data.runs > 1 else None, data.runs)


def _made(data: ComparisonData) -> str:
    return made_with(data.facts) + again(data.reproduce)


def _beyond(data: ComparisonData) -> str:
    return claimed(data.verdicts) + compared(data.entries, data.baseline) + tuned(data.entries, data.tuning)


_SECTIONS = (_top, _who, _owners, _ladder, _table, _beyond, _inside, _promise, _made)


def _research(yes: bool) -> str:
    return f' <span class="mark">({RESEARCH})</span>' if yes else ""


def _cell(found: Estimate | None, unit: str) -> str:
    if found is None or not found.measured:
        return "not measured"
    scale, digits = (100, 1) if unit == "%" else (1, 1)
    shown = f"{scale * found.value:.{digits}f}"
    return shown if not math.isfinite(found.low) else f"{shown} ({scale * found.low:.0f} to {scale * found.high:.0f})"


def _ends(found: Estimate) -> str:
    return f" (95\u00a0% interval {found.low:.0f} to {found.high:.0f})" if math.isfinite(found.low) else ""
