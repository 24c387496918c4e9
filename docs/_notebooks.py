"""Notebooks of the tutorials, made from their pages, so that nothing is written twice.

    python docs/_notebooks.py OUT     writes OUT/<tutorial>.ipynb for every page of docs/tutorials with examples

A page's text becomes Markdown cells, its `python` blocks code cells, its `console` blocks cells of shell commands, and
a block with a caption a cell that writes that file. The tests run the blocks of every page, and compare them with those
of the notebook; `pytest -m slow tests/docs/test_notebooks.py` runs the notebooks (needs nbclient and ipykernel).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

TUTORIALS = Path(__file__).parent / "tutorials"
_INCLUDE = re.compile(r"```\{include\} (.+?)\n```\n?")
_BLOCK = re.compile(
    r"^```(?:\{code-block\} )?(?P<language>\w+)\n(?::caption: (?P<file>\S+)\n\n)?(?P<body>.*?)^```\n?",
    re.DOTALL | re.MULTILINE,
)
_NOT_HERE = re.compile(r"^Also as a \{download\}`[^`]*`\.\n|<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)(?:\{[^}]*\})?\n?")
_FAILS = re.compile(r"# exit code [1-9]\d*$", re.MULTILINE)


def pages() -> list[Path]:
    """Return the tutorials that have something to run."""
    every = [page for page in sorted(TUTORIALS.glob("*.md")) if not page.name.startswith("_")]
    return [page for page in every if any(map(_runs, _BLOCK.finditer(text(page))))]


def text(page: Path) -> str:
    """Return a page with its hand-written includes in place, and without those that show the output of a build."""
    return _INCLUDE.sub(
        lambda match: "" if "_generated" in match[1] else (page.parent / match[1]).read_text(encoding="utf-8"),
        page.read_text(encoding="utf-8"),
    )


def notebook(page: Path) -> nbformat.NotebookNode:
    """Return the notebook of a tutorial, without outputs; equal pages give equal bytes."""
    source, cells, end = text(page), [], 0
    for block in _BLOCK.finditer(source):
        if not _runs(block):
            continue
        cells += _words(source[end : block.start()])
        cells.append(new_code_cell(_code(block)))
        end = block.end()
    cells += _words(source[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return made


def write(out: Path) -> None:
    """Write all notebooks; one that would not change is left alone."""
    out.mkdir(parents=True, exist_ok=True)
    for page in pages():
        file, content = out / f"{page.stem}.ipynb", nbformat.writes(notebook(page)) + "\n"
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            file.write_text(content, encoding="utf-8")


def _runs(block: re.Match[str]) -> bool:
    return bool(block["file"]) or block["language"] in ("python", "console")


def _code(block: re.Match[str]) -> str:
    body = block["body"].rstrip("\n")
    if block["file"]:
        return f"%%writefile {block['file']}\n{body}"
    if (
        block["language"] == "console"
    ):  # not "!": that gives commands a terminal, in which `init` would wait for answers
        return f"%%bash{' --no-raise-error' if _FAILS.search(body) else ''}\n{body}"
    return body


def _words(text: str) -> list[nbformat.NotebookNode]:
    """Return text as at most one cell; links to other pages become their words, since the pages are elsewhere."""
    plain = _LINK.sub(r"\1", _PICTURE.sub("", _NOT_HERE.sub("", text))).strip()
    return [new_markdown_cell(plain)] if plain else []


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]))
