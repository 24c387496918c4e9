"""The page of a comparison: says who pays, marks what is not private, survives hostile names."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from comparison_samples import NAMES, around, entry, evaluations, page_data

from evenhand._numbers import points
from evenhand.comparison.write_results import with_column
from evenhand.reporting.charts import NARROW, WIDE
from evenhand.reporting.comparison_charts import MethodLine, accuracy_by_promise, dots
from evenhand.reporting.comparison_findings import corrected, finding, findings, lead
from evenhand.reporting.comparison_page import RESEARCH, ComparisonData, render_comparison
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.group_metrics import Estimate

HOSTILE = ["<script>alert(1)</script>", "</svg><img src=x onerror=alert(1)>", '" onload="x', "\u202e</title>", ""]


def words(page: str) -> str:
    return re.sub("<[^>]+>", " ", re.sub("(?s)<(style|script)>.*?</", "<", page)).replace("\u00a0", " ")


def test_the_headline_says_who_pays_how_much_at_the_middle_promise() -> None:
    text = lead(page_data(NAMES).entries).replace("\u00a0", " ")
    assert text.startswith(
        "class 8 pays most for privacy under every method and promise: 45 points (95 % interval 40 to 50) under dpsgd "
        "at epsilon 3, 40 points"
    )


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
    assert "class 8 is served worst under every method and promise: 50 % (45 to 55) correct under dpsgd" in text


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


def plain(entries: list[Entry]) -> str:
    return " ".join(findings(corrected(entries))).replace("\u00a0", " ")


def test_four_records_are_named_in_no_headline_but_listed() -> None:
    groups = {"race = Native American": 25.0, "race = White": 70.0, "race = Black": 70.2}
    rows = evaluations(groups)
    for row in rows.values():
        row["group_records"] = {"race = Native American": 4, "race = White": 500, "race = Black": 500}
    text = plain([entry("dpsgd", 3.0, groups, rows=rows)])
    assert "Native American pays" not in text
    assert "No group can be told to be served worse than all others" in text
    assert "Too few held-out records to tell (fewer than 20): race = Native American (fewer than 10)." in text


def test_who_is_served_worst_is_named_where_no_cost_stands_out() -> None:
    served, without = {"a": 10.0, "b": 60.0, "c": 61.0}, {"a": 45.0, "b": 95.0, "c": 96.0}
    text = plain([entry("dpsgd", 3.0, served, reference=evaluations(without))])
    assert "a is served worst" in text
    assert "pays most" not in text
    assert "chance" not in text


def test_one_sentence_a_finding() -> None:
    data = page_data(NAMES)
    text = findings(data.entries)
    assert sum("class 8" in sentence for sentence in text) == 1
    assert sum("other is more accurate" in sentence or "other serves" in sentence for sentence in text) <= 2
    assert "No group" in plain([entry("dpsgd", 3.0, {"a": 90.0, "b": 90.5})])


def test_the_better_method_is_named_once_for_all_promises() -> None:
    low = evaluations({"a": 60.0, "b": 61.0})
    high = evaluations({"a": 80.0, "b": 81.0})
    for rows, share in ((low, 0.6), (high, 0.8)):
        for seed, row in rows.items():
            row["accuracy"] = share + seed / 1000
    entries = [
        entry(name, epsilon, {"a": 1.0, "b": 2.0}, costed=False, rows=rows)
        for name, rows in (("worse", low), ("better", high))
        for epsilon in (1.0, 3.0)
    ]
    text = plain(entries)
    assert "better is more accurate than every other private method at epsilon 1 and epsilon 3" in text
    assert "better serves the worst group best at epsilon 1 and epsilon 3" in text
    single = [Entry(e.method, e.epsilon, seeds=1, rows={0: e.rows[0]}, metrics=e.metrics) for e in entries]
    assert "No private method can be told" in plain(single), "one training says nothing about others"


def test_who_does_not_beat_the_most_common_label_comes_first() -> None:
    rows = evaluations({"a": 70.0, "b": 79.0})
    for row in rows.values():
        row |= {"accuracy": 0.779, "majority": 0.779}
    weak = entry("dpsgd", 3.0, {"a": 70.0, "b": 79.0}, rows=rows)
    strong = entry(
        "other", 3.0, {"a": 70.0, "b": 79.0}, rows={seed: {**row, "accuracy": 0.9} for seed, row in rows.items()}
    )
    first = lead(corrected([strong, weak])).replace("\u00a0", " ")
    assert first.startswith("dpsgd at epsilon 3 does not beat answering always the most common label, right for 78 %")
    page = words(render_comparison(ComparisonData(**{**vars(page_data(NAMES)), "entries": [strong, weak]})))
    assert "most common label" in page
    assert "77.9" in page


def test_one_sentence_says_what_changed_against_the_baseline() -> None:
    sure, unsure = Estimate(-6.5, -9.0, -4.0, 3), Estimate(1.0, -2.0, 4.0, 3)
    entries = [
        entry("dpsgd", 1.0, {"a": 90.0, "b": 90.0}, costed=False),
        *(entry("psac", e, {"a": 90.0, "b": 90.0}, costed=False, changed={"accuracy": sure}) for e in (1.0, 3.0)),
        entry("auto_s", 1.0, {"a": 90.0, "b": 90.0}, costed=False, changed={"accuracy": unsure, "worst": unsure}),
    ]
    told = [sentence for sentence in findings(entries, baseline="dpsgd") if "Against" in sentence]
    assert told == [
        "Against dpsgd: psac at epsilon 1 and epsilon 3 is worse over all records, -6.5 (-9.0 to -4.0) points under "
        "psac at epsilon 3; no other difference can be told from chance."
    ]
    silent = findings(entries[-1:], baseline="dpsgd")
    assert "Against dpsgd no difference can be told from chance." in silent


def test_sentences_on_the_baseline_widen_the_level_of_all() -> None:
    plainly = [entry("psac", 3.0, {"a": 90.0, "b": 90.0}, costed=False)]
    asked = [entry("psac", 3.0, {"a": 90.0, "b": 90.0}, costed=False, against={"accuracy": around(1.0)})]
    assert corrected(asked)[0].level > corrected(plainly)[0].level


def test_the_worst_group_has_its_colour_and_hidden_groups_their_words() -> None:
    hidden = Estimate(math.nan, math.nan, math.nan, 10)
    rows = [("race = a", {"dpsgd": Estimate(0.5, 0.45, 0.55, 90)}), ("race = b", {"dpsgd": hidden})]
    for size in (WIDE, NARROW):
        drawing = dots(rows, title="T", unit="%", worst={"race = a"}, size=size)
        assert re.search(r'fill="var\(--eh-strong,#d55e00\)">race = a<', drawing)
        assert ">left out<" in drawing
        assert ">0<" not in drawing, "the axis shows the data"


def test_groups_carry_their_column_where_people_read() -> None:
    named = with_column(entry("dpsgd", 3.0, {"Asian": 60.0, "Other": 90.0}, costed=False), "race")
    page = words(render_comparison(ComparisonData(**{**vars(page_data(NAMES, research=False)), "entries": [named]})))
    assert "race = Asian is served worst" in page
    assert "(unnamed)" not in page


def test_findings_without_runs_or_groups() -> None:
    assert "no finished run" in finding(Entry("dpsgd", 3.0))
    assert "90 % of held-out records" in finding(entry("dpsgd", 3.0, {"a": 90.0}, costed=False)).replace("\u00a0", " ")
    assert points(0.04).startswith("0\u00a0")
