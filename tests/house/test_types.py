"""Type checkers see the public names as Python does, and a wrong call is an error in a user's project."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import evenhand

ROOT = Path(__file__).parents[2]
LAZY = ("evenhand", "evenhand.accounting", "evenhand.density", "evenhand.methods", "evenhand.testing")
WRONG = [line for line in (ROOT / "tests/house/typed_use.py").read_text().splitlines() if "# type: ignore" in line]


def seen_by_checkers(package: str) -> dict[str, str]:
    """Return the names that the package imports for type checkers, with the full name of each."""
    tree = ast.parse(Path(importlib.import_module(package).__file__ or "").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


@pytest.mark.parametrize("package", LAZY)
def test_every_lazy_name_has_its_type(package: str) -> None:
    module, static = importlib.import_module(package), seen_by_checkers(package)
    direct = {name for name in module.__all__ if name in module.__dict__ and name not in static}
    assert set(static) | direct == set(module.__all__)
    for name, path in static.items():
        home, _, attribute = path.rpartition(".")
        assert getattr(module, name) is getattr(importlib.import_module(home), attribute), name


def test_every_name_that_works_in_python_is_public_for_checkers() -> None:
    assert set(evenhand._PUBLIC) | set(evenhand._MODULES) == set(evenhand.__all__)


def test_mypy_reads_the_uses_with_the_package() -> None:
    """tests/house/test_code.py runs mypy with this setting, strict: an ignore that suppresses nothing is an error."""
    assert 'files = ["src/evenhand", "tests/house/typed_use.py"]' in (ROOT / "pyproject.toml").read_text()
    assert len(WRONG) >= 15


def project(folder: Path) -> Path:
    """Write a user's project of one file, in which every wrong line stands bare, and return the file."""
    text = (ROOT / "tests/house/typed_use.py").read_text()
    file = folder / "training.py"
    file.write_text("\n".join(line.partition("  # type: ignore")[0] for line in text.splitlines()) + "\n")
    return file


def wrong_lines(file: Path) -> set[int]:
    """Return the numbers of the lines that are wrong."""
    bare = [line.partition("  # type: ignore")[0] for line in WRONG]
    return {number for number, line in enumerate(file.read_text().splitlines(), 1) if line in bare}


@pytest.mark.slow
def test_mypy_finds_every_wrong_call_in_a_project_with_its_own_settings(tmp_path: Path) -> None:
    file = project(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            "",
            "--cache-dir",
            str(ROOT / ".mypy_cache"),
            "-O",
            "json",
            file,
        ],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {error["line"] for error in errors if error["file"] == file.name} == wrong_lines(file), done.stdout


def pyright(*files: Path, folder: Path) -> list[tuple[str, int]]:
    """Return file and line of every error that pyright finds in a project that sees the package under test."""
    settings = {"include": [str(file) for file in files], "extraPaths": [str(ROOT / "src")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(row["file"], row["range"]["start"]["line"] + 1) for row in found if row["severity"] == "error"]


@pytest.mark.slow
def test_pyright_finds_every_wrong_call(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    file = project(tmp_path)
    assert {line for _, line in pyright(file, folder=tmp_path)} == wrong_lines(file)


@pytest.mark.slow
def test_pyright_accepts_the_examples(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    readme = tmp_path / "readme.py"
    theirs = "from typing import Any\n\nclassifier: Any = ...\ntrain_texts: Any = ...\ntest_texts: Any = ...\n"
    readme.write_text("\n".join([theirs, *blocks]))
    assert "eh.fit(" in readme.read_text()
    assert pyright(readme, *sorted((ROOT / "examples").glob("*.py")), folder=tmp_path) == []
