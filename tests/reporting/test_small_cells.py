"""Figures of groups with few held-out records are left out of what may be shared, and do not follow from the rest."""

from __future__ import annotations

import json
import re

import pytest
from comparison_samples import around

from evenhand.comparison import tables
from evenhand.comparison.write_results import without_small_groups
from evenhand.reporting import replicas
from evenhand.reporting.comparison_findings import corrected
from evenhand.reporting.comparison_page import ComparisonData, render_comparison
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.held_out.small_cells import left_out
from evenhand.reporting.uncertainty import Split

SIZES = {"common": 500, "rare": 4, "few": 7, "some": 15}
SHARES = {"common": 0.81, "rare": 0.7531, "few": 0.6429, "some": 0.8667}


def entry(*, costed: bool = True) -> Entry:
    rows = {
        seed: {
            "accuracy": 0.8,
            "records": 526,
            "groups": {name: share + seed / 1000 for name, share in SHARES.items()},
            "group_records": SIZES,
            "group_log_loss": SHARES,
            "group_metrics": {"tpr": SHARES},
        }
        for seed in range(3)
    }
    groups = {name: replicas.share(rows, Split(), name) for name in SHARES}
    costs = {name: around(3.21) for name in SHARES} if costed else {}
    return Entry("dpsgd", 3.0, seeds=3, rows=rows, groups=groups, costs=costs, metrics={"accuracy": around(0.8, 0.1)})


def test_those_left_out_have_together_enough_records() -> None:
    assert left_out(SIZES) == ["rare", "few"]
    assert left_out({"common": 500, "rare": 4, "some": 15}) == ["rare", "some"], "the total minus the others tells rare"
    assert left_out({"a": 10, "b": 500}) == []
    assert left_out(SIZES, 0) == []
    assert left_out({"a": 500, "none": 0}) == []


@pytest.mark.parametrize("form", [tables.as_csv, tables.as_markdown, tables.as_json, render_comparison])
def test_no_shared_form_has_the_figures_of_small_groups(form: object) -> None:
    shown, hidden = (("753", "754", "755"), ("642", "643", "644"), ("64.3", "75.3", "64.4", "75.4")), "fewer than 10"
    done = corrected([without_small_groups(entry(costed=False), 10)])
    text = form(ComparisonData("T", done, 1e-4, None, 3, 526, {}, ""))  # type: ignore[operator]
    for digits in (digit for part in shown for digit in part):
        assert not re.search(rf"\b(?:0?\.)?{re.escape(digits)}", re.sub("(?s)<(svg|style).*?</", "<", text)), digits
    if form is tables.as_json:
        body = json.loads(text)["entries"][0]
        assert body["groups"]["rare"] == {"value": None, "low": None, "high": None}
        assert body["records"]["groups"] == {"common": 500, "rare": None, "few": None, "some": 15}
        assert all(set(row["groups"]) == {"common", "some"} for row in body["by_seed"].values())
    elif form is not tables.as_markdown:
        assert hidden in text.replace("\u00a0", " ")
    unshared = form(ComparisonData("T", corrected([entry(costed=False)]), 1e-4, None, 3, 526, {}, "", least=0))  # type: ignore[operator]
    assert form is tables.as_markdown or "64.4" in unshared or "0.643" in unshared, "the test can tell"


def test_small_groups_are_listed() -> None:
    done = corrected([without_small_groups(entry(), 10)])
    page = render_comparison(ComparisonData("T", done, 1e-4, None, 3, 526, {}, "")).replace("\u00a0", " ")
    assert "some (15), rare (fewer than 10) and few (fewer than 10)" in page
    assert "15 (too few to tell)" in page
