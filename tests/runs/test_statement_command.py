"""``evenhand statement``: schema, page and files, in an environment as light as ``verify`` needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.runs.folder import Folder
from evenhand.runs.statement import markdown
from evenhand.runs.statement_files import text
from evenhand.runs.statement_page import render_statement as page


def evenhand(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenhand", "statement", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_schema_is_printed_as_published() -> None:
    done = evenhand("--schema")
    assert (done.returncode, done.stdout) == (0, text())


def test_files_hold_the_statement_of_the_folder(folders: dict[str, Folder], tmp_path: Path) -> None:
    folder = folders["dpsgd"]
    written = json.loads(folder.statement_file.read_bytes())
    done = evenhand(folder.path, "--html", tmp_path / "a", "--out", tmp_path / "b.md", "--json")
    assert json.loads(done.stdout) == {"written": [str(tmp_path / "a"), str(tmp_path / "b.md")]}
    assert (tmp_path / "a").read_text() == page(written)
    assert (tmp_path / "b.md").read_text() == markdown(written)
    evenhand(folder.path, "--out", tmp_path / "c.json")
    assert (tmp_path / "c.json").read_bytes() == folder.statement_file.read_bytes()


def test_a_run_without_a_statement_yet_has_a_page(folders: dict[str, Folder], tmp_path: Path) -> None:
    assert evenhand(folders["unreleased"].path, "--out", tmp_path / "a.HTML").returncode == 0
    assert "not released" in (tmp_path / "a.HTML").read_text()


def test_a_run_that_does_not_verify_has_nothing_to_sign(folders: dict[str, Folder], tmp_path: Path) -> None:
    shutil.copytree(folders["dpsgd"].path, tmp_path / "run")
    model = tmp_path / "run" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    done = evenhand(tmp_path / "run", "--html", tmp_path / "page.html")
    assert done.returncode == 1
    assert "does not verify, so there is nothing to sign" in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Pass a run folder"),
        (["RUN", "--out", "page.pdf"], "end the name so"),
        (["RUN", "--out", "RUN/plan.json"], "a file of the run itself"),
        (["RUN", "--html", "RUN/no/such/page.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], words: str, folders: dict[str, Folder]) -> None:
    folder = folders["dpsgd"]
    before = folder.plan_file.read_bytes()
    done = evenhand(*(argument.replace("RUN", str(folder.path)) for argument in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert folder.plan_file.read_bytes() == before


def test_nothing_heavy_is_imported(folders: dict[str, Folder], tmp_path: Path) -> None:
    code = (
        "import sys; from evenhand.cli import app\n"
        f"try: app(['statement', {str(folders['dpsgd'].path)!r}, '--html', {str(tmp_path / 'page.html')!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'sklearn', 'pandas', 'fairlearn', 'dp_accounting', 'jsonschema'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
