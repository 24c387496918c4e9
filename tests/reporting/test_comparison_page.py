"""The page of a comparison: says who pays, marks what is not private, survives hostile names."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from comparison_samples import NAMES, around, entry, page_data

from evenhand._numbers import points
from evenhand.reporting.charts import NARROW, WIDE
from evenhand.reporting.comparison_charts import MethodLine, accuracy_by_promise, dots
from evenhand.reporting.comparison_page import RESEARCH, ComparisonData, lead, render_comparison
from evenhand.reporting.comparison_sections import Entry, finding
from evenhand.reporting.group_metrics import Estimate

HOSTILE = ["<script>alert(1)</script>", "</svg><img src=x onerror=alert(1)>", '" onload="x', "\u202e</title>", ""]


def words(page: str) -> str:
    return re.sub("<[^>]+>", " ", re.sub("(?s)<(style|script)>.*?</", "<", page)).replace("\u00a0", " ")


def test_the_headline_says_who_pays_how_much_at_the_middle_promise() -> None:
    text = lead(page_data(NAMES)).replace("\u00a0", " ")
    assert text.startswith("At epsilon 3, class 8 pays most: 45 points under dpsgd (95 % interval 40 to 50), 40 points")


def test_the_page_states_terms_and_marks_what_is_not_private() -> None:
    page = render_comparison(page_data(NAMES))
    text = words(page)
    for expected in ("same true epsilon", "per record, add/remove, delta 0.0001", "all 18 private runs", RESEARCH):
        assert expected in text
    assert len(page.encode()) < 300_000
    assert page.count("<svg") == 8
    assert not re.search(r"\bfair|debias|\bsolv", text, re.I)


def test_without_a_reference_nothing_of_it_is_on_the_page() -> None:
    text = words(render_comparison(page_data(NAMES, research=False)))
    assert "Accuracy per group" in text
    assert not re.search(r"\bsgd,|cost|pays|without privacy|research only", text)
    assert "Under dpsgd at epsilon 3, class 8 is served worst" in text


def test_failures_are_named_and_other_entries_stay() -> None:
    broken = Entry("dpsgd", 1.0, failures=["dpsgd-eps1-seed0: its worker process was ended"])
    data = page_data(NAMES)
    page = words(render_comparison(ComparisonData(**{**vars(data), "entries": [broken, *data.entries]})))
    assert "its worker process was ended" in page
    assert "failed" in page
    nothing = ComparisonData(**{**vars(data), "entries": [broken], "together": None, "runs": 0})
    assert "there is nothing to compare yet" in words(render_comparison(nothing))


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.nodes: list[tuple[str, tuple[str, ...]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.nodes.append((tag, tuple(name for name, _ in attrs)))


def test_two_hundred_hostile_names_change_no_node() -> None:
    evil = [f"{HOSTILE[i % len(HOSTILE)]}{i}" for i in range(200)]
    page = render_comparison(page_data(evil, title=evil[0], reproduce=evil[1], facts={evil[0]: evil[1]}))
    calm = render_comparison(page_data([f"group {i}" for i in range(200)], facts={"a": "b"}))
    assert Tags(page).nodes == Tags(calm).nodes
    assert len(page.encode()) < 300_000


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_charts_are_well_formed_for_odd_values(size: int) -> None:
    odd = {"a": Estimate(math.nan, math.nan, math.nan, 0), "b": Estimate(-3.0, math.nan, math.nan, 1), "c": around(0.0)}
    for name in HOSTILE:
        drawing = dots([(name, odd), ("b", {})], title=name, unit="points", size=size)
        ET.fromstring(drawing.encode())
        climbs = [
            MethodLine(name, {"epsilon 1": around(0.5, 0.1), name: odd["a"]}, 0),
            MethodLine("b", {}, 7, worst=True),
        ]
        ET.fromstring(accuracy_by_promise(climbs, ["epsilon 1", name], title=name, size=size).encode())
        assert "nan" not in drawing


def test_findings_admit_chance_and_single_seeds() -> None:
    plain = finding(entry("dpsgd", 3.0, {"a": 90.0, "b": 95.0}, costs={"a": around(4.0)})).replace("\u00a0", " ")
    assert "too few seeds to tell this from no cost" in plain
    single = entry("dpsgd", 3.0, {"a": 50.0, "b": 95.0}, costs={"a": Estimate(45.0, math.nan, math.nan, 1)})
    assert "one seed, so no interval" in finding(single)
    assert "No group pays" in finding(entry("dpsgd", 3.0, {"a": 90.0, "b": 9.0}, costs={"a": around(-4.0)}))
    assert "no finished run" in finding(Entry("dpsgd", 3.0))
    assert points(0.04).startswith("0\u00a0")
