"""Notebooks of the tutorials: each has the blocks of its page, and no others, and runs to its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, blocks

TUTORIALS = sorted(
    page for page in (DOCS / "tutorials").glob("*.md") if page.name[0] != "_" and page.name != "index.md"
)


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    import _notebooks

    return _notebooks


def test_every_tutorial_offers_its_notebook(notebooks: Any) -> None:
    assert [page.name for page in notebooks.pages()] == [page.name for page in TUTORIALS]
    assert len(TUTORIALS) >= 6
    for page in TUTORIALS:
        assert f"Also as a {{download}}`notebook <../reference/_generated/{page.stem}.ipynb>`." in page.read_text()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_has_the_blocks_that_the_tests_run(notebooks: Any, page: Path) -> None:
    made = notebooks.notebook(page)
    code = [cell.source for cell in made.cells if cell.cell_type == "code"]
    expected = blocks(page)
    assert len(code) == len(expected)
    for cell, block in zip(code, expected, strict=True):
        if block.caption:
            assert cell == f"%%writefile {block.caption}\n{block.text.rstrip()}"
        elif block.language == "python":
            assert cell == block.text.rstrip("\n")
        else:
            magic, _, commands = cell.partition("\n")
            fails = any(command.code for command in block.commands())
            assert magic == ("%%bash --no-raise-error" if fails else "%%bash")
            assert commands == block.text.rstrip("\n")
    words = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
    assert words.startswith(page.read_text().splitlines()[0])
    assert "{download}" not in words
    assert ".md)" not in words, "links to other pages lead nowhere from a notebook"


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_runs(notebooks: Any, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if page.stem == "hugging-face":
        pytest.importorskip("transformers")
    adult = DOCS.parent.parent / "shared" / "data" / "adult"
    if page.stem == "csv":
        if not adult.exists():
            pytest.skip("the Adult files are not in ../shared/data/adult")
        monkeypatch.setenv("ADULT", str(adult))
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    commands = Path(sys.executable).parent  # where evenhand is, also if the environment was not activated
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    client.NotebookClient(
        notebooks.notebook(page), timeout=1200, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
