"""What a comparison says beyond its table: differences to a baseline, declared claims, and what tuning took."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenhand.reporting.elements import notes, section, table
from evenhand.reporting.entries import Entry, Verdict
from evenhand.reporting.frames import Estimate
from evenhand.reporting.text import bound, escape, label

NAMES = {"accuracy": "all records", "worst": "worst group", "gap": "gap between groups", "worst_owner": "worst owner"}
OWNERS = 20
"""Owners whose differences a page lists; table.csv has all."""


def difference(found: Estimate | None) -> str:
    """A difference in points with its interval; a plus sign where it is above zero.

    Examples:
        >>> difference(Estimate(1.25, -0.5, 3.0, 5)), difference(None)
        ('+1.2 (-0.5 to +3.0)', 'not measured')
    """
    if found is None or not found.measured:
        return "not measured"
    shown = f"{found.value:+.1f}"
    return shown if not math.isfinite(found.low) else f"{shown} ({found.low:+.1f} to {found.high:+.1f})"


def difference_names(entries: Sequence[Entry]) -> dict[str, str]:
    """The differences that entries have, with the words for them, in order.

    Examples:
        >>> difference_names([Entry("a", 3.0, against={"owner:x": Estimate(1, 0, 2, 3)})])
        {'owner:x': 'owner x'}
    """
    names = dict.fromkeys(name for entry in entries for name in entry.against)
    owners = [name for name in names if name.startswith("owner:")][:OWNERS]
    kept = [name for name in names if not name.startswith("owner:")] + owners
    return {name: NAMES.get(name, name.replace("owner:", "owner ", 1)) for name in kept}


def verdict_line(found: Verdict) -> str:
    """A claim and its verdict, with the figures.

    Examples:
        >>> verdict_line(Verdict("A beats B", "epsilon 3", "holds", Estimate(2.0, 1.0, 3.0, 5)))
        'A beats B (epsilon 3): holds; difference +2.0 (+1.0 to +3.0) points, 5 seeds.'
    """
    return (
        f"{found.text} ({found.promise}): {found.verdict}; difference {difference(found.difference)} points, "
        f"{found.difference.count} seeds."
    )


def tuning_line(entry: Entry) -> str:
    """What tuning one method took and chose.

    Examples:
        >>> from evenhand.reporting.entries import Effort
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


def claimed(verdicts: Sequence[Verdict]) -> str:
    """The section on what was claimed beforehand; nothing without claims.

    Examples:
        >>> claimed([])
        ''
    """
    rows = [[found.text, found.promise, found.verdict, difference(found.difference)] for found in verdicts]
    caption = "Declared in the experiment's file, judged by the 95 % interval of the difference in points over seeds."
    return (
        section("What was claimed", table(["claim", "promise", "verdict", "difference"], rows, caption, folded=False))
        if rows
        else ""
    )


def compared(entries: Sequence[Entry], baseline: str) -> str:
    """The section on differences to the baseline; nothing without one.

    Examples:
        >>> compared([], "dpsgd")
        ''
    """
    names = difference_names(entries)
    rows = [
        [entry.method, entry.promise, *(difference(entry.against.get(name)) for name in names)]
        for entry in entries
        if entry.against
    ]
    caption = "Points, mean and 95 % t-interval over seeds, paired: the same start and the same records on both sides."
    body = table(["method", "promise", *names.values()], rows, caption, folded=False)
    return section(f"Against {label(baseline, 40)}", f'<div class="wide">{body}</div>') if rows else ""


def tuned(entries: Sequence[Entry], words: str) -> str:
    """The section on how much was tried for each method; nothing without tuning.

    Examples:
        >>> tuned([Entry("dpsgd", 3.0)], "")
        ''
    """
    rows = [
        [entry.method, entry.promise, str(entry.effort.trials), f"{entry.effort.seconds:.0f}", entry.effort.words]
        for entry in entries
        if entry.effort is not None
    ]
    head = ["method", "promise", "trials", "processor seconds", "chosen"]
    body = f'<p>{escape(words)}</p><div class="wide">{table(head, rows, folded=False)}</div>'
    remark = "A method that lacks a setting of the grid has fewer trials."
    return section("Tuning, the same for all", body + notes([remark])) if rows else ""


def promised(entries: Sequence[Entry], terms: str, together: float | None, runs: int) -> str:
    """The section on what the runs promise: one by one, and all of them together.

    Examples:
        >>> "nothing was promised" in promised([], "", None, 0)
        True
    """
    if not entries:
        return section("What is promised", "<p><strong>Not private:</strong> nothing was promised to anyone.</p>")
    spent = [
        f"{label(entry.method, 40)} at {entry.promise}: spent {bound(entry.spent)}"
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
            f"{bound(together)} ({terms}), not by the epsilon of one run."
        )
    return section("What is promised", "".join(f"<p>{escape(text)}</p>" for text in words))
