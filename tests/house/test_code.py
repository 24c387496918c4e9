"""The house rules: style, types, layers, sizes."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_no_module_is_named_like_a_public_function() -> None:
    import evenhand

    modules = {file.stem for file in (ROOT / "src" / "evenhand").glob("*.py")}
    functions = {name for name in evenhand._PUBLIC if name.islower()}
    assert not modules & functions


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
