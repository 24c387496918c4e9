"""The pictures of README and front page are what their commands draw now, and say what they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import _pictures

    return _pictures


def test_drawings_are_what_the_code_draws_now(drawn: Any) -> None:
    for name, draw in drawn.PICTURES.items():
        assert (IMAGES / f"{name}.svg").read_text() == draw(), f"{name}: run python docs/_pictures.py"


def test_drawings_bring_colours_for_light_and_dark() -> None:
    for picture in IMAGES.glob("*.svg"):
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
        assert "prefers-color-scheme:dark" in picture.read_text(), picture.name


def test_the_rare_class_gains_by_more_than_chance_and_the_whole_does_not_lose(drawn: Any) -> None:
    import json

    figures = json.loads(drawn.GOALS.read_text())
    assert figures["epsilon"] <= 3
    rare = {goal: drawn._estimate(figures, goal, "class 8") for goal in figures["goals"]}
    whole = {goal: drawn._estimate(figures, goal, drawn.WHOLE) for goal in figures["goals"]}
    assert rare["worst"].low > rare["overall"].high
    assert whole["worst"].value > whole["overall"].value


def test_speeds_are_read_off_the_table_of_the_page(drawn: Any) -> None:
    page = drawn.SPEED_PAGE.read_text()
    rows = {row.model: row.multiples for row in drawn.speeds(page)}
    assert len(rows) == 8
    (line,) = [line for line in page.splitlines() if line.startswith("| char-LSTM | 256 | 1 | ")]
    assert [rows["char-LSTM"][name] for name in ("ours", "Opacus hooks")] == [
        float(cell.split()[0]) for cell in (line.split("|")[6], line.split("|")[9])
    ]


def test_every_picture_of_a_page_exists_and_has_words() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "gallery.md"):
        found = re.findall(r"!\[(.*?)\]\((.+?)\)", page.read_text())
        assert found
        for words, target in found:
            assert len(words) > 20, f"{page.name}: {target} has no words for those who do not see it"
            assert (page.parent / target).exists(), target


def test_the_gallery_shows_every_image() -> None:
    shown = (ROOT / "docs" / "gallery.md").read_text() + (ROOT / "docs" / "how-to" / "which-method.md").read_text()
    assert [file.name for file in IMAGES.iterdir() if file.suffix != ".json" and file.name not in shown] == []
