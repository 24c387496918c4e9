"""The charts: well-formed, complete, readable without colour, and sane for odd input."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.reporting import text
from evenhand.reporting.charts import LABELLED, NARROW, WIDE, bars, lines
from evenhand.reporting.group_metrics import Estimate, estimate
from evenhand.reporting.svg import spread, thin, ticks

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ['"><script>alert(1)</script>', "a&b<c>'d", "\x00\x1b[31m\ud800\ufffe", "left\u202etfel", "x" * 200, ""]


def texts(drawing: str) -> list[str]:
    """The words that are drawn."""
    return [node.text or "" for node in ET.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_bars_show_names_values_counts_and_the_worst(size: int) -> None:
    rows = [("class 8", estimate(32 / 43, 43)), ("class 1", estimate(44 / 46, 46))]
    drawing = bars(rows, title="Accuracy", reference=("overall", estimate(0.95, 450)), worst="class 8", size=size)
    root = ET.fromstring(drawing)
    words = " ".join(texts(drawing)).replace("\u00a0", " ")
    for expected in ("class 8", "class 1", "74 %", "96 %", "43", "46", "worst", "overall 95 %", "100%"):
        assert expected in words
    assert words.count("worst") == 1
    assert root.findtext(f"{SVG}title") == "Accuracy"
    assert "class 8 74" in (root.findtext(f"{SVG}desc") or "")
    assert root.get("viewBox", "").split()[2] == str(size)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_bar_lengths_follow_the_values(size: int) -> None:
    drawing = bars([("a", estimate(0.5, 10)), ("b", estimate(1.0, 10))], title="T", size=size)
    _, half, _, full = (float(node.get("width", "nan")) for node in ET.fromstring(drawing).iter(f"{SVG}rect"))
    assert half == pytest.approx(full / 2, abs=0.1)


def test_no_bar_is_marked_unless_it_may_be_named() -> None:
    assert "worst" not in texts(bars([("a", estimate(0.1, 10)), ("b", estimate(0.5, 10))], title="T"))


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_no_name_is_cut(size: int) -> None:
    name = "race = Native Hawaiian and other Pacific Islander, sex = female, age = 65 and over"
    words = " ".join(
        texts(bars([(name, estimate(0.1, 99)), ("b", estimate(0.5, 99))], title="T", worst=name, size=size))
    )
    assert name in words.replace(" worst", "")


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_no_name_of_a_curve_is_cut(size: int) -> None:
    names = ["race = Native American", "race = Native Hawaiian and other Pacific Islander, sex = female", "overall"]
    drawing = lines({name: [(0, 1), (9, 2)] for name in names}, title="T", x_label="x", y_label="y", size=size)
    assert all(name in " ".join(texts(drawing)) for name in names)


def test_a_band_of_no_length_is_a_line() -> None:
    drawing = lines({"a": [(0, 1), (6, 2)]}, title="T", x_label="tau", y_label="y", band=(2.5, 2.5, "chosen: tau 2.5"))
    assert "chosen: tau 2.5" in texts(drawing)
    assert 'stroke-dasharray="4 3"' in drawing


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_a_group_that_is_left_out_keeps_its_name_whole_beside_short_words(size: int) -> None:
    hidden = Estimate(math.nan, math.nan, math.nan, 10)
    drawing = bars([("race = Native American", hidden), ("b", estimate(0.5, 99))], title="T", size=size)
    words = texts(drawing)
    assert "left out" in words
    assert "race = Native American" in " ".join(words)
    assert "left out to protect fewer than 10 records" in drawing, "hovering says why"


def test_the_share_of_the_largest_class_is_drawn() -> None:
    drawing = bars([("a", estimate(0.8, 99))], title="T", baseline=("always answering the largest class", 0.779))
    assert "dotted: always answering the largest class 78\u00a0%" in texts(drawing)


def test_a_group_without_records_says_so() -> None:
    words = texts(bars([("a", estimate(0.5, 10)), ("b", estimate(math.nan, 0))], title="T"))
    assert "not measured" in words
    assert not any("nan" in word for word in words)


def test_bars_in_another_unit_may_be_negative() -> None:
    drawing = bars(
        [("a", Estimate(-12.0, -20.0, -4.0, 9)), ("b", Estimate(3.0, 1.0, 5.0, 9))], title="T", unit="points"
    )
    words = " ".join(texts(drawing)).replace("\u00a0", " ")
    assert "-12 points" in words
    assert "-20 to -4 points" in words
    assert all(float(node.get("width", "-1")) >= 0 for node in ET.fromstring(drawing).iter(f"{SVG}rect"))


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_lines_name_every_series_axis_and_limit(size: int) -> None:
    series = {"strict": [(0, 0.0), (100, 0.9)], "open": [(0, 0.0), (100, 7.9)]}
    limits = {"strict": 1.0, "open": 8.0}
    drawing = lines(series, title="T", x_label="step", y_label="spent", highlight="strict", limits=limits, size=size)
    words = texts(drawing)
    assert {"strict", "open", "step", "spent", "strict: at most 1", "open: at most 8", "0", "100"} <= set(words)
    assert drawing.count('stroke-dasharray="6 4"') == 2


def test_series_differ_without_colour() -> None:
    series = {f"class {i}": [(0.0, 0.0), (1.0, i / 10)] for i in range(LABELLED)}
    root = ET.fromstring(lines(series, title="T", x_label="x", y_label="y", highlight="class 3"))
    curves = [node for group in root.iter(f"{SVG}g") for node in group.iter(f"{SVG}polyline")]
    looks = {(node.get("stroke"), node.get("stroke-dasharray"), node.get("stroke-width")) for node in curves}
    assert len(looks) == len(curves) == LABELLED
    assert len({node.get("stroke-dasharray") for node in curves}) > 2


def test_many_series_leave_the_rest_grey_and_keep_the_highlight() -> None:
    series = {f"site {i}": [(0.0, 0.0), (1.0, i / 60)] for i in range(60)}
    drawing = lines(series, title="T", x_label="x", y_label="y", highlight="site 59")
    named = [word for word in texts(drawing) if word.startswith("site")]
    assert len(named) == LABELLED
    assert "site 59" in named
    assert "49 more in grey" in drawing


@pytest.mark.parametrize(
    "points", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 2.0)], [(0.0, math.nan)], [(0.0, 0.0), (1.0, 0.0)]]
)
def test_lines_of_almost_nothing(points: list[tuple[float, float]]) -> None:
    drawing = lines({"a": points}, title="T", x_label="x", y_label="y")
    ET.fromstring(drawing)
    assert "nan" not in drawing.replace("Nothing", "")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_hostile_names_stay_text(name: str, size: int) -> None:
    for drawing in (
        bars([(name, estimate(0.5, 3)), ("b", estimate(1, 1))], title=name, size=size),
        lines({name: [(0, 0), (1, 1)]}, title=name, x_label=name, y_label=name, highlight=name, size=size),
    ):
        tags = {node.tag.removeprefix(SVG) for node in ET.fromstring(drawing.encode()).iter()}
        assert tags <= {"svg", "title", "desc", "g", "rect", "path", "polyline", "text"}
        assert "\u202e" not in drawing


def test_drawings_carry_no_styles_links_or_scripts() -> None:
    drawing = bars([("a", estimate(0.5, 3))], title="T") + lines({"a": [(0, 1)]}, title="T", x_label="x", y_label="y")
    assert not any(part in drawing for part in ("style=", "<style", "href", "url(", "<script", "class="))


@given(st.lists(st.floats(-50, 400), min_size=1, max_size=20))
def test_labels_never_overlap_and_stay_inside(wanted: list[float]) -> None:
    placed = spread(wanted, 16, 30, 350)
    assert all(b - a >= 16 - 1e-9 for a, b in pairwise(sorted(placed)))
    assert min(placed) >= 30 - 1e-9
    assert max(placed) <= 350 + 1e-9
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert order == sorted(order, key=lambda i: placed[i])


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(3, 10))
def test_ticks_enclose_and_are_few(low: float, extent: float, count: int) -> None:
    marks = ticks(low, low + extent, count)
    step = marks[1] - marks[0]
    slack = 1e-6 * step + 2 * math.ulp(abs(low) + extent)
    assert marks[0] <= low + slack
    assert marks[-1] >= low + extent - slack
    assert 2 <= len(marks) <= 2 * count + 2


def test_thin_keeps_the_ends() -> None:
    points = [(float(i), float(i)) for i in range(100_000)]
    kept = thin(points)
    assert len(kept) == 160
    assert (kept[0], kept[-1]) == (points[0], points[-1])


@given(st.text(), st.floats(20, 300))
def test_fitted_text_fits(words: str, room: float) -> None:
    assert text.width(text.fit(words, 13, room), 13) <= room + 1e-6


@given(st.text(st.characters(codec=None)))
def test_clean_text_can_be_written_and_parsed(words: str) -> None:
    assert ET.fromstring(f'<a b="{text.escape(words)}">{text.escape(words)}</a>'.encode()).text == (
        text.clean(words) or None
    )
