"""The page builder: everything is escaped, markup is trusted at one place, and what is missing is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import evenhand
from evenhand.reporting import page
from evenhand.reporting.page import Bullets, Commands, Facts, Fold, Notes, Section, Table, Words, asset, figure

SOURCES = Path(evenhand.__file__).parent
TEMPLATES = SOURCES / "reporting" / "templates"
HOSTILE = "</p></style><script>x</script>\"'&\u202e\x00"


def shown(*sections: Section) -> str:
    """A page of these sections."""
    comparison = {"title": "T", "research": False}
    values = {"lead": "", "mark": "", "failures": [], "findings": Bullets([]), "sections": sections}
    return page.document("comparison.html.j2", "T", comparison=comparison, **values)


def test_every_kind_of_block_escapes_what_it_prints() -> None:
    blocks = [
        Words(HOSTILE, strong=HOSTILE, mark=HOSTILE),
        Bullets([Words(HOSTILE, mark=HOSTILE)]),
        Notes([HOSTILE]),
        page.Chooser({HOSTILE: 0, "b": 1}),
        Table([HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE),
        Table([HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE, folded=False),
        Facts({HOSTILE: HOSTILE}),
        Commands(HOSTILE),
    ]
    text = shown(Section(HOSTILE, [*blocks, Fold(HOSTILE, blocks)]))
    assert text.count("<script") == 1
    assert text.count("&lt;script&gt;") == 2 * 18 + 2  # texts of the blocks, twice; heading and summary
    assert not re.search("[\x00\u202e]", text)


def test_commands_stand_on_lines_of_their_own() -> None:
    assert "<pre><code>a &lt; b\nc\n</code></pre>" in shown(Section("S", [Commands("a < b\nc")]))


def test_markup_is_trusted_at_one_place() -> None:
    code = [file for file in SOURCES.rglob("*.py") if re.search(r"\bMarkup\(", file.read_text(encoding="utf-8"))]
    assert [file.name for file in code] == ["page.py"]
    calls = re.findall(r"\bMarkup\((?!\")", code[0].read_text(encoding="utf-8"))  # a doctest prints another
    assert len(calls) == 1
    for file in TEMPLATES.iterdir():
        assert not re.search(r"\|\s*safe|autoescape|Markup", file.read_text(encoding="utf-8")), file.name


@pytest.mark.parametrize("name", ["report.css", "report.js", "statement.css"])
def test_styles_and_scripts_are_carried_as_they_are_written(name: str) -> None:
    assert asset(name) == (TEMPLATES / name).read_text(encoding="utf-8").removesuffix("\n")
    assert "</" not in asset(name)


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        page.document("run.html.j2", "T")


def test_a_figure_is_drawn_for_two_widths() -> None:
    assert shown(Section("S", [figure(lambda size: f'<svg viewBox="0 0 {size} 9"/>')])).count("<svg ") == 2
