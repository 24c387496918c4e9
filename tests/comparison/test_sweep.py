"""What a comparison runs, and what it refuses before anything is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenhand.comparison import sweep
from evenhand.comparison.sweep import Sweep
from evenhand.errors import UsageError
from evenhand.training.config import Config


def test_methods_by_promises_by_seeds() -> None:
    cells = Sweep(Config(seed=5), methods=("dpsgd",), epsilons=(3.0, 1.0, 3.0), seeds=2, reference=True).cells()
    assert [cell.name for cell in cells] == [
        "dpsgd-eps1-seed5",
        "dpsgd-eps1-seed6",
        "dpsgd-eps3-seed5",
        "dpsgd-eps3-seed6",
        "sgd-seed5",
        "sgd-seed6",
    ]
    assert [cell.private for cell in cells] == [True] * 4 + [False] * 2
    assert cells[3].config.seed == 6
    assert cells[3].config.epsilon == 3
    assert cells[-1].config.epsilon is None


def test_the_reference_is_there_only_when_asked() -> None:
    assert {cell.method for cell in Sweep(Config()).cells()} == {"dpsgd"}
    asked = Sweep(Config(), methods=("sgd", "dpsgd"), reference=True)
    assert asked.names == ("sgd", "dpsgd")


def test_settings_go_to_the_methods_that_know_them() -> None:
    base = Config(settings={"bound": 0.5})
    cells = Sweep(base, methods=("sgd", "dpsgd"), seeds=1).cells()
    assert [dict(cell.config.settings) for cell in cells] == [{}, {"bound": 0.5}]
    for settings in ({"dpsgd.bound": 2.0}, {"dpsgd": {"bound": 2.0}}):
        own = Sweep(Config(settings=settings), methods=("sgd", "dpsgd"), seeds=1).cells()
        assert dict(own[1].config.settings) == {"bound": 2.0}


def test_every_seed_of_insecure_noise_differs() -> None:
    cells = Sweep(Config(insecure_seed=7), seeds=2).cells()
    assert [cell.config.insecure_seed for cell in cells] == [7, 8]


def test_every_run_may_draw_owners_of_its_own() -> None:
    values = {
        "methods": ["idp_sample", "ino_sample"],
        "seeds": 2,
        "seed": 5,
        "budgets": {f"owner {number + 1}": 1 + number for number in range(10)},
        "source": {"owners": "random class", "owner_seed": "each run"},
        "tune": {"lr": [0.1, 0.5]},
    }
    made = sweep.sweep(values)
    assert [cell.config.source["owner_seed"] for cell in made.cells()] == [5, 6, 5, 6]
    assert {trial.cell.config.source["owner_seed"] for trial in made.trials()} == {10_000}
    first, second = (cell.config.load_data()[0] for cell in made.cells()[:2])
    assert first.facts.owner_names == second.facts.owner_names
    assert first.facts.owners != second.facts.owners
    fixed = sweep.sweep({**values, "source": {"owners": "random class", "owner_seed": 3}})
    assert {cell.config.source["owner_seed"] for cell in fixed.cells()} == {3}
    with pytest.raises(UsageError, match="must be a whole number"):
        made.base.load_data()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"methods": ["dpsdg"]}, "Did you mean 'dpsgd'"),
        ({"methods": []}, "nothing to compare"),
        ({"methods": "dpsgd"}, "takes a list of names"),
        ({"epsilons": [0]}, "greater than 0"),
        ({"epsilons": ["three"]}, "must be a number"),
        ({"epsilons": 3}, "takes a list of numbers"),
        ({"seeds": 0}, "at least 1"),
        ({"seeds": True}, "takes a whole number"),
        ({"noise": 1.0}, "same true epsilon"),
        ({"budgets": {"a": 1}, "epsilons": [3]}, "not both"),
        ({"budgets": {"a": 0}}, "greater than 0"),
        ({"record_budgets": "promise"}, "Budgets by record are not compared"),
        ({"settings": {"bond": 1}}, "No method compared has a setting called 'bond'"),
        ({"settings": {"idp_scale.bound": 1}}, "not among the methods compared"),
        ({"epochz": 3}, "Did you mean 'epochs'"),
        ({"source": {"owner_seed": "every run"}}, 'a whole number, or "each run"'),
    ],
)
def test_mistakes_are_named(values: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sweep.sweep(values).cells()


def test_a_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "exp.toml"
    file.write_text('methods = ["sgd", "dpsgd"]\nepsilons = [1, 3]\nseeds = 2\nepochs = 4\n[settings]\nbound = 0.5\n')
    made = sweep.from_toml(file, {"seeds": 1, "epsilons": [8.0]})
    assert (made.seeds, made.epsilons, made.base.epochs) == (1, (8.0,), 4.0)
    with pytest.raises(UsageError, match="There is no file"):
        sweep.from_toml(tmp_path / "none.toml", {})
    file.write_text("methods = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        sweep.from_toml(file, {})


def test_public_data_are_split_anew_for_every_seed_unless_they_have_a_test_set() -> None:
    drawn = Sweep(Config(data="ctg", seed=4), methods=("dpsgd", "naive"), seeds=2)
    assert drawn.resampled
    assert [cell.config.source["split_seed"] for cell in drawn.cells()] == [4, 5, 4, 5]
    assert len({cell.config.split_seed for cell in drawn.cells()}) == 1
    for fixed in (Config(data="digits"), Config(data="mnist"), Config(data="ctg", source={"split_seed": 3})):
        assert not Sweep(fixed, seeds=2).resampled
        with pytest.raises(UsageError, match="nothing to resample"):
            Sweep(fixed, seeds=2, split="resampled")
    once = Sweep(Config(data="ctg"), seeds=2, split="fixed")
    assert not any("split_seed" in cell.config.source for cell in once.cells())


def test_trials_of_tuning_share_one_split() -> None:
    tuned = sweep.sweep({"data": "ctg", "methods": ["dpsgd"], "seeds": 2, "tune": {"lr": [0.1, 0.5], "seeds": 2}})
    assert tuned.resampled
    assert {trial.cell.config.source.get("split_seed") for trial in tuned.trials()} == {None}


def test_private_data_are_split_once_unless_asked() -> None:
    own = Config(data="people.csv", label="ill", seed=4)
    once = Sweep(own, seeds=2)
    assert not once.resampled
    assert {cell.config.split_seed for cell in once.cells()} == {4}
    asked = Sweep(own, seeds=2, split="resampled")
    assert [cell.config.split_seed for cell in asked.cells()] == [4, 5]
    with pytest.raises(UsageError, match="kind of split"):
        Sweep(own, split="random")
    with pytest.raises(UsageError, match="takes one of: resampled, fixed"):
        sweep.sweep({"split": 3})


def test_every_private_method_gets_a_line_for_every_goal_and_pays_for_its_counts() -> None:
    values = {
        "methods": ["sgd", "dpsgd", "moment_density"],
        "variants": {"small": {"method": "psac", "tau": 1.5, "goal": "balanced"}},
        "goals": ["overall", "worst"],
        "settings": {"dpsgd.bound": 2.0},
        "seeds": 1,
    }
    asked = sweep.sweep(values)
    assert asked.names == ("sgd", "dpsgd", "dpsgd (goal worst)", "moment_density", "small", "small (goal worst)")
    of = {cell.method: cell.config for cell in asked.cells()}
    assert {name: (config.goal, config.prior) for name, config in of.items()} == {
        "sgd": ("overall", False),
        "dpsgd": ("overall", False),
        "dpsgd (goal worst)": ("worst", True),
        "moment_density": ("overall", False),
        "small": ("balanced", True),
        "small (goal worst)": ("worst", True),
    }
    assert of["small (goal worst)"].tau == 1.5
    assert [dict(of[name].settings) for name in ("dpsgd", "dpsgd (goal worst)")] == [{"bound": 2.0}] * 2


def test_declared_counts_are_not_counted_again() -> None:
    cells = sweep.sweep({"methods": ["dpsgd"], "goals": ["worst"], "prior_counts": [900.0, 100.0], "seeds": 1}).cells()
    assert not cells[0].config.prior


def test_an_unknown_goal_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="goal"):
        sweep.sweep({"methods": ["dpsgd"], "goals": ["fair"]})


def test_a_variant_may_drop_training_records_of_an_owner_and_change_nothing_else_of_the_data() -> None:
    fewer = {"fewer": {"method": "dpsgd", "source": {"owner_drop": {"open": 0.5}}}}
    cells = sweep.sweep({"methods": ["dpsgd"], "variants": fewer, "source": {"owners": "class"}, "seeds": 1}).cells()
    assert [dict(cell.config.source).get("owner_drop") for cell in cells] == [None, {"open": 0.5}]
    with pytest.raises(UsageError, match="key of the source"):
        sweep.sweep({"variants": {"other": {"method": "dpsgd", "source": {"owners": "class"}}}}).cells()
