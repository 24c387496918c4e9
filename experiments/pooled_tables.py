"""Tables as their pages show them: equal cells of several studies pooled, claims judged anew on what is pooled.

The JSON files hold what each study trained itself. Two studies that trained the same cell (data, model, method,
settings and promise) must not show two figures for it: see ``evenhand.comparison.pooled_cells``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import judging

from evenhand.comparison import declared_claims, measures, pooled_cells, summary
from evenhand.comparison.declared_claims import Claim
from evenhand.reporting import comparison_findings, replicas
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.replicas import Rows
from evenhand.reporting.uncertainty import LEVEL, Split, of_values


def shown(table: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], claims: Sequence[Claim]) -> dict[str, Any]:
    """Return a table whose cells hold the trainings of all ``tables``, with ``claims`` judged on them.

    All claims are judged anew, also where nothing is pooled: by one rule, whatever the rule was when a study ran.
    """
    names, split = [other["experiment"] for other in tables], Split(table.get("held_out_over_training"))
    wider = pooled_cells.shared(tables)[names.index(table["experiment"])]["entries"]
    entries = [_pooled(entry, table["entries"][place]["seeds"], names, split) for place, entry in enumerate(wider)]
    view = {**table, "entries": entries}
    pooled = any("pooled_from" in entry for entry in entries)
    if pooled:
        view["entries"] = _compared(entries, table["baseline"], split)
    view["claims"] = _judged(view, claims, split, pooled)
    return {**view, "claims": _alone(view, claims)}


def shares_cells(table: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two studies have a cell in common."""
    mine, theirs = ({entry.get("cell") for entry in each["entries"]} - {None, ""} for each in (table, other))
    return bool(mine & theirs)


def _pooled(entry: Mapping[str, Any], seeds: int, names: Sequence[str], split: Split) -> dict[str, Any]:
    """Return an entry with the figures of all its trainings; ``seeds`` are those of the study itself."""
    if "pooled_from" not in entry:
        return dict(entry)
    rows = judging.rows(entry)
    owners = {
        name: {**owner, "accuracy": _plain(replicas.share(rows, split, name, "owners"))}
        for name, owner in entry.get("owners", {}).items()
    }
    return {
        **entry,
        "seeds": seeds,
        "metrics": {name: _plain(estimate) for name, estimate in summary.estimates(rows, split).items()},
        "groups": {name: _plain(replicas.share(rows, split, name)) for name in replicas.names(rows)},
        **({"owners": owners} if owners else {}),
        "pooled_from": [names[number] for number in entry["pooled_from"]],
    }


def _compared(entries: Sequence[Mapping[str, Any]], baseline: str, split: Split) -> list[dict[str, Any]]:
    """Return the entries with their worst group and their differences to the baseline anew."""
    drafts = [Entry(entry["method"], entry["epsilon"], rows=judging.rows(entry), split=split) for entry in entries]
    bases = {draft.epsilon: draft.rows for draft in drafts if draft.method == baseline}
    return [
        {
            **entry,
            "worst_group": draft.worst_group,
            "against_baseline": _against(draft, {} if draft.method == baseline else bases.get(draft.epsilon, {})),
        }
        for entry, draft in zip(entries, comparison_findings.corrected(drafts), strict=True)
    ]


def _against(draft: Entry, base: Rows) -> dict[str, Any]:
    return {name: _plain(each) for name, each in declared_claims.against(draft.rows, base, draft.split).items()}


def _judged(table: Mapping[str, Any], claims: Sequence[Claim], split: Split, pooled: bool) -> list[dict[str, Any]]:
    """Return the claims of a table with their verdicts on its rows."""
    reference, judged = judging.reference(table), []
    for words in table["claims"]:
        claim = _declared(words, claims)
        result = claim.judged(_rows(table, words), reference, split, claims=len(table["claims"]))
        figures = {"verdict": result.verdict, "difference": _plain(result.difference), "power": result.power}
        judged.append({**words, **figures, "seeds": result.difference.count})
        if pooled:
            judged[-1]["pooled"] = True
    return judged


def _alone(table: Mapping[str, Any], claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Return the claims with what trainings and splits of these records alone say, where splits were resampled."""
    if table.get("held_out_over_training") is None:
        return list(table["claims"])
    level = 1 - (1 - LEVEL) / max(1, len(table["claims"]))
    return [
        {**words, "alone": _plain(_over_splits(_declared(words, claims), _rows(table, words), level))}
        for words in table["claims"]
    ]


def _over_splits(claim: Claim, rows: Mapping[str, Rows], level: float) -> Estimate:
    """Return a difference with its interval over trainings and splits; pairs on one split are averaged first."""
    left, right = (measures.series(claim.measure, rows.get(str(name), {})) for name in (claim.left, claim.right))
    pairs: dict[int, list[float]] = {}
    for seed in set(left) & set(right):
        pairs.setdefault(seed % pooled_cells.AGAIN, []).append(left[seed] - claim.factor * right[seed])
    values = [sum(split) / len(split) for split in pairs.values()]
    return of_values(values, 0.0, len(values), Split(), level=level)


def _declared(words: Mapping[str, Any], claims: Sequence[Claim]) -> Claim:
    return next(claim for claim in claims if claim.text == words["text"])


def _rows(table: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Rows]:
    """Return the rows by method at the promise of a claim; where all owners have budgets there is one promise."""
    return {
        entry["method"]: judging.rows(entry)
        for entry in table["entries"]
        if not entry["private"] or "budgets" in table["setting"] or judging.promise(entry) == words["promise"]
    }


def _plain(estimate: Estimate) -> dict[str, Any]:
    values = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
