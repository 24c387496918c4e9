"""Equal effort: the same grid for all, trials on a part of the training data, the winner against the test data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from evenhand.comparison import run_cell, tuning
from evenhand.comparison import sweep as grid
from evenhand.comparison.compare import Comparison, compare
from evenhand.comparison.compared_methods import Line
from evenhand.comparison.run_cell import Validation, finished, loaded, perform, plan_task
from evenhand.comparison.sweep import Sweep
from evenhand.data.dataset import wrap
from evenhand.errors import UsageError
from evenhand.runs.verify import verify
from evenhand.training.config import Config

VALUES = {
    "data": "digits",
    "model": "linear",
    "epochs": 1,
    "methods": ["dpsgd", "naive"],
    "epsilons": [3],
    "seeds": 2,
    "baseline": "dpsgd",
    "compose": False,
    "tune": {"lr": [0.0001, 0.5], "score": "accuracy", "split_seed": 7},
    "claim": [
        {"text": "A weight per group helps", "left": "naive", "right": "dpsgd", "measure": "worst"},
        {"text": "DP-SGD is beyond perfect", "left": "dpsgd", "right": 1000},
    ],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("tuned") / "out"
    return out, compare(grid.sweep(VALUES), out, jobs=1, progress=False)


def test_the_better_point_of_the_grid_is_what_the_final_runs_use(made: tuple[Path, Comparison]) -> None:
    out, found = made
    assert found.failed == []
    trials = json.loads((out / "tuning.json").read_text())["trials"]
    for entry in found.entries:
        own = [trial for trial in trials if trial["method"] == entry.method]
        winner = max(own, key=lambda trial: trial["score"])
        assert entry.effort is not None
        assert (entry.effort.trials, entry.effort.failed) == (2, 0)
        assert entry.effort.seconds > 0
        assert entry.effort.chosen == winner["chosen"]
        final = [result.task.cell.config for result in found.results if result.task.cell.method == entry.method]
        assert {config.lr for config in final} == {winner["chosen"]["lr"]}
        assert {config.seed for config in final} == {0, 1}
    assert all(result.task.tuned for result in found.results), "their statements say so"


def test_trials_are_verified_runs_of_their_own_on_training_records(made: tuple[Path, Comparison]) -> None:
    out, found = made
    folders = sorted((out / "private" / "tuning").iterdir())
    assert len(folders) == 4
    for folder in folders:
        assert verify(folder)["ok"]
        plan = json.loads((folder / "plan.json").read_text())
        assert plan["facts"]["records"] < found.results[0].task.plan.facts.records
        assert f"seed = {tuning.FIRST_SEED}" in (folder / "config.toml").read_text()
    scores = json.loads((out / "tuning.json").read_text())
    assert [trial["method"] for trial in scores["trials"]] == ["dpsgd", "dpsgd", "naive", "naive"]


def test_the_validation_part_is_cut_from_the_training_data_alone() -> None:
    cell = grid.sweep(VALUES).trials()[0].cell
    whole, test = loaded(cell)
    rest, part = loaded(cell, Validation(0.1, 7))
    assert len(rest) + len(part) == len(whole)
    assert 0.05 < len(part) / len(whole) < 0.15
    rows = {tuple(row.tolist()) for row in whole.fetch(torch.arange(len(whole)))[0]}
    seen = {tuple(row.tolist()) for row in part.fetch(torch.arange(len(part)))[0]}
    held = {tuple(row.tolist()) for row in test.fetch(torch.arange(len(test)))[0]}
    assert seen <= rows
    assert not seen & held
    assert loaded(cell, Validation(0.1, 8))[1].facts.records != 0
    assert len(loaded(cell, Validation(0.3, 7))[1]) > len(part)


def test_tables_say_what_tuning_took_and_that_no_epsilon_covers_it(made: tuple[Path, Comparison]) -> None:
    out, _ = made
    body = json.loads((out / "table.json").read_text())
    assert body["grid"] == {"lr": [0.0001, 0.5]}
    assert tuning.PUBLIC in body["tuning"]
    assert body["epsilon_of_all_runs_together"] is None
    entry = next(entry for entry in body["entries"] if entry["method"] == "naive")
    assert entry["tuning"]["trials"] == 2
    assert entry["settings"]["lr"] == entry["tuning"]["chosen"]["lr"]
    for text in ((out / "table.md").read_text(), (out / "report.html").read_text()):
        assert "that is not in epsilon here" in text
    assert "2 trials" in (out / "table.md").read_text()


def test_differences_are_paired_by_seed(made: tuple[Path, Comparison]) -> None:
    _, found = made
    last = {(r.task.cell.method, r.task.cell.seed): r.last for r in found.results}
    naive = next(entry for entry in found.entries if entry.method == "naive")
    each = [100 * (last["naive", seed]["accuracy"] - last["dpsgd", seed]["accuracy"]) for seed in (0, 1)]
    assert naive.against["accuracy"].value == pytest.approx(sum(each) / 2)
    worst = [
        100 * (min(last["naive", s]["groups"].values()) - min(last["dpsgd", s]["groups"].values())) for s in (0, 1)
    ]
    assert naive.against["worst"].value == pytest.approx(sum(worst) / 2)
    assert "gap" in naive.against
    assert next(entry for entry in found.entries if entry.method == "dpsgd").against == {}


def test_claims_are_judged_in_every_table(made: tuple[Path, Comparison]) -> None:
    body = json.loads((made[0] / "table.json").read_text())
    first, second = body["claims"]
    assert first["promise"] == "epsilon 3"
    assert second["verdict"] == "does not hold"
    assert second["difference"]["high"] < 0
    assert f"DP-SGD is beyond perfect (epsilon 3): {second['verdict']}" in (made[0] / "table.md").read_text()


def test_started_again_nothing_is_repeated(made: tuple[Path, Comparison]) -> None:
    out, _ = made
    before = {path: path.stat().st_mtime_ns for path in out.rglob("ledger.jsonl")}
    again = compare(grid.sweep(VALUES), out, jobs=1, progress=False)
    assert again.reused == len(again.results) == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("ledger.jsonl")} == before


def test_every_method_gets_the_same_grid_as_far_as_it_has_the_settings() -> None:
    made = tuning.tune({"lr": [0.1, 0.5], "batch_size": [64, 128], "settings": {"bound": [0.5, 1.0]}})
    assert len(made.choices(Line("dpsgd", "dpsgd"))) == len(made.choices(Line("naive", "naive"))) == 8
    assert len(made.choices(Line("sgd", "sgd"))) == 4
    assert len(made.choices(Line("C = 2", "dpsgd", {"bound": 2.0}, {"lr": 0.3}))) == 2


def test_trials_are_far_from_the_final_seeds_and_each_insecure_noise_differs() -> None:
    sweep = Sweep(Config(insecure_seed=3), tune=tuning.tune({"lr": [0.1, 0.2], "seeds": 2}))
    seeds = {trial.cell.seed for trial in sweep.trials()}
    assert seeds == {tuning.FIRST_SEED, tuning.FIRST_SEED + 1}
    assert not {trial.cell.config.insecure_seed for trial in sweep.trials()} & {
        cell.config.insecure_seed for cell in sweep.cells()
    }


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "declares nothing to try"),
        ({"lr": 0.5}, "takes a list of different values"),
        ({"lr": [0.5, 0.5]}, "takes a list of different values"),
        ({"lrr": [0.5]}, "Did you mean 'lr'"),
        ({"lr": [0.5], "score": "mean"}, "no score to tune by"),
        ({"lr": [0.5], "share": 1.5}, "less than 1"),
        ({"lr": [0.5], "seeds": 0}, "at least 1"),
        ({"lr": [0.5], "seeds": True}, "takes a number"),
        ({"lr": [0.5], "settings": [1]}, "settings are lists by name"),
        ({"lr": [0.5], "allow_uncharged_tuning": 1}, "true or false"),
    ],
)
def test_mistakes_in_the_grid_are_named(table: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tuning.tune(table)


def test_tuning_on_data_that_are_not_public_must_be_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenhand.data.sources.PUBLIC", frozenset())
    values = {**VALUES, "methods": ["dpsgd"], "seeds": 1, "tune": {"lr": [0.5]}, "claim": []}
    with pytest.raises(UsageError, match="allow_uncharged_tuning = true"):
        grid.sweep(values)
    allowed = grid.sweep({**values, "tune": {"lr": [0.5], "allow_uncharged_tuning": True}})
    compare(allowed, tmp_path / "out", jobs=1, progress=False)
    for name in ("table.md", "table.json", "report.html"):
        assert tuning.UNCHARGED in (tmp_path / "out" / name).read_text()
    assert not (tmp_path / "out" / "tuning.json").exists()
    assert (tmp_path / "out" / "private" / "tuning.json").exists()


def test_trials_are_counted_and_final_runs_say_that_trials_chose_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    sweep = grid.sweep({**VALUES, "methods": ["dpsgd"], "claim": [], "compose": True, "tune": {"lr": [0.5]}})
    (trial,), (first, second) = sweep.trials(), sweep.cells({("dpsgd", 3.0): sweep.trials()[0].choice})
    before = plan_task(first, tmp_path)
    for found in (before, plan_task(trial.cell, tmp_path, validation=Validation(0.1, 7))):
        perform(found)
        assert json.loads((found.path / "statement.json").read_text())["accounting"]["tuning_counted"]
    for cell in (first, second):
        found = plan_task(cell, tmp_path, tuned=True)
        assert not finished(found), "a run from before the trials has to say that they chose it"
        perform(found)
        assert finished(found)
        assert not json.loads((found.path / "statement.json").read_text())["accounting"]["tuning_counted"]
        for name in ("statement.md", "model-card.md", "report.html"):
            assert "chosen by trials scored on training records" in (found.path / name).read_text(), name
        assert verify(found.path)["ok"]
    assert before.path == plan_task(first, tmp_path, tuned=True).path
    counts = [json.loads(file.read_text())["runs"] for file in tmp_path.rglob("composition.json")]
    assert sorted(counts) == [1, 2, 3], "the trial is a run on the same data"


def test_data_are_not_loaded_again_for_another_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    times, data = list[int](), wrap(torch.zeros(4, 2), [0, 1, 0, 1])
    monkeypatch.setattr(Config, "load_data", lambda self: times.append(1) or (data, None))
    run_cell.forget()
    for cell in grid.sweep({**VALUES, "source": {"records": 900}}).cells():
        run_cell.loaded(cell)
    run_cell.forget()
    assert len(times) == 1
