"""The report as one self-contained HTML page: who is served how well, how it got there, what privacy was spent.

The page loads nothing; its content policy allows only its own style sheet and one small script, by hash, and it works
without the script. Every text that comes from outside passes ``text.escape``. A section is a function from
``ReportData`` to HTML, listed in ``_SECTIONS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand.reporting.curves import while_training
from evenhand.reporting.elements import again, chooser, document, figure, made_with, notes, section, table
from evenhand.reporting.frames import Estimate
from evenhand.reporting.svg import bars, lines
from evenhand.reporting.text import bound, escape, label, listed, percent, span, tiny

_OWNERS = 60  # owners that are drawn, lowest first
_SMALL = 30  # held-out records below which a group's value says little


@dataclass(frozen=True)
class OwnerClass:
    """What a step does to a record of one owner, and what was promised and spent; ready to print."""

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
        headline: the finding in one sentence, as ``headline`` writes it.
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
        classes: what each owner class is exposed to, where there are several and not too many.
        summary: the same of many classes as quantiles, in words.
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

    @property
    def terms(self) -> str:
        """What every epsilon on the page refers to."""
        delta = "delta: see the statement" if self.delta is None else f"delta\u00a0{tiny(self.delta)}"
        return f"per record, add/remove, {delta}"

    @property
    def ranked(self) -> list[str]:
        """Groups from the lowest accuracy to the highest; the place is the number the page's script uses."""
        return sorted(self.groups, key=lambda name: (not self.groups[name].measured, self.groups[name].value))

    @property
    def numbers(self) -> dict[str, int]:
        """Each group's number in charts and buttons."""
        return {name: number for number, name in enumerate(self.ranked)}

    @property
    def spent(self) -> dict[str, float]:
        """Epsilon at the end, by owner; infinite for an owner without any bound."""
        owners = dict.fromkeys([*self.spending, *self.budgets])
        return {owner: float(self.spending[owner][-1][1]) if self.spending.get(owner) else math.inf for owner in owners}


def headline(overall: Estimate, groups: Mapping[str, Estimate]) -> str:
    r"""The finding in one or two plain sentences: who is served worst, and whether the held-out set can tell.

    Examples:
        >>> headline(Estimate(0.96, 0.94, 0.97, 450), {"class 8": Estimate(0.74, 0.66, 0.81, 130),
        ...          "class 1": Estimate(0.98, 0.96, 0.99, 320)}).replace("\u00a0", " ").replace("\u2013", "-")
        'Class 8 is served worst: 74 % correct (66-81 %) against 96 % overall.'
    """
    if not overall.measured:
        return "Nothing was measured: there are no held-out records."
    whole = percent(overall.value, overall.count)
    found = {name: group for name, group in groups.items() if group.measured}
    missing = len(groups) - len(found)
    lowest = min((group.value for group in found.values()), default=math.nan)
    worst = [name for name, group in found.items() if group.value == lowest]
    if len(found) < 2:
        words = f"{whole} of held-out records are answered correctly ({_interval(overall)}). No groups to compare."
    elif len(worst) == len(found):
        words = f"All {len(found)} groups score the same: {whole} correct."
    else:
        named = [label(name, 60) for name in worst[:2]] + ([f"{len(worst) - 2} more"] if len(worst) > 2 else [])
        subject = listed(named)
        verb, group = ("is" if len(worst) == 1 else "are"), found[worst[0]]
        words = (
            f"{subject[:1].upper()}{subject[1:]} {verb} served worst: {percent(lowest, group.count)} correct "
            f"({_interval(group)}) against {whole} overall"
        )
        words += "." if group.high < overall.value else "; too few held-out records to tell the difference from chance."
    unmeasured = f" {missing} group{'s have' if missing > 1 else ' has'} no held-out records." if missing else ""
    return words + unmeasured


def render(data: ReportData) -> str:
    """The whole page.

    Examples:
        >>> nothing = Estimate(float("nan"), 0.0, 1.0, 0)
        >>> page = render(ReportData("Run", "Nothing yet.", nothing, {}, [], {}, {}, [], [], {}, ""))
        >>> page.startswith("<!doctype html>") and "Not private" in page
        True
    """
    return document(data.title, (part(data) for part in _SECTIONS))


def _top(data: ReportData) -> str:
    found = [item for item in data.groups.items() if item[1].measured]
    worst = min(found, key=lambda item: item[1].value, default=None)
    cards = [("Overall", percent(data.overall.value, data.overall.count), _detail(data.overall))]
    if worst and len(data.groups) > 1:
        cards.append((f"Lowest: {label(worst[0], 40)}", percent(worst[1].value, worst[1].count), _detail(worst[1])))
    ends = sorted(data.spent.values())
    if not ends or math.isinf(ends[-1]):
        cards.append(("Privacy", "not private" if not ends or math.isinf(ends[0]) else "partly private", "see below"))
    else:
        shown = bound(ends[0]) if len(ends) == 1 else f"{bound(ends[0])} to {bound(ends[-1])}"
        cards.append(("Spent epsilon", shown, data.terms))
    boxes = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="big">{escape(value)}</dd><dd>{escape(more)}</dd></div>'
        for name, value, more in cards
    )
    secret = '<p class="alert"><strong>Research copy, do not share:</strong> some values here are not private.</p>'
    alerts = "".join(f"<li>{escape(warning)}</li>" for warning in data.warnings)
    return (
        f"<header><h1>{escape(label(data.title))}</h1>"
        f'<p class="lead">{escape(data.headline)}</p>{secret if data.research else ""}'
        + (f'<div class="alert" role="note"><ul>{alerts}</ul></div>' if alerts else "")
        + f'<dl class="cards">{boxes}</dl></header>'
    )


def _who(data: ReportData) -> str:
    rows = sorted(data.groups.items(), key=lambda item: (not item[1].measured, item[1].value, -item[1].count))
    if not rows:
        return section("Accuracy per group", "<p>No groups were given, so none were measured.</p>")
    title = "Share of held-out records answered correctly, per group"
    overall = ("overall", data.overall)
    chart = figure(lambda size: bars(rows, title=title, reference=overall, numbers=data.numbers, size=size))
    cells = [
        [name, f"{100 * e.value:.1f}" if e.measured else "not measured", _ends(e), f"{e.count:,}"] for name, e in rows
    ]
    few = [label(name, 40) for name, e in rows if e.measured and e.count < _SMALL]
    remarks = [
        "Measured on held-out records, which the privacy promise does not cover. Whiskers are 95 % Wilson intervals"
        + (", one group at a time: among many groups the lowest is partly so by chance." if len(rows) > 1 else ".")
    ]
    if few:
        named = listed(few[:5] + ([f"{len(few) - 5} more"] if len(few) > 5 else []))
        remarks.append(f"Fewer than {_SMALL} held-out records: {named}. Read these values with care.")
    if not data.research:
        remarks.append("Not measured here, because it would not be private: accuracy on the training records.")
    numbers = table(["group", "correct, %", "95 % interval", "records"], cells)
    return section(
        "Accuracy per group", f"<p>{title}, lowest first.</p>{chooser(data.numbers)}{chart}{notes(remarks)}{numbers}"
    )


def _owners(data: ReportData) -> str:
    """Accuracy per owner, where there are several."""
    if len(data.owners) < 2:
        return ""
    rows = sorted(data.owners.items(), key=lambda item: (not item[1].measured, item[1].value))[:_OWNERS]
    title = "Share of held-out records answered correctly, per owner"
    chart = figure(lambda size: bars(rows, title=title, reference=("overall", data.overall), size=size))
    promised = {name: "none" if limit is None else f"{limit:g}" for name, limit in data.budgets.items()}
    promised |= {found.name: found.promised for found in data.classes}
    cells = [[name, f"{100 * e.value:.1f}", _ends(e), f"{e.count:,}", promised.get(name, "")] for name, e in rows]
    head = ["owner", "correct, %", "95 % interval", "records", "promised epsilon"]
    numbers = table(head, cells, f"Epsilon {data.terms}.")
    intro = f"<p>{title}, lowest first: does a stricter promise cost its owner more?</p>"
    return section("Accuracy per owner", f"{intro}{chart}{numbers}")


def _how(data: ReportData) -> str:
    return while_training(data.curves, data.ranked, data.numbers)


def _spent(data: ReportData) -> str:
    drawn = {owner: points for owner, points in data.spending.items() if math.isfinite(data.spent[owner])}
    unbounded = [label(owner, 40) for owner, end in data.spent.items() if math.isinf(end)]
    open_end = "nothing bounds what this model reveals about a single record, so there is no epsilon to draw."
    if not drawn:
        return section("Privacy spent", f"<p><strong>Not private:</strong> {open_end}</p>")
    promised = {owner: data.budgets.get(owner) for owner in drawn}
    limits = {owner: limit for owner, limit in promised.items() if limit is not None and math.isfinite(limit)}
    title, measure = f"Spent epsilon over steps ({data.terms})", "spent epsilon (per record, add/remove)"
    chart = figure(lambda size: lines(drawn, title=title, x_label="step", y_label=measure, limits=limits, size=size))
    rows = [
        [owner, f"{points[-1][0]:,}", bound(points[-1][1]), f"{limits[owner]:g}" if owner in limits else "none"]
        for owner, points in drawn.items()
    ]
    remarks = [f"Epsilon {data.terms}. Dashed: what was promised. Spent values are rounded up."]
    if unbounded:
        remarks.append(f"Not private, for records of {listed(unbounded)}: {open_end}")
    intro = "<p>What each step of the training spent of the promise made to each record, by owner.</p>"
    numbers = table(["owner", "steps", "spent epsilon", "promised"], rows, f"Epsilon {data.terms}.")
    return section("Privacy spent", intro + chart + notes(remarks) + numbers + _classes(data))


def _classes(data: ReportData) -> str:
    """What a step does to a record of each owner class."""
    if data.summary:
        words = "".join(f"<li>{escape(line)}</li>" for line in data.summary)
        intro = f"Over all owner classes ({escape(data.terms)}); owners.csv in the run folder has them all:"
        return f"<p>{intro}</p><ul>{words}</ul>"
    if not data.classes:
        return ""
    head = ["owner", "records", "promised epsilon", "spent epsilon", "sampling rate", "clip bound", "noise multiplier"]
    cells = [[c.name, f"{c.records:,}", c.promised, c.spent, c.rate, c.bound, c.noise] for c in data.classes]
    caption = f"What a step does to a record of each owner. Epsilon {data.terms}."
    return f'<div class="wide">{table(head, cells, caption, folded=False)}</div>'


def _promise(data: ReportData) -> str:
    words = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in data.statement)
    return section("What is promised", words or "<p>There is no privacy statement for this run.</p>")


def _made(data: ReportData) -> str:
    return made_with(data.facts) + again(data.reproduce)


_SECTIONS = (_top, _who, _owners, _how, _spent, _promise, _made)
"""What the page consists of, in order; a section that has nothing to say returns an empty string."""


def _interval(found: Estimate) -> str:
    return span(found.low, found.high, "%", found.count)


def _ends(found: Estimate) -> str:
    return f"{100 * found.low:.1f}\u2013{100 * found.high:.1f}" if found.measured else ""


def _detail(found: Estimate) -> str:
    return f"{_interval(found)}, {found.count:,} held-out records" if found.measured else "no held-out records"
