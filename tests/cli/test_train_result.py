"""The end of ``train``: a dozen lines, the contract of ``--json``, and answers to wrong flags before torch loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from commands import evenhand, result
from evenhand import __version__
from evenhand.cli import result as result_lines

QUICK = ("--data", "digits", "--epsilon", 3, "--epochs", 2, "--batch-size", 128)
STATEMENT = {
    "guarantee": {"unit": "one record", "epsilon": 2.9, "delta": 1e-5, "level": "by construction"},
    "owners": [{"name": "all", "epsilon": 2.9, "budget": 3.0}],
    "mechanism": {"steps_charged": 9, "steps_planned": 10},
    "warnings": ["one", "two", "three"],
}


def figures(accuracy: float | None = 0.8, majority: float | None = 0.5, **groups: tuple[float, int]) -> dict[str, Any]:
    from evenhand.reporting.group_metrics import wilson
    from evenhand.reporting.run_findings import worst_group

    return {
        "accuracy": accuracy,
        "balanced_accuracy": accuracy,
        "majority": majority,
        "interval": None if accuracy is None else wilson(accuracy, 1000),
        "records": 1000,
        "effective_records": 1000,
        "metrics": {"mae": 3.25},
        "groups": {
            name: {"n": count, "effective": count, "accuracy": share, "interval": wilson(share, count)}
            for name, (share, count) in groups.items()
        },
        "worst_group": worst_group({n: s for n, (s, _) in groups.items()}, {n: c for n, (_, c) in groups.items()}),
        "group_column": "race",
    }


def ended(values: dict[str, Any], advice: int = 0) -> list[str]:
    tips = [f"tip {number}" for number in range(advice)]
    return result_lines.lines(values, STATEMENT, tips, Path("run/statement.md"), "report: run/report.html")


def test_train_ends_in_a_dozen_lines(tmp_path: Path) -> None:
    done = evenhand("train", *QUICK, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) <= result_lines.MOST_LINES
    assert told[0].startswith(("accuracy ", "This model"))
    assert any(line.startswith("spent: epsilon ") and " of 3 promised, delta " in line for line in told)
    assert told[-2:] == ["statement: run/statement.md", "report: run/report.html"]
    assert "Not covered: " in (tmp_path / "run" / "statement.md").read_text(), "the long text stays in the statement"


def test_json_has_the_fields_that_scripts_rely_on(tmp_path: Path) -> None:
    told = result("train", *QUICK, "--out", "run", cwd=tmp_path)
    assert {"balanced_accuracy", "majority", "beats_majority", "metrics", "groups", "group_accuracy"} <= set(told)
    assert isinstance(told["initial_drops"], list)
    assert told["metrics"]["accuracy"] == told["accuracy"]
    for name, group in told["groups"].items():
        low, high = group["interval"]
        assert 0 <= low <= group["accuracy"] <= high <= 1
        assert low < high, "no interval has width zero"
        assert group["accuracy"] == told["group_accuracy"][name]
    assert sum(group["n"] for group in told["groups"].values()) == told["records"] == 450
    if told["majority"] is not None:
        assert told["beats_majority"] == (told["accuracy"] > told["majority"])


@pytest.mark.parametrize(
    ("accuracy", "majority", "words"),
    [
        (0.779, 0.779, "This model does not beat always answering the largest class"),
        (0.5, 0.7, "This model does not beat always answering the largest class"),
        (0.79, 0.779, "This model cannot be told apart from always answering the largest class"),
        (0.9, 0.779, "accuracy 90.0 %"),
        (0.9, None, "accuracy 90.0 %"),
        (None, None, "mae 3.25 on 1,000 held-out records"),
    ],
)
def test_a_model_that_a_constant_answer_beats_says_so_first(
    accuracy: float | None, majority: float | None, words: str
) -> None:
    assert ended(figures(accuracy, majority))[0].startswith(words)


def test_a_worst_group_is_named_only_if_its_records_can_tell() -> None:
    told = "\n".join(ended(figures(a=(0.9, 500), b=(0.5, 300), c=(0.0, 4))))
    assert "worst group: race = b, accuracy 50.0 % (95 % interval 44–56 %) of 300 held-out records" in told
    told = "\n".join(ended(figures(a=(0.9, 500), b=(0.89, 300), c=(0.0, 4))))
    assert "told apart as worst: groups of 20 records or more range from 89 % to 90 % correct; each of the 3 is" in told
    assert "worst group:" not in told


def test_advice_gives_way_to_the_result() -> None:
    told = ended(figures(0.5, 0.7, a=(0.9, 500), b=(0.5, 300)), advice=40)
    assert len(told) == result_lines.MOST_LINES
    assert told[-2:] == ["statement: run/statement.md", "report: run/report.html"]


def test_quiet_leaves_out_plan_and_tips(tmp_path: Path) -> None:
    for name, words in (("run", ("--quiet", "train")), ("after", ("train", "--quiet"))):
        done = evenhand(*words, *QUICK, "--out", name, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stderr == ""
        assert "to try" not in done.stdout
    assert evenhand("--quiet", "train", cwd=tmp_path).stderr.startswith("evenhand: "), "errors are always printed"
    assert "Plan " in evenhand("train", *QUICK, "--out", "next", cwd=tmp_path).stderr, "it holds for one command"


def test_the_version_is_printed() -> None:
    done = evenhand("--version")
    assert (done.returncode, done.stdout) == (0, f"evenhand {__version__}\n")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["train", "--data", "digits"], "--epsilon 3"),
        (["train", "--epsilon", "0"], "greater than 0"),
        (["train", "--epsilon", "3", "--method", "dpsdg"], "Did you mean 'dpsgd'"),
        (["train", "--epsilon", "3", "--epochs", "0"], "epochs=0"),
        (["train", "--epsilon", "3", "--delta", "2"], "delta=2"),
        (["train", "--epsilon", "3", "--data", "none.csv"], "There is no file 'none.csv'"),
        (["compare", "--seeds", "0"], "seeds=0"),
        (["compare", "--methods", "dpsdg"], "Did you mean 'dpsgd'"),
        (["compare", "--methods", ","], "nothing to compare"),
    ],
)
def test_a_wrong_flag_is_answered_before_torch_is_imported(typed: list[str], words: str, tmp_path: Path) -> None:
    program = (
        "import sys\nsys.argv = ['evenhand', *sys.argv[1:]]\nfrom evenhand.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *typed], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert words in done.stderr
    assert done.returncode == 2
    assert done.stdout.strip() == "False", "torch was imported before the flags were checked"


def test_the_length_of_the_initial_drop_is_in_the_figures(tmp_path: Path) -> None:
    run = eh.fit(torch.nn.Linear(64, 10), eh.data.digits()[0], epsilon=3.0, epochs=1, out=tmp_path / "run")
    shares = [0.5, 0.2, 0.3, 0.6]
    lines = [
        {"step": k, "epoch": float(k), "accuracy": 0.5 + k / 9, "groups": {"a": 0.6, "b": share}, "records": 90}
        for k, share in enumerate(shares)
    ]
    run.folder.metrics_file.write_text("".join(json.dumps({**line, "group_records": {}}) + "\n" for line in lines))
    told = result_lines.summary(run)["initial_drops"]
    assert told == [{"group": "b", "length": 3.0, "depth": pytest.approx(0.3), "recovered": True}]
