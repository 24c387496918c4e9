"""Rules and methods of other packages: imported by name only, named in plan and statement, and stopping no other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import torch

import evenhand as eh
from commands import evenhand
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.methods import catalogue, plugins, registry
from evenhand.runs import statement_files
from evenhand.testing import check

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "plugin-template"
FACTS = eh.data.digits()[0].facts
RULE = """
from dataclasses import dataclass

from evenhand.methods.rules import SampleRule, register


@register
@dataclass(frozen=True)
class {cls}(SampleRule):
    "Clip."

    name = "{name}"

    def weight(self, row, state):
        return (state.bound[row.owner] / row.norm).clamp(max=1.0)

    def sensitivity(self, state):
        return state.bound
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before, modules = registry.snapshot(), set(sys.modules)
    monkeypatch.setattr(plugins, "_adopted", {})
    monkeypatch.setattr(plugins, "_told", set())
    yield
    registry.restore(before)
    for name in set(sys.modules) - modules:
        if name.startswith(("plugin_", "evenhand_smooth")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the template into a wheel, install that into a folder, without a network, and return the folder."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", wheels, TEMPLATE], check=True)
    wheel = next(wheels.glob("*.whl"))
    subprocess.run([*pip, "install", *offline, "--no-compile", "--target", target, wheel], check=True)
    return target


def package(folder: Path, name: str, code: str, entries: dict[str, str], version: str = "1.0") -> Path:
    """Write a package as pip installs it: one module, and its entry points beside it. Return where it is installed."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[evenhand.methods]", *lines]) + "\n")
    return folder


def planned(method: str) -> Plan:
    return eh.plan(method, eh.Privacy(3, 1e-5), data=FACTS, epochs=1, batch_size=128)


def test_the_installed_template_trains_by_its_name_and_the_statement_says_whose_it_is(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    train, _ = eh.data.digits()
    run = eh.fit(
        torch.nn.Linear(64, 10), train, epsilon=3.0, method="smooth_clip", epochs=0.3, out=tmp_path / "run", prior=False
    )
    assert "smooth_clip of the package evenhand-smooth 0.1.0 (by construction)" in str(run.plan)
    assert "Made by smooth_clip of the package evenhand-smooth 0.1.0" in str(run.privacy)
    written = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement_files.unpacked(written)["mechanism"]["packages"] == ["evenhand-smooth 0.1.0"]
    jsonschema.validate(written, json.loads(evenhand("statement", "--schema").stdout))
    assert eh.verify(tmp_path / "run")["problems"] == []
    assert Plan.from_json(json.loads((tmp_path / "run" / "plan.json").read_text())).digest == run.plan.digest


def test_the_rule_of_the_template_passes_the_kit(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    rule = registry.build("rule", "smooth_clip")
    findings = check(rule, only=["form", "isolation", "order", "purity", "memory", "round_trip"])
    assert findings.ok, str(findings)


@pytest.mark.slow
def test_the_tests_of_the_template_pass_as_its_readme_says(installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installed), "EVENHAND_STATE": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEMPLATE / "tests"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checked = subprocess.run(
        [sys.executable, "-m", "evenhand", "check", "smooth_clip"], env=environment, cwd=tmp_path, check=False
    )
    assert checked.returncode == 0


def test_a_function_is_a_method_with_its_arguments_as_settings(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    chosen = eh.method("smooth_falling:decay=0.9", {"bound": 0.5})
    assert (chosen.name, chosen.rule.name) == ("smooth_falling:decay=0.9", "smooth_clip")
    assert chosen.schedule == eh.schedules.Linear(decay=0.9, bound=0.5)
    assert planned("smooth_falling").packages == ("evenhand-smooth 0.1.0",)
    rows = json.loads(evenhand("methods", "--json").stdout)
    assert {row["name"]: row["settings"] for row in rows}["smooth_falling"] == {"bound": 1.0, "decay": 0.99}


def test_only_the_package_of_the_name_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "plugin_a", RULE.format(cls="A", name="plug_a"), {"plug_a": "plugin_a:A"})
    package(tmp_path, "plugin_b", RULE.format(cls="B", name="plug_b"), {"plug_b": "plugin_b:B"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert planned("dpsgd").packages == ()
    with pytest.raises(UsageError, match="Did you mean 'plug_a'"):
        eh.method("plugg_a")
    assert not {"plugin_a", "plugin_b"} & set(sys.modules)
    assert planned("idp_sample:over=plug_a").packages == ("plugin_a 1.0",)
    assert planned("plug_a").packages == ("plugin_a 1.0",)
    assert "plugin_b" not in sys.modules


def test_commands_that_need_no_method_import_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "plugin_a", "raise SystemExit(9)", {"plug_a": "plugin_a:A", "shape": "plugin_a:Shape"})
    monkeypatch.syspath_prepend(str(tmp_path))
    train, _ = eh.data.digits()
    eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=0.2, out=tmp_path / "run", prior=False)
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["methods", "--help"],
        ["verify", tmp_path / "run"],
        ["statement", tmp_path / "run"],
        ["epsilon", "--rate", "0.01", "--noise", "1", "--steps", "100", "--delta", "1e-5"],
        ["plan", "--records", "1000", "--epsilon", "3", "--epochs", "1", "--batch-size", "100"],
    ):
        assert evenhand(*arguments).returncode == 0, arguments
    asked = ["epsilon", "--records", "600", "--batch-size", "60", "--epochs", "1", "--noise", "1", "--delta", "1e-5"]
    assert evenhand(*asked, "--schedule", "shape").returncode == 2
    assert "plugin_a" not in sys.modules


BROKEN = {
    "cannot be imported": ("import nowhere_at_all", "plug_b", "B", "ModuleNotFoundError"),
    "has no such name": ("", "plug_b", "B", "AttributeError"),
    "is no part": ("B = 3", "plug_b", "B", "a registered rule, query or schedule, or a function"),
    "has another name": (RULE.format(cls="B", name="other"), "plug_b", "B", "the entry point must have its name"),
    "takes our method's name": (RULE.format(cls="B", name="dpsgd"), "dpsgd", "B", "belongs to evenhand itself"),
    "takes our rule's name": (RULE.format(cls="Clip", name="clip"), "clip", "Clip", "belongs to evenhand itself"),
    "registers our rule's name": (RULE.format(cls="Clip", name="clip"), "plug_b", "Clip", "is taken by Clip"),
    "needs arguments": ("def b(bound): ...", "plug_b", "b", "must have a default"),
    "returns no method": ("def b(bound=1.0): ...", "plug_b", "b", "returned NoneType, not a Method"),
    "hides its rule": (
        RULE.format(cls="B", name="hidden") + "\n\ndef b():\n    import evenhand as eh\n    return eh.Method(B())",
        "plug_b",
        "b",
        "B needs an entry point of its own",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_named_and_does_not_stop_others(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, name, attribute, reason = BROKEN[case]
    package(tmp_path, "plugin_b", code, {name: f"plugin_b:{attribute}"})
    package(tmp_path, "plugin_a", RULE.format(cls="A", name="plug_a"), {"plug_a": "plugin_a:A"})
    monkeypatch.syspath_prepend(str(tmp_path))
    ours, before = registry.part("rule", "clip"), registry.names("rule")
    listed = [recipe.name for recipe in catalogue.catalogue()]
    said = capsys.readouterr().err
    assert f"{name!r} of the package plugin_b 1.0 cannot be used: " in said
    assert reason in said
    assert "plug_a" in listed
    assert listed.count("dpsgd") == 1
    assert set(registry.names("rule")) - set(before) == {"plug_a"}
    assert registry.part("rule", "clip") is ours
    catalogue.catalogue()
    assert capsys.readouterr().err == "", "said once"
    if name == "plug_b":
        with pytest.raises(UsageError, match=r"of the package plugin_b 1\.0 cannot be used"):
            eh.method(name)


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "plugin_a", RULE.format(cls="A", name="plug_a"), {"plug_a": "plugin_a:A"})
    package(tmp_path, "plugin_b", RULE.format(cls="A", name="plug_a"), {"plug_a": "plugin_b:A"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"plugin_. 1\.0 and plugin_. 1\.0 declare the same name"):
        eh.method("plug_a")


def test_another_version_of_the_package_does_not_go_on_with_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "plugin_a", RULE.format(cls="A", name="plug_a"), {"plug_a": "plugin_a:A"})
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = planned("plug_a")
    plugins.refuse_other_versions(plan.packages)
    (tmp_path / "plugin_a-1.0.dist-info").rename(tmp_path / "plugin_a-1.1.dist-info")
    text = (tmp_path / "plugin_a-1.1.dist-info" / "METADATA").read_text().replace("1.0", "1.1")
    (tmp_path / "plugin_a-1.1.dist-info" / "METADATA").write_text(text)
    model = torch.nn.Linear(64, 10)
    with pytest.raises(UsageError, match=r"plugin_a 1\.0, and 1\.1 of it is installed"):
        eh.attach(
            model, torch.optim.SGD(model.parameters(), lr=1.0), eh.losses.CrossEntropy(), plan, out=tmp_path / "run"
        )


def test_a_claim_of_a_package_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = RULE.format(cls="A", name="plug_a").replace('"Clip."', 'guarantee = "proved and tested"')
    package(tmp_path, "plugin_a", code, {"plug_a": "plugin_a:A"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert any("the word of plugin_a 1.0" in warning for warning in planned("plug_a").warnings())
