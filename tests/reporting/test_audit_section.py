"""What was claimed, certified and could have been shown: drawn for every width, with names that stay text."""

from __future__ import annotations

import re
from typing import Any

import pytest

from evenhand.reporting.audits.chart import Certified, certified
from evenhand.reporting.audits.section import attack_page, section
from evenhand.reporting.charts import NARROW, WIDE
from evenhand.reporting.svg import BAR, STRONG

ABOUT = {"threat_model": "sees all", "method": "counts", "data": "none"}
HOSTILE = '"><script>alert(1)</script>'


def bound(claim: float | None, lower: float, ceiling: float = 20.0) -> dict[str, Any]:
    return {"claim": claim, "lower_bound": lower, "ceiling": ceiling, "trials": 1000, "ok": True}


def bars(drawn: str, colour: str) -> list[float]:
    """Widths of the bars of a colour."""
    return [
        float(width) for width in re.findall(rf'width="([\d.]+)" height="12\.0"[^>]*fill="{re.escape(colour)}"', drawn)
    ]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_bars_are_shares_of_each_claim_and_a_broken_promise_stands_out(size: int) -> None:
    rows = [Certified("strict", 1.0, 0.5, 9.0), Certified("open", 10.0, 5.0, 9.0), Certified("broken", 2.0, 3.0, 90.0)]
    drawn = certified(rows, title="Audit", size=size)
    first, second = bars(drawn, BAR)
    (beyond,) = bars(drawn, STRONG)
    assert first == pytest.approx(second)
    assert beyond == pytest.approx(3 * first, rel=0.01)
    assert beyond < size
    assert "so many trials can show 90.000 at most" in drawn


def test_names_are_text_and_nothing_is_drawn_outside() -> None:
    drawn = certified(
        [Certified(HOSTILE * 3, 1.0, 0.5, 1e6), Certified("none", None, 0.0, 3.0)], title="T", size=NARROW
    )
    assert "<script>" not in drawn
    places = [
        float(x) for point in re.findall(r'points="([^"]+)"', drawn) for x, _ in [p.split(",") for p in point.split()]
    ]
    assert 0 <= min(places) <= max(places) <= NARROW
    assert "nothing claimed" in drawn


def test_a_section_says_what_was_attacked_and_what_a_bound_means() -> None:
    audit = {"kind": "mechanism", "confidence": 0.99, "ok": True, "per_owner": {"all": bound(3.0, 2.5)}, **ABOUT}
    part = section(audit, "per record")
    assert part is not None
    assert section(None, "per record") is None
    broken = section({**audit, "ok": False}, "per record")
    assert broken is not None
    assert "spends more than was promised" in str(broken.blocks[0])
    assert "no proof" in str(part.blocks[0])


def test_a_page_of_an_attack_is_marked_private_unless_the_records_are_public() -> None:
    leak = {
        "records": 40,
        "auc": [0.7, 0.6, 0.8],
        "tpr_at_fpr": {"0.1": [0.3, 0.2, 0.4]},
        "curve": [[0.1, 0.3], [1, 1]],
    }
    unknown = {"records": 2, "auc": [None, None, None], "tpr_at_fpr": {}, "curve": []}
    audit = {"kind": "lira", "confidence": 0.95, "delta": 1e-5, "ok": True, "private": True, **ABOUT}
    audit |= {"per_owner": {HOSTILE: bound(None, 0.2)}, "per_group": {"a": bound(3.0, 0.0), "b": bound(3.0, 0.1)}}
    audit |= {"details": {"parts": {"all": leak, f"owner {HOSTILE}": leak, "group a": leak, "group b": unknown}}}
    page = attack_page(audit)
    assert "Do not share" in page
    assert "<script>alert" not in page
    assert "Membership per group" in page
    assert "too few records" in page
    assert "Do not share" not in attack_page({**audit, "private": False})
