"""Write what an audit claims, certified and could have shown: as a section of a report, and as a private page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand._numbers import rounded_up, shown_down
from evenhand.reporting.audits.chart import Certified, certified
from evenhand.reporting.charts import bars, lines
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.page import Block, Notes, Section, Table, Words, document, figure

_HEAD = ["owner", "certified epsilon", "claimed epsilon", "most that the trials can show", "trials"]


def section(audit: Mapping[str, Any] | None, terms: str) -> Section | None:
    """Return the section of a report on the audit of its plan; None if there is none.

    Args:
        audit: as a statement has it.
        terms: unit, adjacency and delta of every epsilon.
    """
    if audit is None:
        return None
    verdict = (
        "No lower bound exceeds its claim. That is no proof: an attack can show that too much is spent, never that "
        "nothing is."
        if audit["ok"]
        else "A lower bound exceeds its claim: the mechanism spends more than was promised. Nothing of this run may be "
        "released."
    )
    remarks = [
        f"Epsilon {terms}; all bounds hold together with confidence {audit['confidence']:g}.",
        f"Attacker: {audit['threat_model']}.",
        f"Method: {audit['method']}.",
        f"Data: {audit['data']}.",
    ]
    return Section("Audit", [Words(verdict), *_bounds(audit["per_owner"], "owner"), Notes(remarks)])


def _bounds(bounds: Mapping[str, Mapping[str, Any]], kind: str) -> list[Block]:
    """Return chart and table of bounds by name."""
    rows = [Certified(name, each["claim"], each["lower_bound"], each["ceiling"]) for name, each in bounds.items()]
    rows.sort(key=lambda row: math.inf if row.claim is None else row.claim)
    title = f"Claimed and certified epsilon per {kind}"
    cells = [
        [
            *(row.name, shown_down(row.lower), "nothing" if row.claim is None else rounded_up(row.claim)),
            *(shown_down(row.ceiling), f"{bounds[row.name]['trials']:,}"),
        ]
        for row in rows
    ]
    return [figure(lambda size: certified(rows, title=title, size=size)), Table([kind, *_HEAD[1:]], cells, title)]


def attack_page(audit: Mapping[str, Any]) -> str:
    """Return a page on an attack on trained models. Its figures are private unless the records are public.

    Args:
        audit: what ``evenhand audit --json`` prints.
    """
    remarks = [f"Attacker: {audit['threat_model']}.", f"Method: {audit['method']}.", f"Data: {audit['data']}."]
    parts = audit["details"].get("parts", {}) if audit["kind"] == "lira" else {}
    sections = [Section("Bounds per owner", [*_bounds(audit["per_owner"], "owner"), Notes(remarks)])]
    if audit["per_group"]:
        sections.append(Section("Bounds per group", _bounds(audit["per_group"], "group")))
    for kind in ("owner", "group"):
        chosen = {name.removeprefix(f"{kind} "): part for name, part in parts.items() if name.startswith(f"{kind} ")}
        if chosen:
            sections.append(_leaks(chosen, kind))
    verdict = "No lower bound exceeds its claim." if audit["ok"] else "A lower bound exceeds its claim."
    return document(
        "audit.html.j2",
        f"Audit ({audit['kind']})",
        lead=f"{verdict} All hold together with confidence {audit['confidence']:g}, at delta {audit['delta']:g}.",
        private=audit["private"],
        sections=sections,
    )


def _leaks(parts: Mapping[str, Mapping[str, Any]], kind: str) -> Section:
    """Return how well membership is guessed, by owner or by group."""
    rows = sorted(((name, _estimate(part)) for name, part in parts.items()), key=lambda row: -row[1].value)
    title = f"How often a record that was in scores higher than one that was out, per {kind} (50 %: blind)"
    blind = ("blind", Estimate(0.5, 0.5, 0.5, 0))
    blocks: list[Block] = [
        Words(f"{title}. Means over the attacked models with 95 % intervals."),
        figure(lambda size: bars(rows, title=title, reference=blind, size=size)),
    ]
    curves = {name: _curve(part["curve"]) for name, part in parts.items() if len(part["curve"]) > 1}
    if curves:
        axes: dict[str, Any] = {"title": f"Hits over false alarms, per {kind}", "y_label": "hits, %"}
        axes["x_label"] = "false alarms, power of ten (-2: one in a hundred)"
        blocks.append(figure(lambda size: lines(curves, size=size, **axes)))
        blocks.append(Notes(["Thresholds are those of other attacked models than the ones that are counted."]))
    rates = list(dict.fromkeys(rate for part in parts.values() for rate in part["tpr_at_fpr"]))
    cells = [
        [name, str(part["records"]), _number(part["auc"])] + [_number(part["tpr_at_fpr"].get(rate)) for rate in rates]
        for name, part in parts.items()
    ]
    head = [kind, "records", "AUC", *(f"hits at {float(rate):.1%} false alarms" for rate in rates)]
    return Section(f"Membership per {kind}", [*blocks, Table(head, cells, "Means over the attacked models.")])


def _estimate(part: Mapping[str, Any]) -> Estimate:
    value, low, high = (math.nan if number is None else number for number in part["auc"])
    return Estimate(value, max(0.0, low), min(1.0, high), part["records"])


def _curve(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(math.log10(alarms), 100 * hits) for alarms, hits in points if alarms > 0]


def _number(mean: Sequence[float | None] | None) -> str:
    return "too few records" if mean is None or mean[0] is None else f"{mean[0]:.3f}"
