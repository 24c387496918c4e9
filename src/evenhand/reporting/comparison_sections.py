"""Writes the sections of a comparison beyond its charts: owners, claims, differences, tuning, gradients, promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evenhand import _numbers
from evenhand._numbers import bare_percent, promised, rounded_up
from evenhand.reporting.comparison_charts import dots
from evenhand.reporting.comparison_rows import Entry, Verdict
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.page import Block, Notes, Section, Table, Words, figure
from evenhand.reporting.text import label

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
    return (
        f"{claim.text} ({claim.promise}): {claim.verdict}; difference {difference(claim.difference)} points, "
        f"{claim.difference.count} seeds."
    )


def tuning_line(entry: Entry) -> str:
    """Return in words how much was tried for one method, and the settings that won.

    Examples:
        >>> from evenhand.reporting.comparison_rows import Effort
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
    rows = [[claim.text, claim.promise, claim.verdict, difference(claim.difference)] for claim in verdicts]
    caption = "Declared in the experiment's file, judged by the 95 % interval of the difference in points over seeds."
    return Section("What was claimed", [Table(["claim", "promise", "verdict", "difference"], rows, caption, False)])


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
    caption = "Points, mean and 95 % t-interval over seeds, paired: the same start and the same records on both sides."
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


def promises(entries: Sequence[Entry], terms: str, together: float | None, runs: int) -> Section:
    """Return the section on the epsilons of the runs: one by one, and all of them together.

    Examples:
        >>> promises([], "", None, 0).blocks[0].text
        'nothing was promised to anyone.'
    """
    heading = "What is promised"
    if not entries:
        return Section(heading, [Words("nothing was promised to anyone.", strong="Not private:")])
    spent = [
        f"{label(entry.method, 40)} at {entry.promise}: spent {rounded_up(entry.spent)}"
        for entry in entries
        if entry.spent is not None
    ]
    words = [
        f"Methods are compared at the same true epsilon ({terms}): every run's spending was recomputed from its "
        f"ledger, by the same accountant for all. {'; '.join(spent)}.",
        "An epsilon bounds what one released model reveals about one record. It does not cover the held-out records, "
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
        head += [f"{entry.method}: norm", "above bound, %", "correct, %"]
    cells = [[name, *(cell for entry in shown for cell in _norm_cells(entry, name))] for name in numbers]
    remark = "Training records, at most 5,000; means and 95 % intervals over seeds. What is above the bound is cut."
    return [chart, Notes([remark]), Table(head, cells)]


def _norm_cells(entry: Entry, group: str) -> list[str]:
    values = entry.training.get(group, {})
    norm, clipped, accuracy = (values.get(name) for name in ("norm", "clipped", "accuracy"))
    return [
        "" if norm is None else f"{norm.value:.3g}",
        "" if clipped is None else bare_percent(clipped.value, 0),
        "" if accuracy is None else bare_percent(accuracy.value),
    ]


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
    caption = f"Correct, %: mean and 95 % interval over seeds; spent epsilon {terms}."
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
