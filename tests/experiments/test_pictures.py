"""Pictures say what the figures say, names do not overlap, and pages follow from their JSON files alone."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from evenhand.reporting import svg
from evenhand.reporting.text import width

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SVG = "{http://www.w3.org/2000/svg}"


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def texts(drawing: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawing).iter(f"{SVG}text"))


def test_every_method_is_named_beside_its_mark_and_no_two_names_overlap(modules: Any) -> None:
    table = figures("adult")
    drawing = modules["plotting"].accuracy(table).drawing
    names = [entry["method"] if entry["private"] else f"{entry['method']} (not private)" for entry in table["entries"]]
    places = {each.text: (float(each.get("x", 0)), float(each.get("y", 0))) for each in texts(drawing)}
    labels = sorted(places[name][1] for name in names)
    assert min(high - low for low, high in pairwise(labels)) >= 13
    assert max(places[name][0] + width(name, 13) for name in names) <= 760


def test_a_mark_lies_where_its_figures_are(modules: Any) -> None:
    plotting = modules["plotting"]
    table = figures("adult")
    drawing = plotting.accuracy(table).drawing
    told = {each.text for each in ElementTree.fromstring(drawing).iter(f"{SVG}title")}
    first = table["entries"][1]
    value = f"{100 * first['metrics']['accuracy']['value']:.3g}"
    assert any(words and words.startswith(f"{first['method']}: all records {value}") for words in told)
    marks = [float(x) for x in re.findall(r'<path d="M([\d.]+) [\d.]+m', drawing)][::2]
    values = [entry["metrics"]["accuracy"]["value"] for entry in table["entries"]]
    placed = [mark for _, mark in sorted(zip(values, marks, strict=True))]
    assert placed == sorted(placed)
    assert placed[0] < placed[-1]


@pytest.mark.parametrize(
    ("name", "words"), [("digits", "privacy costs each group"), ("ctg_owners", "Accuracy of each")]
)
def test_groups_are_drawn_by_cost_or_without_a_reference_by_accuracy(modules: Any, name: str, words: str) -> None:
    table = figures(name)
    picture = modules["plotting"].groups(table)
    assert words in picture.words
    shown = {each.text for each in texts(picture.drawing)}
    drawn = [entry for entry in table["entries"] if entry["private"]]
    assert {*table["setting"]["group_records"], *(entry["method"] for entry in drawn)} <= shown


def test_pictures_bring_their_colours_for_light_and_dark(modules: Any) -> None:
    for picture in modules["plotting"].pictures(figures("ctg_owners")).values():
        assert "prefers-color-scheme:dark" in picture.drawing
        assert set(re.findall(r"var\((--eh-[a-z]+)", picture.drawing)) <= set(re.findall(r"(--eh-[a-z]+):#", svg._DARK))
    with pytest.raises(ValueError, match="not a drawing"):
        svg.standalone("<svg/>")


def test_nothing_is_drawn_of_one_group_or_of_no_owner(modules: Any) -> None:
    table = figures("adult")
    for entry in table["entries"]:
        entry["groups"] = {"all": entry["groups"]["Male"]}
        entry.pop("privacy_cost_groups", None)
    assert modules["plotting"].pictures(table) == {}


def test_change_of_recall_over_budgets(modules: Any) -> None:
    correlating = modules["correlating"]
    table = figures("ctg_owners")
    changes = correlating.changes(table)
    assert table["baseline"] not in changes
    assert [budget for budget, _ in changes["ino_sample"]] == [1.0, 2.0, 4.0]
    entry = next(entry for entry in table["entries"] if entry["method"] == "ino_sample")
    assert changes["ino_sample"][0][1] == entry["against_baseline"]["owner:pathologic"]["value"]
    made = correlating.trend("made", [(1.0, 6.0), (2.0, 4.0), (3.0, 3.0), (4.0, 0.0)])
    assert (made.owners, made.slope) == (4, pytest.approx(-1.9))
    assert (made.r, made.p) == (pytest.approx(-0.98115, abs=1e-5), pytest.approx(0.01885, abs=1e-5))
    flat = {**table, "setting": {"budgets": {"normal": 4.0, "suspect": 2.0}}}
    assert correlating.trends(flat) == []
    assert "nothing to correlate" in modules["page_text"].page(
        {**table, "setting": {**table["setting"], **flat["setting"]}}
    )


def test_pages_are_what_their_figures_make(modules: Any, tmp_path: Path) -> None:
    names = [name for name in modules["results"].names() if (RESULTS / f"{name}.json").exists()]
    for name in names:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    for script in modules["results"].SCRIPTS:  # their pages say what they took, and the index adds it up
        if (RESULTS / f"{script}.md").exists():
            shutil.copy(RESULTS / f"{script}.md", tmp_path)
    assert modules["results"].main(["--pages", "--out", str(tmp_path)]) == 0
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(made) > 3 * len(names)
    stale = [name for name, text in made.items() if (RESULTS / name).read_text() != text]
    assert stale == [], "run: python experiments/results.py --pages"
    assert modules["results"].main(["adult_sweep", "--pages", "--out", str(tmp_path / "none")]) == 1
