"""``eh.compare`` and ``compare --rules``: data in memory, own rules, a DataFrame, and a folder to share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import evenhand as eh
from commands import evenhand
from evenhand.comparison import sweep as sweeps
from evenhand.comparison.in_python import COLUMNS
from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.runs.folder import Folder
from evenhand.training.run import Run

RULE = '''
from dataclasses import dataclass
import torch
from evenhand.methods.rules import SampleRule, register

@register
@dataclass(frozen=True)
class Half(SampleRule):
    """Clip to half of the bound."""
    name = "half_of_the_bound"
    reference = "an example"
    def weight(self, row, state):
        return torch.clamp(0.5 * state.bound[row.owner] / row.norm, max=1.0)
    def sensitivity(self, state):
        return state.bound
'''
X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def test_data_in_memory_are_compared(tmp_path: Path) -> None:
    compared = eh.compare((X, Y), ["dpsgd", "sgd"], [1.0, 3.0], seeds=2, model="linear", epochs=2, out=tmp_path / "a")
    table = compared.table
    assert tuple(table.columns) == COLUMNS
    assert compared.failed == []
    accuracy = table[table["metric"] == "accuracy"]
    assert sorted(accuracy["method"]) == ["dpsgd", "dpsgd", "sgd"]
    assert (accuracy["n"] == 2).all()
    assert accuracy["epsilon"].dropna().tolist() == [1.0, 3.0]
    assert (accuracy["low"] <= accuracy["mean"]).all()
    assert "<table>" in compared._repr_html_()
    saved = compared.save(tmp_path / "b")
    assert (saved / "report.html").exists()
    assert not [path for path in saved.rglob("*") if path.name in ("private", "config.toml", "env.json")]
    with pytest.raises(UsageError, match="not empty"):
        compared.save(tmp_path / "b")
    with pytest.raises(UsageError, match="not empty"):
        eh.compare((X, Y), out=tmp_path / "a")


def test_a_goal_is_paid_from_the_promise_and_moves_the_answers(tmp_path: Path) -> None:
    rare = (np.arange(200) % 10 == 0).astype(int)
    facts = {"model": "linear", "epochs": 2, "goals": ["overall", "balanced"], "out": tmp_path / "a"}
    compared = eh.compare((X, rare), ["dpsgd"], [1.0], seeds=1, **facts)
    assert compared.failed == []
    plain, balanced = (result.task.path for result in compared.comparison.results)
    assert not (plain / "decision.json").exists()
    assert json.loads((balanced / "decision.json").read_text())["goal"] == "balanced"
    for path in (plain, balanced):
        eh.verify(path)
        assert Run(Folder(path)).privacy.epsilon <= 1.0
    charged = [json.loads(line)["type"] for line in (balanced / "ledger.jsonl").read_text().splitlines()]
    assert charged.count("prior") == 1, "the counts of labels are charged"


def test_methods_must_be_a_list() -> None:
    with pytest.raises(UsageError, match=r"methods=\['dpsgd'\]"):
        eh.compare("digits", "dpsgd")


def test_a_file_of_rules_on_the_command_line_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._parts, "rule", dict(registry._parts["rule"]))
    (tmp_path / "mine.py").write_text(RULE)
    typed = ["compare", "--data", "digits", "--model", "linear", "--epochs", 1, "--seeds", 1, "--out", "compared"]
    refused = evenhand(*typed, "--methods", "half_of_the_bound", cwd=tmp_path)
    assert refused.returncode == 2, "a rule that nobody named is not known"
    done = evenhand(*typed, "--methods", "dpsgd,half_of_the_bound", "--rules", "mine.py", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["failed"]
    assert len(told["runs"]) == 2
    missing = evenhand(*typed, "--rules", "other.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert "no rule file" in missing.stderr


def test_a_comparison_by_metrics_of_ones_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(600, 3)).astype("float32")
    groups = np.where(draw.random(600) < 0.5, "a", "b")
    targets = (inputs[:, 0] + (groups == "b") * inputs[:, 1] > 0).astype(int)
    data = eh.data.wrap(inputs, targets, groups=groups)
    compared = eh.compare(
        *(data, ["dpsgd"], [3.0]),
        seeds=2,
        model="linear",
        epochs=1,
        reference=True,
        metric="fpr_difference,fpr",
        out=tmp_path / "out",
    )
    table = compared.table.set_index("metric")
    assert {"fpr_difference", "fpr"} <= set(table.index)
    shared = json.loads((tmp_path / "out" / "table.json").read_text())
    full = json.loads((tmp_path / "out" / "private" / "table-full.json").read_text())
    assert shared["findings"][0].startswith("fpr_difference at epsilon 3: ") or "does not" in shared["findings"][0]
    entry = shared["entries"][0]
    assert set(entry["asked"]["fpr"]) == {"a", "b"}
    values = [entry["asked"]["fpr"][name]["value"] for name in ("a", "b")]
    rows = entry["by_seed"].values()
    apart = [abs(row["group_metrics"]["fpr"]["a"] - row["group_metrics"]["fpr"]["b"]) for row in rows]
    assert entry["metrics"]["fpr_difference"]["value"] == pytest.approx(np.mean(apart))
    assert values[0] == pytest.approx(np.mean([row["group_metrics"]["fpr"]["a"] for row in rows]))
    assert entry["asked_costs"] == {}, "what the non-private model gets is not shared"
    costs = full["entries"][0]["asked_costs"]["fpr"]["a"]["value"]
    plain = next(one for one in full["entries"] if not one["private"])
    assert costs == pytest.approx(values[0] - plain["asked"]["fpr"]["a"]["value"])
    assert "The metrics asked for, per group" in (tmp_path / "out" / "report.html").read_text()
    inside = json.loads(next((tmp_path / "out").rglob("training_groups.json")).read_text())
    assert set(inside["a"]) >= {"accuracy", "norm"}


def test_tuning_goes_by_the_metric_asked_for() -> None:
    chosen = sweeps.sweep({"metric": "fpr_difference,fpr", "tune": {"lr": [0.1, 0.2]}})
    assert chosen.tune is not None
    assert chosen.tune.score == "fpr_difference"
    assert chosen.metrics == ("fpr_difference", "fpr")
    own = sweeps.sweep({"metric": "fpr", "tune": {"lr": [0.1], "score": "worst"}}).tune
    assert own is not None
    assert own.score == "worst"
    with pytest.raises(UsageError, match="fpr"):
        sweeps.sweep({"metric": "fpx"})
