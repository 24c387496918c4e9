"""Runs beside each other: only released values are read, the planner is the accountant, damage is one clear line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from commands import evenhand
from evenhand.comparison.viewer import page, planner, released
from evenhand.errors import UsageError, VerificationError
from evenhand.runs.folder import Folder
from viewed_runs import OWNERS, folders, hostile_copy

opened: list[str] = []
looking: set[str] = set()
"""Whether to note the files that are opened; an audit hook cannot be taken away again."""
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event in looking else None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("viewed"))


def test_only_what_may_be_shared_is_read(runs: dict[str, Path], tmp_path: Path) -> None:
    read = {name: released.read(path) for name, path in runs.items()}
    looking.add("open")
    shown = page.live({number: released.read(path) for number, path in enumerate(runs.values())})
    looking.clear()
    secret = [name for name in opened if "/private" in name or name.endswith(("config.toml", "env.json"))]
    assert len(opened) > 10
    assert secret == []
    for name, path in runs.items():
        shutil.copytree(path, tmp_path / name)
        shutil.rmtree(tmp_path / name / "private")
        (tmp_path / name / "config.toml").unlink(missing_ok=True)
        (tmp_path / name / "env.json").unlink()
    assert page.live({number: released.read(tmp_path / name) for number, name in enumerate(runs)}) == shown
    assert str(runs["first"]) not in shown, "where folders lie is nobody's business"
    assert read["first"].overall.count == 450


def test_figures_are_those_of_the_run(runs: dict[str, Path]) -> None:
    run, last = released.read(runs["first"]), Folder(runs["first"]).last_evaluation()
    assert run.overall.value == last["accuracy"]
    assert {name: one.value for name, one in run.groups.items()} == last["groups"]
    assert [one.tau for one in run.strengths] == [row["tau"] for row in last["frontier"]]
    for one, row in zip(run.strengths, last["frontier"], strict=True):
        assert {name: cell.value for name, cell in one.classes.items()} == {
            name: cell["accuracy"] for name, cell in row["classes"].items()
        }
    assert run.promise == "epsilon 3, delta 1e-05, record added or removed"
    assert run.spent == "epsilon 3.000"


def test_a_run_whose_metrics_must_not_be_shared_shows_none(runs: dict[str, Path]) -> None:
    run = released.read(runs["plain"])
    assert Folder(runs["plain"]).last_evaluation()["accuracy"] > 0.5
    assert not run.overall.measured
    assert run.groups == {}
    assert run.strengths == ()
    assert run.report() is None
    assert planner.lacks(run.plan)
    assert "must not be shared" in page.exported([run])


def test_the_planner_at_a_runs_own_settings_is_its_plan(runs: dict[str, Path]) -> None:
    for name in ("first", "owners"):
        plan = released.read(runs[name]).plan
        for fine in (False, True):
            of = planner.dials(plan, fine=fine)
            figures = planner.answer(plan, of, [dial.start for dial in of])
            assert figures["Noise multiplier"] == f"{plan.levels[0].noise:.4g}"
            assert figures["Steps"] == f"{plan.steps}, about {plan.expected_batch:g} records each"
            assert figures["Cost"].endswith("1 times this run")


def test_the_planner_elsewhere_is_a_plan_of_its_own(runs: dict[str, Path]) -> None:
    plan = released.read(runs["first"]).plan
    of = planner.dials(plan, fine=True)
    place = [of[0].values.index(8.0), len(of[1].values) - 1, 0]
    figures = planner.answer(plan, of, place)
    epochs, batch = of[1].values[-1], of[2].values[0]
    own = eh.plan("dpsgd", eh.Privacy(8, plan.delta), data=plan.facts, epochs=epochs, batch_size=batch, prior="labels")
    assert abs(own.steps - int(figures["Steps"].partition(", about")[0].replace(",", ""))) <= 1
    assert float(figures["Noise multiplier"]) == pytest.approx(own.levels[0].noise, rel=0.02)
    assert figures["Spent at the end"].startswith("epsilon 8.000 of 8 ")


def test_each_owners_budget_moves_by_itself(runs: dict[str, Path]) -> None:
    plan = released.read(runs["owners"]).plan
    of = planner.dials(plan, fine=True)
    assert [dial.name for dial in of[:3]] == [f"epsilon of {name}" for name in plan.facts.owner_names]
    place = [dial.start for dial in of]
    before = planner.answer(plan, of, place)["Spent at the end"]
    strict = [dial.name for dial in of].index("epsilon of strict")
    place[strict] = of[strict].values.index(2.0)
    after = planner.answer(plan, of, place)["Spent at the end"]
    assert f"of {OWNERS['strict']:g}" in before
    assert "strict 2.000 of 2" in after or "strict 1.99" in after
    assert planner.largest(plan, of, place) == max(OWNERS.values())
    few = planner.dials(plan, fine=False)
    assert few[0].name == planner.FACTOR
    assert planner.largest(plan, few, [few[0].values.index(2.0)]) == 2 * max(OWNERS.values())


def test_what_cannot_be_planned_is_said(runs: dict[str, Path]) -> None:
    plan = released.read(runs["first"]).plan
    of = planner.dials(plan, fine=True)
    for place in ([0], [99, 0, 0], [-1, 0, 0], [0, 0, 0, 0]):
        with pytest.raises(UsageError, match="no such position"):
            planner.answer(plan, of, place)
    huge = [of[0], planner.Dial(planner.EPOCHS, (1e9,), 0), of[2]]
    assert "more than 1,000,000 steps" in planner.answer(plan, huge, [0, 0, 0])["Not planned"]


def test_the_nearest_study_is_the_recommended_one(runs: dict[str, Path]) -> None:
    from evenhand.comparison.recommend import Facts, recommend

    plan = released.read(runs["first"]).plan
    words = planner.study(plan, 3.0, "images")
    advice = recommend(Facts(plan.facts.records, 3.0, kind="images"), "accuracy")
    assert advice.study == "digits"
    assert "on digits (1,265 records" in words
    assert f"alike: {advice.sure}" in words
    assert planner.study(plan, 3.0, "text").startswith("Nothing similar was measured")


@pytest.mark.parametrize(
    ("key", "value"), [("accuracy", 2.0), ("records", "many"), ("group_records", {}), ("frontier", [{"tau": "x"}])]
)
def test_damaged_figures_are_one_line(runs: dict[str, Path], tmp_path: Path, key: str, value: Any) -> None:
    shutil.copytree(runs["first"], tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    *lines, last = file.read_text().splitlines()
    file.write_text("\n".join([*lines, json.dumps(json.loads(last) | {key: value})]) + "\n")
    with pytest.raises(VerificationError, match=r"run: metrics\.jsonl cannot be read"):
        released.read(tmp_path / "run")


def test_a_missing_an_unbegun_and_a_damaged_run_are_one_line_each(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["first"], tmp_path / "damaged")
    ledger = tmp_path / "damaged" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"count"', '"amount"', 1))
    shutil.copytree(runs["first"], tmp_path / "unbegun")
    (tmp_path / "unbegun" / "ledger.jsonl").unlink()
    cases = {"nothing": (2, "not a run folder"), "unbegun": (2, "not begun"), "damaged": (1, "evenhand verify")}
    for name, (code, words) in cases.items():
        done = evenhand("open", tmp_path / name)
        assert done.returncode == code
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        assert words in done.stderr


def test_names_that_are_alike_are_told_apart_and_hostile_ones_stay_text(runs: dict[str, Path], tmp_path: Path) -> None:
    twice = [released.read(runs["first"]), released.read(runs["first"])]
    assert page.names(twice) == ["first", "first (2)"]
    written = page.exported([released.read(hostile_copy(runs["first"], tmp_path))])
    assert "<img" not in written
    assert "</script><" not in written.partition('id="data"')[2].partition("</script>")[0]


def test_the_file_is_written_whole_and_says_where(runs: dict[str, Path], tmp_path: Path) -> None:
    done = evenhand("open", runs["first"], runs["second"], "--export", "all.html", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "page: all.html\n")
    text = (tmp_path / "all.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "connect-src" not in text
    assert len(text) < 500_000
    report = runs["second"] / "report.html"
    before = report.read_bytes()
    assert evenhand("open", runs["first"], "--export", report).returncode == 2
    assert report.read_bytes() == before
    wrong = evenhand("open", runs["first"], "--export", "no/such/all.html", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "Choose another --export" in wrong.stderr


def test_a_rule_that_only_its_trainer_knows_has_no_planner(tmp_path: Path, digit_data: tuple[Any, Any]) -> None:
    train, _ = digit_data
    run = eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=1, out=tmp_path / "run", compose=False)
    file = run.path / "plan.json"
    plan = json.loads(file.read_text())
    foreign = type(run.plan).from_json({**plan, "method": "theirs", "rule": {"name": "theirs", "settings": {}}})
    assert "not known here" in planner.lacks(foreign)
