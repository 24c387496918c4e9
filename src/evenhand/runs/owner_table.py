"""Owners for programs and spreadsheets: what each was promised, spent and gets; JSON for a few, a file for all."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.accounting import owner_classes
from evenhand.reporting.text import cell

LISTED = 100
"""Owner classes that a command prints as JSON; with more it names the file that has them all."""
FILE = "owners.csv"


def recalls(owners: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> dict[str, float | None]:
    """The share of each owner's held-out records that are answered correctly; None where nobody knows their owner.

    Examples:
      >>> recalls([{"name": "a"}, {"name": "b"}], {"accuracy": 0.9, "owners": {"a": 0.8}})
      {'a': 0.8, 'b': None}
      >>> recalls([{"name": "all"}], {"accuracy": 0.9})
      {'all': 0.9}
    """
    known = last.get("owners") or ({owners[0]["name"]: last.get("accuracy")} if len(owners) == 1 else {})
    return {row["name"]: known.get(row["name"]) for row in owners}


def as_json(owners: Sequence[Mapping[str, Any]], last: Mapping[str, Any], table: str | None = None) -> dict[str, Any]:
    """``{"owners": {name: {"epsilon", "budget", "records", "recall"}}}``; of many a summary, and where the table is."""
    if len(owners) > LISTED:
        return {"owners": None, "owners_summary": owner_classes.summary(owners), "owners_table": table}
    found = recalls(owners, last)
    kept = ("epsilon", "budget", "records", "rate", "bound", "noise_multiplier")
    return {
        "owners": {row["name"]: {**{key: row[key] for key in kept}, "recall": found[row["name"]]} for row in owners}
    }


def as_csv(owners: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> str:
    """One line per owner class; a name that a spreadsheet would run as a formula gets an apostrophe."""
    found, text = recalls(owners, last), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    pairs = ("clip_bound_least", "clip_bound_most", "noise_multiplier_least", "noise_multiplier_most")
    writer.writerow(["owner", "records", "promised_epsilon", "spent_epsilon", "rate", *pairs, "recall"])
    for row in owners:
        ends = [*(row["bound"] or (None, None)), *(row["noise_multiplier"] or (None, None))]
        values = [row["records"], row["budget"], row["epsilon"], row["rate"], *ends, found[row["name"]]]
        writer.writerow([cell(row["name"]), *("" if value is None else value for value in values)])
    return text.getvalue()
