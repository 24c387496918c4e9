"""The names that scripts rely on, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import evenhand, result
from evenhand.density import METHODS

LIGHT = "import sys, json; from evenhand.cli import app; sys.argv = ['evenhand'] + {arguments!r}\n"
LIGHT += "try: app()\nexcept SystemExit: pass\nprint(json.dumps(sorted(sys.modules)))"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("cli") / "run"
    return result(
        "train",
        "--data",
        "digits",
        "--method",
        "dpsgd",
        "--epsilon",
        3,
        "--delta",
        "1e-4",
        "--epochs",
        2,
        "--batch-size",
        128,
        "--seed",
        0,
        "--out",
        out,
    )


def test_train_prints_what_scripts_rely_on(run: dict) -> None:
    assert {"epsilon", "delta", "accuracy", "groups", "steps", "run"} <= set(run)
    assert run["epsilon"] <= 3
    assert run["delta"] == 1e-4
    assert run["steps"] == 20
    assert set(run["groups"]) == {f"class {digit}" for digit in range(10)}


def test_verify_statement_and_report_read_the_folder(run: dict, tmp_path: Path) -> None:
    found = result("verify", run["run"])
    assert found["ok"] is True
    assert found["epsilon"] == pytest.approx(run["epsilon"], rel=1e-9)
    assert result("statement", run["run"])["guarantee"]["epsilon"] == found["epsilon"]
    page = tmp_path / "page.html"
    assert result("report", run["run"], "--out", page)["report"] == str(page)
    assert page.read_text() == (Path(run["run"]) / "report.html").read_text()


def test_a_tampered_run_fails_verification(run: dict, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(run["run"], tmp_path / "copy")
    plan = json.loads((copy / "plan.json").read_text())
    plan["levels"][0]["noise"] *= 2
    (copy / "plan.json").write_text(json.dumps(plan))
    done = evenhand("verify", copy, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False


def test_epsilon_is_the_known_value() -> None:
    found = result("epsilon", "--rate", 0.01, "--noise", 1, "--steps", 1000, "--delta", "1e-5")
    assert 1.828 <= found["epsilon"] <= 1.832
    words = evenhand("epsilon", "--rate", 0.01, "--noise", 1, "--steps", 1000, "--delta", "1e-5").stdout
    assert "delta 1e-05" in words
    assert "add/remove" in words


def test_plan_prints_every_deciding_number() -> None:
    found = result("plan", "--records", 60000, "--epsilon", 3, "--delta", "1e-5", "--epochs", 10, "--batch-size", 512)
    assert found["steps"] == 1172
    assert 2.99 < found["epsilons"][0] <= 3
    assert len(found["digest"]) == 64
    cost = result("plan", "--data", "digits", "--noise", 1.5, "--epochs", 2)
    assert cost["budgets"] == [None]
    assert cost["epsilons"][0] > 0


def test_methods_lists_guarantee_and_reference() -> None:
    rows = result("methods")
    assert {"name", "guarantee", "reference"} <= set(rows[0])
    found = {row["name"]: row["guarantee"] for row in rows}
    assert found["dpsgd"] == "by construction"
    assert found["sgd"] == "not private"
    assert {row["name"] for row in rows if row["kind"] == "density"} == {*METHODS, "published_smoothing"}
    assert found["published_smoothing"] == "not established"
    assert "bandwidth" in {row["name"]: row for row in rows}["random_feature_density"]["settings"]


def test_a_config_file_is_one_to_one_with_the_flags(run: dict, tmp_path: Path) -> None:
    config = Path(run["run"]) / "config.toml"
    again = result("train", config, "--out", tmp_path / "again")
    assert again["steps"] == run["steps"]
    other = result("train", config, "--epochs", 1, "--set", "bound=0.5", "--out", tmp_path / "other")
    assert other["steps"] == 10
    assert json.loads((tmp_path / "other" / "plan.json").read_text())["levels"][0]["bound"] == 0.5
    assert "[settings]\nbound = 0.5" in (tmp_path / "other" / "config.toml").read_text()


def test_a_run_without_out_gets_a_new_folder(tmp_path: Path) -> None:
    names = {result("train", "--epsilon", 3, "--epochs", 0.1, cwd=tmp_path)["run"] for _ in range(2)}
    assert len(names) == 2
    assert all(Path(name).parts[0] == "runs" for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--epsilon", "nan"], "epsilon=nan"),
        (["train", "--epsilon", "-1"], "greater than 0"),
        (["train", "--epsilon", "inf"], "epsilon=inf"),
        (["train", "--epsilon", "3", "--delta", "0"], "delta=0"),
        (["train", "--epsilon", "3", "--delta", "0.5"], "promises nothing"),
        (["train", "--noise", "0"], "noise=0"),
        (["train", "--epsilon", "3", "--noise", "1"], "Give one of"),
        (["train"], "say what was promised"),
        (["train", "--epsilon", "3", "--epochs", "0"], "epochs=0"),
        (["train", "--epsilon", "3", "--batch-size", "0"], "batch_size=0"),
        (["train", "--epsilon", "3", "--batch-size", "99999"], "more than the 1265 records"),
        (["train", "--epsilon", "3", "--lr", "0"], "lr=0"),
        (["train", "--epsilon", "3", "--set", "bound=0"], "bound=0"),
        (["train", "--epsilon", "3", "--set", "bond=1"], "Did you mean 'bound'"),
        (["train", "--epsilon", "3", "--set", "bound"], "KEY=VALUE"),
        (["train", "--epsilon", "3", "--data", "digit"], "Did you mean 'digits'"),
        (["train", "--epsilon", "3", "--method", "dpsdg"], "Did you mean 'dpsgd'"),
        *(
            ([*command, name], f"Did you mean '{near}'")
            for command in (["train", "--method"], ["plan", "--records", "9", "--method"], ["compare", "--methods"])
            for name, near in (("moment_densty", "moment_density"), ("publishd_smoothing", "published_smoothing"))
        ),
        (["train", "--epsilon", "3", "--method", "published_smoothing"], "No guarantee is established"),
        (["compare", "--methods", "dpsgd,published_smoothing"], "allow_unproven=True"),
        (["plan", "--records", "9", "--epsilon", "3", "--method", "moment_density", "--schedule", "step"], "no steps"),
        (["plan", "--records", "9", "--method", "moment_density"], "say what was promised"),
        (["train", "--epsilon", "3", "--model", "mpl"], "Did you mean 'mlp'"),
        (["train", "--epsilon", "three"], "epsilon"),
        (["train", "nowhere.toml"], "no file"),
        (["resume", "nowhere"], "not a run folder"),
        (["verify", "nowhere"], "not a run folder"),
        (["report", "nowhere"], "not a run folder"),
        (["plan", "--epsilon", "3"], "Say what the plan is for"),
        (["plan", "--records", "0", "--epsilon", "3"], "number of records"),
        (["epsilon", "--rate", "2", "--noise", "1", "--steps", "10", "--delta", "1e-5"], "rate"),
        (["epsilon", "--rate", "0.1", "--noise", "-1", "--steps", "10", "--delta", "1e-5"], "noise"),
        (["epsilon", "--rate", "0.1", "--noise", "1", "--steps", "-1", "--delta", "1e-5"], "steps"),
        (["trian"], "trian"),
    ],
)
def test_bad_input_is_refused_with_exit_code_two(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = evenhand(*arguments, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_config_with_an_unknown_key_or_type_names_the_right_one(tmp_path: Path) -> None:
    for text, words in (
        ("epsilonn = 3", "Did you mean 'epsilon'"),
        ("epsilon = 'three'", "takes a number"),
        ("seed = 1.5", "takes a whole number"),
        ("epsilon = true", "takes a number"),
        ("epsilon = ", "not valid TOML"),
    ):
        (tmp_path / "c.toml").write_text(text)
        done = evenhand("train", "c.toml", cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr


def modules(*arguments: object) -> set[str]:
    script = LIGHT.format(arguments=[str(argument) for argument in arguments])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"torch", "jinja2", "sklearn", "scipy.stats", "dp_accounting", "fairlearn", "pandas"}


def test_light_commands_import_nothing_heavy(run: dict) -> None:
    for arguments in (
        ["--help"],
        ["epsilon", "--rate", 0.01, "--noise", 1, "--steps", 1000, "--delta", "1e-5"],
        ["verify", run["run"]],
        ["statement", run["run"]],
        ["plan", "--records", 1000, "--epsilon", 3],
    ):
        assert not modules(*arguments) & HEAVY, arguments
