"""Owners in a comparison: what each was promised, spent and gets under every method."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenhand.reporting.elements import notes, table
from evenhand.reporting.entries import Entry
from evenhand.reporting.frames import Estimate
from evenhand.reporting.text import bound, escape, label

SHOWN = 60
"""Owners that a page lists, strictest promise first; the tables beside it have all."""


def per_owner(entries: Sequence[Entry], terms: str) -> str:
    """A table with one row per owner and one column per method; nothing unless owners have budgets of their own.

    Examples:
        >>> found = Estimate(0.5, 0.4, 0.6, 3)
        >>> made = Entry("idp_sample", 3.0, seeds=3, owners={"a": found}, budgets={"a": (1.0, 0.9996)})
        >>> "50.0 (40 to 60); spent 1" in per_owner([made], "per record")
        True
    """
    chosen = [entry for entry in entries if entry.budgets]
    promised = {name: budget for entry in chosen for name, (budget, _) in entry.budgets.items()}
    if not promised:
        return ""
    names = sorted(promised, key=lambda name: promised[name])
    rows = [[name, f"{promised[name]:g}", *(_cell(entry, name) for entry in chosen)] for name in names[:SHOWN]]
    head = ["owner", "promised epsilon", *(label(entry.method, 40) for entry in chosen)]
    caption = f"Correct, %: mean and 95 % interval over seeds; spent epsilon {terms}."
    remarks = [
        "A method that treats owners alike gives everybody the strictest promise, and leaves the others unspent."
    ]
    if len(names) > SHOWN:
        remarks.append(f"{SHOWN} of {len(names)} owners are listed here; table.csv has all.")
    intro = f"<p>{escape('Held-out records answered correctly, and what was spent, per owner and method.')}</p>"
    return f'{intro}<div class="wide">{table(head, rows, caption, folded=False)}</div>{notes(remarks)}'


def _cell(entry: Entry, name: str) -> str:
    spent = f"spent {bound(entry.budgets[name][1])}" if name in entry.budgets else "not promised"
    return f"{_accuracy(entry.owners.get(name))}; {spent}"


def _accuracy(found: Estimate | None) -> str:
    if found is None or not found.measured:
        return "not measured"
    ends = f" ({100 * found.low:.0f} to {100 * found.high:.0f})" if math.isfinite(found.low) else ""
    return f"{100 * found.value:.1f}{ends}"
