"""Methods compared under budgets per owner: one promise for all, told apart by owner."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from commands import result
from evenhand.comparison import sweep


def test_budgets_are_one_promise_that_every_private_method_runs_at() -> None:
    cells = sweep.sweep({"methods": ["sgd", "dpsgd", "idp_scale"], "budgets": {"a": 1, "b": 4}, "seeds": 1}).cells()
    assert [cell.name for cell in cells] == ["sgd-seed0", "dpsgd-budgets-seed0", "idp_scale-budgets-seed0"]
    assert [cell.private for cell in cells] == [False, True, True]
    assert [dict(cell.config.budgets) for cell in cells] == [{}, {"a": 1, "b": 4}, {"a": 1, "b": 4}]
    assert all(cell.config.epsilon is None for cell in cells)


def test_a_comparison_tells_owners_apart(tmp_path: Path) -> None:
    budgets = ",".join(f"{digit}={1 if digit < 5 else 4}" for digit in range(10))
    flags = ("--methods", "dpsgd,idp_scale", "--seeds", 1, "--epochs", 1, "--model", "linear", "--jobs", 1)
    found = result("compare", "--data", "digits", "--owners", "label", "--budgets", budgets, *flags, "--out", tmp_path)
    alike, apart = found["entries"]
    for name, row in apart["owners"].items():
        assert row["budget"] == (1 if int(name) < 5 else 4)
        assert 0.99 * row["budget"] < row["epsilon"] <= row["budget"]
        assert 0 <= row["accuracy"]["value"] <= 1
    assert all(0.99 < row["epsilon"] <= 1 for row in alike["owners"].values())
    page = (tmp_path / "report.html").read_text()
    assert "Who keeps which promise" in page
    assert "at budgets 1 to 4" in page
    assert f"--owners label --budgets {budgets}" in page
    (first, *_) = csv.DictReader((tmp_path / "table.csv").read_text().splitlines())
    assert 0.99 < float(first["owner_spent_epsilon[9]"]) <= 1
    assert json.loads((tmp_path / "table.json").read_text())["entries"][1]["method"] == "idp_scale"
