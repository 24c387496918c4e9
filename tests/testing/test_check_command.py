"""``evenhand check`` and the pytest plugin, as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import evenhand
from evenhand.methods import registry

RULE = '''
from dataclasses import dataclass

from evenhand.methods.rules import SampleRule, register


@register
@dataclass(frozen=True)
class Mine(SampleRule):
    """Clip."""

    name = "mine_{name}"

    def weight(self, row, state):
        return {weight}

    def sensitivity(self, state):
        return state.bound
'''
QUERY = '''
from dataclasses import dataclass

from evenhand.methods.queries import Query, register


@register
@dataclass(frozen=True)
class Loud(Query):
    """The norm."""

    name = "loud"

    def width(self, facts):
        return 1

    def value(self, rows, state):
        return rows.norm.unsqueeze(-1)
'''
RIGHT = "(state.bound[row.owner] / row.norm).clamp(max=1.0)"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.names("rule"), registry.names("query")
    for kind in ("rule", "query"):
        monkeypatch.setitem(registry._parts, kind, dict(registry._parts[kind]))


def test_a_right_rule_passes(tmp_path: Path) -> None:
    file = tmp_path / "right.py"
    file.write_text(RULE.format(name="right", weight=RIGHT))
    done = evenhand("check", file)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("mine_right: 14 checks passed\n  ok      form")


def test_a_wrong_rule_and_a_wrong_query_fail_with_exit_code_one(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(RULE.format(name="wrong", weight="row.norm.clamp(1.0, 1.0)") + QUERY)
    done = evenhand("check", file, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] is False
    failed = {each["subject"]: [row["check"] for row in each["checks"] if not row["ok"]] for each in found["subjects"]}
    assert failed["mine_wrong"] == ["sensitivity"]
    assert failed["clip + loud"] == ["form"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "registers no rule and no query"),
        ("import no_such_package\n", "cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit"),
        (RULE.format(name="x", weight=RIGHT).replace('"mine_x"', '"clip"'), "is taken by Clip"),
        (RULE.format(name="x", weight=RIGHT).replace("    name =", "    size: int\n    name ="), "no default for size"),
    ],
)
def test_a_file_that_cannot_be_checked_is_a_usage_error(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "odd.py"
    file.write_text(text)
    done = evenhand("check", file)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    for name in ("none.py", "data.csv"):
        done = evenhand("check", tmp_path / name)
        assert done.returncode == 2
        assert "There is no rule file" in done.stderr


def pytest_run(folder: Path, *arguments: str) -> str:
    """In a process of its own, with the plugin given by name wherever it is not installed as an entry point."""
    from importlib.metadata import entry_points

    known = any(entry.value == "evenhand.testing.plugin" for entry in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", "evenhand.testing.plugin"]
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *plugin, *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_the_plugin_gives_a_fixture_and_one_test_per_check(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RULE.format(name="plugged", weight="row.norm.clamp(1.0, 1.0)"))
    (tmp_path / "test_mine.py").write_text(
        "import pytest\nfrom mine import Mine\n\n"
        'def test_some(conforms):\n    conforms(Mine(), only=["form", "order"])\n\n'
        "@pytest.mark.conformance(Mine())\ndef test_each(conformance):\n    conformance()\n"
    )
    said = pytest_run(tmp_path, "-q", "-k", "test_some or order or sensitivity")
    assert "1 failed, 2 passed" in said
    assert "test_each[mine_plugged-sensitivity]" in said
    assert "Smallest input found: (norm 2, loss 0" in said


def test_the_plugin_says_what_the_marker_needs(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_each(conformance):\n    conformance()\n")
    assert "conformance needs @pytest.mark.conformance(MyRule(), ...)" in pytest_run(tmp_path, "-q")


def test_loading_the_plugin_is_light() -> None:
    line = "import sys, evenhand.testing.plugin; print({'torch', 'scipy', 'hypothesis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
