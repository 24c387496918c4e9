"""README and CONTRIBUTING say only what is true: their commands and examples are run as written."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import evenhand as eh
from evenhand.cli import main
from evenhand.cli.methods import rows, table
from evenhand.data import Data
from evenhand.mechanism.make_plan import plan
from evenhand.methods import registry
from evenhand.methods.catalogue import catalogue

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def command(arguments: list[str], patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", arguments)
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


HUGGING_FACE = "transformers"


def test_the_python_examples_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [example for example in blocks(README, "python") if HUGGING_FACE not in example]
    assert len(examples) == 3
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert (tmp_path / "report.html").exists()
    assert eh.verify(tmp_path / "runs" / "mine")["ok"]


@pytest.mark.parametrize("door", [0, 2])
def test_a_door_of_the_readme_needs_no_other(door: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [example for example in blocks(README, "python") if HUGGING_FACE not in example]
    exec(compile(examples[door], "README.md", "exec"), {})


def test_no_door_of_the_readme_is_longer_than_ten_lines() -> None:
    doors = README.partition("## Four doors")[2].partition("## What you can ask")[0]
    for example in blocks(doors, "python"):
        assert len([row for row in example.splitlines() if row]) <= 10, example
    assert len(README.splitlines()) <= 250


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (console,) = blocks(README, "console")
    lines = console.strip().splitlines()
    assert len(lines) >= 5
    for line in lines:
        assert command(shlex.split(line), monkeypatch) == 0, line


def test_the_first_command_of_the_readme_ends_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = re.findall(r"^    python3 .*?(evenhand train .*)$", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert command(shlex.split(first), monkeypatch) == 0
    assert (tmp_path / "runs" / "first" / "report.html").exists()


def test_the_table_of_methods_is_the_generated_one() -> None:
    assert table(rows()) in (ROOT / "docs" / "methods" / "index.md").read_text()


def test_pictures_and_pages_that_are_linked_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README + CONTRIBUTING):
        assert (ROOT / target).exists(), target


def test_the_rule_of_contributing_works_as_written(
    tmp_path: Path, digit_data: tuple[Data, Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = blocks(CONTRIBUTING, "python")
    assert len(example.splitlines()) <= 40
    monkeypatch.setitem(registry._parts, "rule", dict(registry._parts["rule"]))
    file = tmp_path / "smooth_clip.py"
    file.write_text(example)
    spec = importlib.util.spec_from_file_location("smooth_clip", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smooth_clip", module)
    spec.loader.exec_module(module)
    train, test = digit_data
    model = torch.nn.Linear(64, 10)
    run = eh.fit(model, train, epsilon=3, epochs=3, method="smooth_clip", test=test, out=tmp_path / "run")
    found = eh.verify(run.path)
    assert found["ok"]
    assert found["epsilon"] <= 3
    assert "smooth_clip (by construction)" in str(run.privacy)
    assert "smooth_clip" in [recipe.name for recipe in catalogue()]
    assert plan("smooth_clip", eh.Privacy(1), data=train.facts).rule == {"name": "smooth_clip", "settings": {}}


def test_the_own_file_of_the_readme_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{20 + index % 60},{'fm'[index % 2]},{('no', 'yes')[index % 3 == 0]}" for index in range(200)]
    (tmp_path / "people.csv").write_text("\n".join(["age,sex,ill", *rows]) + "\n")
    (tmp_path / "new.csv").write_text("age,sex\n31,f\n72,m\n")
    lines = re.findall(r"^    (evenhand (?:init|train|predict) .*people.*)$", README, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        assert command(shlex.split(line), monkeypatch) == 0, line
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 3
