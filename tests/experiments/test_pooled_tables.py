"""Equal cells of several studies are one cell on their pages, and claims are judged on all of its trainings."""

from __future__ import annotations

from typing import Any

import pytest

from evenhand.comparison import declared_claims
from evenhand.reporting.uncertainty import Split

CLAIM = {"text": "new serves the worst group better", "left": "new", "right": "old", "measure": "worst"}


def row(a: float, b: float) -> dict[str, Any]:
    groups, records = {"a": a, "b": b}, {"a": 200, "b": 200}
    return {"accuracy": (a + b) / 2, "records": 400, "groups": groups, "group_records": records}


def entry(method: str, cell: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_seed = {str(seed): each for seed, each in enumerate(rows)}
    known = {"method": method, "cell": cell, "epsilon": 3.0, "private": True, "seeds": len(rows), "by_seed": by_seed}
    return {**known, "metrics": {}, "groups": {}, "against_baseline": {}, "worst_group": ""}


def study(name: str, *entries: dict[str, Any], claims: int = 0) -> dict[str, Any]:
    words = {"text": CLAIM["text"], "promise": "epsilon 3", "verdict": "old", "difference": {}, "seeds": 2}
    ratio = {"held_out_over_training": 0.25, "baseline": "old", "setting": {}, "claims": [words] * claims}
    return {"experiment": name, "entries": list(entries), **ratio}


NEW = [row(0.9, 0.7), row(0.7, 0.9), row(0.92, 0.72)]
FIRST = study("first", entry("new", "x", NEW), entry("old", "y", [row(0.5, 0.6)] * 3), claims=1)
SECOND = study("second", entry("other name", "x", [row(0.7, 0.9), row(0.9, 0.7), row(0.7, 0.9)]))


def test_a_pooled_cell_has_every_training_and_averages_none_of_them(modules: Any) -> None:
    claims = declared_claims.claims([CLAIM], ["new", "old"])
    view = modules["pooled_tables"].shown(FIRST, [FIRST, SECOND], claims)
    new, old = view["entries"]
    assert (new["pooled_from"], new["seeds"], len(new["by_seed"])) == (["second"], 3, 6)
    assert new["metrics"]["accuracy_group_min"]["value"] == pytest.approx((5 * 0.7 + 0.72) / 6), "not that of means"
    assert "pooled_from" not in old
    assert new["against_baseline"]["worst"]["value"] == pytest.approx(100 * (2 * 0.7 + 0.72) / 3 - 50), "own pairs"
    assert (view["claims"][0]["verdict"], view["claims"][0]["seeds"]) == ("holds", 3)


def test_claims_are_judged_anew_and_say_what_these_records_alone_tell_and_other_figures_stay(modules: Any) -> None:
    claims = declared_claims.claims([CLAIM], ["new", "old"])
    view = modules["pooled_tables"].shown(FIRST, [FIRST], claims)
    assert view["entries"] == FIRST["entries"]
    alone = view["claims"][0].pop("alone")
    rows = {"new": dict(enumerate(NEW)), "old": dict.fromkeys(range(3), row(0.5, 0.6))}
    judged = claims[0].judged(rows, {}, Split(0.25), claims=1)
    assert (view["claims"][0]["verdict"], view["claims"][0]["seeds"]) == (judged.verdict, 3) == ("holds", 3)
    assert view["claims"][0]["difference"]["low"] == pytest.approx(judged.difference.low)
    assert "pooled" not in view["claims"][0], "no other study has these cells"
    assert alone["value"] == pytest.approx(100 * (2 * 0.7 + 0.72) / 3 - 50)
    assert alone["low"] < alone["value"] < alone["high"]
    assert (
        "Over trainings and splits of these records alone: +20.7 ("
        in modules["judging"].judged(
            {"claims": [{**view["claims"][0], "alone": alone, "difference": alone, "power": "enough"}]}
        )[0]
    )
    assert modules["pooled_tables"].shares_cells(FIRST, SECOND)
    assert not modules["pooled_tables"].shares_cells(FIRST, study("third", entry("old", "z", [])))
