"""The house rules: style, types, layers, sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        [str(Path(sys.executable).with_name("lint-imports"))],
    ],
    ids=["ruff", "format", "mypy", "import-linter"],
)
def test_tools_are_clean(arguments: list[str]) -> None:
    done = tool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_is_longer_than_450_lines() -> None:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    files += ROOT.glob("experiments/**/*.py")
    assert len(files) > 50
    long = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: lines for name, lines in long.items() if lines > 450} == {}


def test_folders_are_at_most_three_deep() -> None:
    deep = [file for file in (ROOT / "src" / "evenhand").rglob("*.py") if len(file.relative_to(ROOT).parts) > 5]
    assert deep == []


def test_the_house_has_sixteen_rooms_of_at_most_eighteen_files() -> None:
    house = ROOT / "src" / "evenhand"
    rooms = [folder for folder in house.iterdir() if (folder / "__init__.py").exists()]
    assert len(rooms) <= 16
    folders = {file.parent for file in house.rglob("*.py")}
    full = {str(folder.relative_to(house)): len([*folder.glob("*.py")]) for folder in folders if folder.name != "cli"}
    assert {name: files for name, files in full.items() if files > 18} == {}


def test_every_module_is_in_a_storey() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    storeys = next(contract["layers"] for contract in contracts if contract["name"].startswith("Storeys"))
    assert len(storeys) == 7, "six storeys and the ground floor"
    listed = {name for storey in storeys for name in re.split(r" [|:] ", storey)}
    house = ROOT / "src" / "evenhand"
    modules = {f"evenhand.{file.stem}" for file in house.glob("*.py")} - {"evenhand.__init__", "evenhand.__main__"}
    rooms = {f"evenhand.{folder.name}" for folder in house.iterdir() if (folder / "__init__.py").exists()}
    assert listed == modules | rooms


def test_tests_stand_in_rooms_and_share_only_helpers() -> None:
    house = ROOT / "src" / "evenhand"
    rooms = {folder.name for folder in house.iterdir() if (folder / "__init__.py").exists()}
    across = {"benchmarks", "docs", "edges", "experiments", "faults", "golden", "house", "wrong_mechanisms"}
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").glob("*/**/test_*.py")}
    assert folders <= rooms | across
    borrowed = re.compile(r"^(?:from|import) (?:\w+\.)*test_\w+", re.MULTILINE)
    texts = {file.name: file.read_text() for file in (ROOT / "tests").glob("**/*.py")}
    assert [name for name, text in texts.items() if borrowed.search(text) and name != "test_executors.py"] == []


def test_no_module_is_named_like_a_public_function() -> None:
    import evenhand

    modules = {file.stem for file in (ROOT / "src" / "evenhand").glob("*.py")}
    functions = {name for name in evenhand._PUBLIC if name.islower()}
    assert not modules & functions


def source_trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the package, by its path inside the package."""
    package = ROOT / "src" / "evenhand"
    trees = {str(file.relative_to(package)): ast.parse(file.read_text()) for file in sorted(package.rglob("*.py"))}
    assert len(trees) > 100
    return trees


def test_no_docstring_begins_with_a_reference_or_a_question() -> None:
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    wrong = [
        f"{path}: {getattr(node, 'name', 'module')}"
        for path, tree in source_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith(("The same", "As ", "What "))
    ]
    assert wrong == [], "say what it returns or holds, so that the line can be read alone"


def test_variables_are_named_by_the_thing_that_they_hold() -> None:
    vague = ("found", "made", "kept", "held", "own")
    uses = [
        f"{path}:{node.lineno}"
        for path, tree in source_trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in vague)
        or (isinstance(node, ast.arg) and node.arg in vague)
    ]
    assert len(uses) <= 30, f"{len(uses)} variables or arguments are named {', '.join(vague)}: {uses}"


def test_modules_in_ing_are_terms_of_the_field() -> None:
    terms = {
        "accounting",
        "reporting",
        "training",
        "testing",
        "auditing",
        "tuning",
        "sampling",
        "timing",
        "scattering",
        "embedding",
        "smoothing",
        "noisy_embedding",
        "published_smoothing",
        "record_coupling",
        "no_clipping",
        "lightning",
    }
    names = {Path(part).stem for path in source_trees() for part in Path(path).parts}
    assert {name for name in names if name.endswith("ing")} <= terms


def test_every_public_name_exists() -> None:
    import evenhand

    for name in evenhand.__all__:
        assert getattr(evenhand, name) is not None


def test_the_version_is_one_number() -> None:
    import evenhand

    written = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert written is not None
    assert cited is not None
    assert written.group(1) == cited.group(1) == evenhand.__version__
