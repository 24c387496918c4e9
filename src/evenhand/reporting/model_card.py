"""Writes the model card: what a model is, for whom it works how well, and what is promised about its training data.

It describes and does not promise: every number comes from the plan, the statement or an evaluation, with its limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenhand._numbers import bare_percent, count, interval, percent
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out.effective_records import words
from evenhand.reporting.held_out.small_cells import instead
from evenhand.reporting.text import label, unmarked

_SMALL = 30


@dataclass(frozen=True)
class CardData:
    """Everything that a card says.

    Attributes:
        title: names the model.
        facts: method, records, steps and so on, in the order shown.
        statement: the privacy statement in words, one paragraph each.
        warnings: what a reader must know first.
        overall: accuracy over all held-out records.
        groups: accuracy per group.
        metrics: further metrics over all held-out records, by name; None where undefined.
        labels: what the model tells apart.
        not_covered: what the privacy statement does not cover.
        software: versions by package.
    """

    title: str
    facts: Mapping[str, str]
    statement: Sequence[str]
    warnings: Sequence[str]
    overall: Estimate
    groups: Mapping[str, Estimate]
    metrics: Mapping[str, float | None]
    labels: Sequence[str]
    not_covered: Sequence[str]
    software: Mapping[str, str]


def card(data: CardData) -> str:
    """Return the card as Markdown; text from outside is escaped, so that it cannot become markup.

    Examples:
        >>> data = CardData("dpsgd", {}, ["Promised."], [], Estimate(0.9, 0.8, 0.95, 50),
        ...                 {"a|b": Estimate(0.5, 0.4, 0.6, 20)}, {"mcc": None}, [], [], {})
        >>> text = card(data)
        >>> text.startswith("# Model card: dpsgd"), "a|b" in text, "mcc: undefined" in text
        (True, False, True)
    """
    parts = [
        f"# Model card: {unmarked(label(data.title, 120))}",
        *(f"> **Note:** {unmarked(text)}" for text in data.warnings),
    ]
    parts += ["## What it is", _bullets([f"{key}: {value}" for key, value in data.facts.items()])]
    if data.labels:
        shown = ", ".join(label(name, 40) for name in data.labels[:50])
        more = " and more" if len(data.labels) > 50 else ""
        parts.append(f"It tells apart {len(data.labels)} classes: {unmarked(shown)}{more}.")
    parts += [
        "## Intended use",
        "Not declared here: whoever releases the model writes down, in a copy of this card, what it is for, who is "
        "affected by its answers, and what it must not be used for.",
        "## How well it works, and for whom",
        _served(data),
        "## Privacy of the training data",
        *(unmarked(text) for text in data.statement),
        "## Limits",
        _bullets([*_limits(data), *(f"not covered by the privacy statement: {text}" for text in data.not_covered)]),
        "## Made with",
        ", ".join(f"{unmarked(name)} {unmarked(version)}" for name, version in data.software.items()) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _served(data: CardData) -> str:
    if not data.overall.measured:
        return "Nothing was measured: there were no held-out records."
    whole, records = data.overall, data.overall.count
    first = (
        f"{percent(whole.value, records)} of {count(records)} held-out records are answered correctly "
        f"(95 % Wilson interval {interval(whole.low, whole.high, '%', records)})."
    )
    first = " ".join([first, *words(records, whole.independent)])
    rows = sorted(data.groups.items(), key=lambda item: (not item[1].measured, item[1].value))
    lines = ["| group | correct | 95 % interval | held-out records |", "|---|---|---|---|"]
    for name, e in rows:
        value, ends = percent(e.value, e.count), interval(e.low, e.high, "%", e.count)
        cells = (value, ends, count(e.count)) if e.measured else (instead(e), "", "")
        lines.append(f"| {unmarked(label(name, 60))} | {' | '.join(cells)} |")
    values = [group.value for group in data.groups.values() if group.measured]
    apart = f"are {bare_percent(max(values) - min(values), 0)} points apart" if len(values) > 1 else ""
    among = ", of those that are shown," if len(values) < len(data.groups) else ""
    spread = f"Best and worst group{among} {apart}." if apart else ""
    shown = {name: "undefined" if value is None else f"{value:.3f}" for name, value in data.metrics.items()}
    more = _bullets([f"{name}: {value}" for name, value in shown.items()])
    return "\n\n".join(part for part in (first, "\n".join(lines) if rows else "", spread, more) if part)


def _limits(data: CardData) -> list[str]:
    few = [label(name, 40) for name, group in data.groups.items() if group.measured and group.independent < _SMALL]
    limits = ["accuracy is measured on held-out records, which the privacy statement does not cover"]
    if few:
        limits.append(f"fewer than {_SMALL} held-out records, so the value says little: {', '.join(few[:20])}")
    lowest = [group.value for group in data.groups.values() if group.measured]
    if len(lowest) > 1 and math.isfinite(min(lowest)):
        limits.append("groups that were not declared are not reported: a low value may hide inside a group")
    return limits


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {unmarked(line)}" for line in lines)
