"""Densities as runs: ledger, statement and verification as of every other run, from Python and as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evenhand as eh
from commands import evenhand, result
from evenhand import density
from evenhand._numbers import rounded_up
from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.data import Data
from evenhand.density import METHODS, MomentDensity, NoisyEmbeddingDensity, RandomFeatureDensity
from evenhand.density.torch_models import rebuilt
from evenhand.errors import BudgetExhausted, UsageError
from evenhand.methods.catalogue import DENSITIES
from evenhand.training.config import Config
from evenhand.training.from_config import planned, train
from evenhand.types import Facts


def arrays(count: int = 300) -> tuple[torch.Tensor, np.ndarray]:
    labels = np.arange(count) % 2
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.tensor(labels)[:, None], labels


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests here use rows of the same people, whose runs add up."""
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize("kind", [RandomFeatureDensity, MomentDensity, NoisyEmbeddingDensity])
def test_a_run_folder_verifies_and_shows_every_change(kind: type, tmp_path: Path) -> None:
    fitted = kind(epsilon=2.0, delta=1e-4, out=tmp_path / "run").fit(*arrays())
    checked = eh.verify(tmp_path / "run")
    assert checked["ok"], checked["problems"]
    assert checked["epsilon"] == pytest.approx(fitted.privacy_.epsilons["all"], rel=1e-9)
    assert checked["steps"] == fitted.plan_.steps
    ledger = tmp_path / "run" / "ledger.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    kinds = [row["type"] for row in rows if row["type"] != "file"]
    assert kinds == ["open", "segment", *["reserve", "commit"] * fitted.plan_.steps, "release"]
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement["mechanism"]["rule"]["name"] == fitted.plan_.method
    assert statement["accounting"]["runs_composed"] >= 1
    assert statement["mechanism"]["sampling"] == "every record in every step"
    assert "Poisson" not in (tmp_path / "run" / "statement.md").read_text()
    with pytest.raises(BudgetExhausted, match="This run is finished"):
        eh.resume(tmp_path / "run")
    ledger.write_text(ledger.read_text().replace('"std":', '"std":1'))
    assert not eh.verify(tmp_path / "run")["ok"]


def test_a_statement_of_noisy_rows_names_its_relation_and_the_epsilon_of_replacing(tmp_path: Path) -> None:
    inputs, labels = arrays()
    owners = ["strict", "usual"] * 150
    form = NoisyEmbeddingDensity(delta=1e-4, out=tmp_path / "run")
    fitted = form.fit(inputs, labels, owners=owners, budgets={"strict": 1.0, "usual": 4.0})
    words = (tmp_path / "run" / "statement.md").read_text()
    assert "number of rows of each owner is public and a missing record leaves a row of zeros" in words
    assert "Budgets were promised for: replace one" in words
    for owner, spent in fitted.privacy_.replaced.items():
        assert f"epsilon {rounded_up(spent)} for owner {owner!r}" in words
    assert eh.verify(tmp_path / "run")["ok"]
    MomentDensity(epsilon=1.0, delta=1e-4, out=tmp_path / "sums").fit(inputs, labels)
    assert "REPLACED" not in (tmp_path / "sums" / "statement.md").read_text()


def test_many_owners_get_the_largest_epsilon_of_replacing(tmp_path: Path) -> None:
    budgets = np.repeat(np.linspace(0.5, 4.0, 30).round(2), 10)
    fitted = NoisyEmbeddingDensity(delta=1e-4, out=tmp_path / "run").fit(*arrays(), budgets=budgets)
    (words,) = fitted.plan_.replacement_warnings(1)
    assert f"at most epsilon {rounded_up(max(fitted.privacy_.replaced.values()))} for owner '4'" in words
    assert fitted.plan_.replacement_warnings(0) == []


def test_less_noise_than_planned_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenhand.density import noisy_sums

    monkeypatch.setattr(noisy_sums, "noise_std", lambda level, *rest: ((level.bound,), 0.5 * level.noise * level.bound))
    MomentDensity(epsilon=2.0, delta=1e-4, out=tmp_path / "run").fit(*arrays())
    assert "less noise than planned" in eh.verify(tmp_path / "run")["problems"][0]


def test_a_release_is_charged_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenhand.density import noisy_sums

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noisy_sums, "release", crash)
    with pytest.raises(KeyboardInterrupt):
        MomentDensity(epsilon=2.0, delta=1e-4, out=tmp_path / "run").fit(*arrays())
    assert eh.verify(tmp_path / "run")["steps"] == 1
    monkeypatch.undo()
    with pytest.raises(BudgetExhausted, match="the sum is lost"):
        MomentDensity(epsilon=2.0, delta=1e-4, out=tmp_path / "run").fit(*arrays())
    with pytest.raises(UsageError, match="holds a run already"):
        MomentDensity(epsilon=3.0, delta=1e-4, out=tmp_path / "run").fit(*arrays())


def test_runs_on_the_same_data_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    for number in (1, 2):
        MomentDensity(epsilon=1.0, delta=1e-4, out=tmp_path / str(number)).fit(*arrays())
    found = json.loads((tmp_path / "2" / "composition.json").read_text())
    assert found["runs"] == 2
    assert 1.3 < found["epsilons"]["all"] < 1.6


@pytest.mark.parametrize("method", METHODS)
def test_train_takes_densities_by_name(method: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = ("train", "--data", "digits", "--method", method, "--epsilon", "8", "--delta", "1e-4", "--out", str(out))
    found = result(*asked, "--insecure-seed", "0")
    assert found["method"] == method
    assert found["guarantee"] == "proved and tested"
    assert found["epsilon"] <= 8
    assert found["accuracy"] > (0.85 if method != "noisy_embedding_density" else 0.0)
    assert eh.verify(out)["ok"]
    assert (out / "report.html").exists()
    assert (out / "model-card.md").exists()
    assert json.loads((out / "metrics.jsonl").read_text())["accuracy"] == found["accuracy"]


@pytest.mark.parametrize("method", METHODS)
def test_plan_prints_what_a_density_would_spend_from_public_facts_alone(method: str) -> None:
    asked = ("plan", "--owners", "strict=100,open=300", "--budgets", "strict=1,open=4", "--delta", "1e-4")
    found = result(*asked, "--method", method)
    facts = Facts(400, (("strict", 100), ("open", 300)))
    made = getattr(density, METHODS[method])().plan(facts, Budgets({"strict": 1.0, "open": 4.0}, 1e-4))
    assert found["digest"] == made.digest
    assert found["epsilons"] == list(made.epsilons)
    words = evenhand(*asked, "--method", method).stdout
    assert words.strip() == str(made)
    assert f"{made.steps} release" in words
    for name, level in zip(DENSITIES[method].releases, made.levels, strict=True):
        assert f"release of the {name} with noise multiplier {level.noise:.4f}" in words
    for owner, epsilon in zip(("strict", "open"), made.epsilons, strict=True):
        assert f"owner {owner!r}: spends epsilon {rounded_up(epsilon)} of" in words
    assert found["warnings"] == made.replacement_warnings(made.steps)
    assert ("warning: every record is released in a row" in words) == (method == "noisy_embedding_density")


def test_a_form_with_fewer_releases_names_those_it_makes() -> None:
    form = RandomFeatureDensity(private_projection=False)
    words = str(form.plan(Facts(9, (("all", 9),)), Privacy(1.0, 1e-4)))
    assert "1 release over" in words
    assert "release of the class sums with noise" in words
    assert "mean" not in words


def test_no_plan_promises_anything_for_the_published_form() -> None:
    asked = ("plan", "--records", 500, "--epsilon", 3, "--method", "published_smoothing")
    words = evenhand(*asked).stdout
    assert "no epsilon is established" in words
    assert "theorem 1" in words
    found = result(*asked)
    assert found["guarantee"] == "not established"
    assert found["epsilons"] == found["budgets"] == [None]


@pytest.mark.parametrize("adjacency", ["replace one", "add/remove"])
def test_the_plan_of_noisy_rows_warns_as_the_statement_of_the_run_will(adjacency: Any, tmp_path: Path) -> None:
    form = NoisyEmbeddingDensity(epsilon=2.0, delta=1e-4, adjacency=adjacency, out=tmp_path / "run").fit(*arrays())
    (warning,) = form.plan_.replacement_warnings(1)
    assert warning in json.loads((tmp_path / "run" / "statement.json").read_text())["warnings"]
    assert f"warning: {warning}" in str(form.plan_)
    assert f"promised for: {adjacency}" in warning
    assert "row of zeros" in str(form.privacy_)


def test_settings_of_a_density_are_checked(tmp_path: Path) -> None:
    stopped = evenhand(
        *("train", "--data", "digits", "--method", "random_feature_density", "--epsilon", "1"),
        *("--set", "bandwith=2", "--out", str(tmp_path / "run")),
    )
    assert stopped.returncode == 2
    assert "bandwidth" in stopped.stderr
    assert not (tmp_path / "run").exists()


def test_two_promises_contradict_each_other(digit_data: tuple[Data, Data], tmp_path: Path) -> None:
    config = Config(method="moment_density", epsilon=2.0, noise=1.0)
    with pytest.raises(UsageError, match="Give one of"):
        train(config, *digit_data, tmp_path / "run")


def test_the_plan_of_a_config_is_the_one_that_training_follows(digit_data: tuple[Data, Data], tmp_path: Path) -> None:
    config = Config(method="moment_density", epsilon=2.0, delta=1e-4, insecure_seed=3, seed=5)
    made = planned(config, digit_data[0].facts, Privacy(2.0, 1e-4))
    run = train(config, *digit_data, tmp_path / "run")
    assert run.plan.digest == made.digest
    assert (
        planned(Config(method="moment_density", seed=1), digit_data[0].facts, Privacy(2.0, 1e-4)).digest == made.digest
    )
    assert planned(Config(epochs=2), digit_data[0].facts, Privacy(2.0)).method == "dpsgd"


def test_owners_by_config(digit_data: tuple[Data, Data], tmp_path: Path) -> None:
    budgets = {f"{owner}": 1.0 + owner for owner in range(10)}
    config = Config(method="random_feature_density", owners="label", budgets=budgets, delta=1e-4, insecure_seed=0)
    run = train(config, *config.load_data(), tmp_path / "run")
    spent = {row["name"]: row["epsilon"] for row in run.privacy.data["owners"]}
    assert all(0.99 * budgets[name] < spent[name] <= budgets[name] for name in spent)
    assert eh.verify(run.path)["ok"]


@pytest.mark.parametrize("settings", [{}, {"dimension": 2}])
@pytest.mark.parametrize("kind", [RandomFeatureDensity, MomentDensity, NoisyEmbeddingDensity])
def test_a_saved_density_answers_as_the_fitted_one(kind: type, settings: dict, tmp_path: Path) -> None:
    features, labels = arrays()
    fitted = kind(epsilon=2.0, delta=1e-4, out=tmp_path / "run", **settings).fit(features, labels)
    again = eh.load(tmp_path / "run").model
    torch.testing.assert_close(again(features), fitted.model_(features), rtol=0, atol=0)


def test_tensors_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match="not those of a density"):
        rebuilt(torch.nn.Linear(2, 3).state_dict())


def test_public_labels_stay_where_features_are_not_finite() -> None:
    inputs, labels = arrays(50)
    inputs[7] = float("nan")
    form = NoisyEmbeddingDensity(epsilon=0.5, delta=1e-5, labels="public", dimension=None, classes=[0, 1])
    fitted = form.fit(inputs, labels)
    assert isinstance(fitted.model_.labels, torch.Tensor)
    assert fitted.model_.labels.sum(1).tolist() == [1.0] * 50  # a row without a label would tell of the NaN


def test_a_run_with_public_labels_is_in_no_total_for_whole_records(own_state: None) -> None:
    inputs, labels = arrays(52)
    NoisyEmbeddingDensity(epsilon=0.5, delta=1e-5, labels="public", dimension=None).fit(inputs, labels)
    data = density.noisy_sums.as_data(inputs, labels)[0]
    plan = MomentDensity().plan(data.facts, Privacy(0.5, 1e-5))
    found = eh.runs.dataset_ledger.DatasetLedger.of(data).enter(plan)
    assert (found["runs"], found["uncounted"]) == (2, 1)
    assert found["epsilons"]["all"] == pytest.approx(plan.epsilons[0], rel=1e-6)


def test_the_same_records_add_up_whatever_their_labels_look_like(own_state: None, tmp_path: Path) -> None:
    inputs, labels = arrays(54)
    for number, form in enumerate((labels, np.eye(2)[labels], 1 - labels), 1):
        fitted = MomentDensity(epsilon=0.5, delta=1e-5, out=tmp_path / str(number)).fit(inputs, form)
        assert fitted.folder.composition()["runs"] == number
        assert (f"{number} runs on these data were counted" in str(fitted.privacy_)) == (number > 1)


def test_owners_and_a_budget_per_record_are_refused_together() -> None:
    inputs, labels = arrays(50)
    with pytest.raises(UsageError, match="two budgets"):
        MomentDensity(delta=1e-5).fit(inputs, labels, owners=[1, 3] * 25, budgets=[3.0, 1.0] * 25)
    budgets = Budgets.per_record([1.0, 3.0] * 25, 1e-5)
    with pytest.raises(UsageError, match="two budgets"):
        eh.fit(torch.nn.Linear(4, 2), (inputs, labels), owners=["a", "b"] * 25, privacy=budgets)


def test_a_bandwidth_that_leaves_only_rounding_is_refused() -> None:
    with pytest.raises(UsageError, match="bandwidth"):
        RandomFeatureDensity(bandwidth=1e-14).plan(Facts(10, (("all", 10),)), Privacy(1.0, 1e-5))
