"""The experiments' files are sound, and the command turns runs into pages whose every figure comes from the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenhand.comparison import recommend, sweep

HERE = Path(__file__).parents[2] / "experiments"
NAMES = sorted(file.stem for file in HERE.glob("*.toml"))


def entry(method: str, shares: list[float], **more: Any) -> dict[str, Any]:
    by_seed = {
        str(seed): {"accuracy": share, "groups": {"a": share, "b": share - 0.1}, "balanced_accuracy": share}
        for seed, share in enumerate(shares)
    }
    mean = sum(shares) / len(shares)
    plain = {"value": mean, "low": mean - 0.01, "high": mean + 0.01}
    metrics = dict.fromkeys(("accuracy", "accuracy_group_min", "accuracy_difference"), plain)
    return {
        "method": method,
        "epsilon": 3.0,
        "spent_epsilon": 2.9991,
        "private": True,
        "seeds": len(shares),
        "failures": [],
        "worst_group": "b",
        "metrics": metrics,
        "groups": {"a": plain, "b": plain},
        "against_baseline": {},
        "settings": {"lr": 0.5, "settings": {"bound": 1.0}},
        "processor_seconds": 60.0,
        "by_seed": by_seed,
        **more,
    }


TABLE = {
    "experiment": "made",
    "study": {"title": "Made up", "question": "Which?", "paper": "none", "kind": "table", "open": ["all of it"]},
    "delta": 1e-5,
    "baseline": "",
    "tuning": "Tuned alike.",
    "grid": {"lr": [0.1, 0.5]},
    "claims": [
        {
            "text": "good beats bad",
            "promise": "epsilon 3",
            "verdict": "holds",
            "difference": {"value": 30.0, "low": 28.0, "high": 32.0},
            "seeds": 3,
        }
    ],
    "setting": {
        "data": "made",
        "model": "linear",
        "records": 1000,
        "groups": 2,
        "parameters": 50,
        "group_records": {"a": 900, "b": 100},
    },
    "entries": [
        entry(
            "good",
            [0.80, 0.81, 0.82],
            tuning={"trials": 2, "failed": 0, "processor_seconds": 60.0, "chosen": {"lr": 0.5}},
        ),
        entry("alike", [0.79, 0.82, 0.81]),
        entry("bad", [0.50, 0.51, 0.525]),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_can_be_planned_and_says_what_it_is_about(name: str) -> None:
    values = sweep.table(HERE / f"{name}.toml")
    made = sweep.from_toml(HERE / f"{name}.toml", {})
    assert made.cells()
    assert made.public
    assert {"title", "question", "paper", "kind", "open"} <= set(values["study"])
    assert made.claims
    assert made.base.insecure_seed is None
    assert not made.base.compose


def test_conclusions_name_the_best_and_who_cannot_be_told_from_it(modules: Any) -> None:
    found = modules["judging"].best(TABLE, "accuracy", "epsilon 3")
    assert (found.method, found.tied, found.seeds) == ("good", ("alike",), 3)
    assert "not distinguishable from it" in found.sentence
    alone = {**TABLE, "entries": [TABLE["entries"][0], TABLE["entries"][2]]}
    assert "every other method is worse" in modules["judging"].best(alone, "accuracy", "epsilon 3").sentence
    assert modules["judging"].smallest(TABLE["setting"]) == ("b", 0.1)


def test_a_page_has_question_answer_claims_effort_and_command(modules: Any) -> None:
    text = modules["page_text"].page(TABLE)
    for words in (
        "Which?",
        "**good** has the highest accuracy",
        "good beats bad (epsilon 3): **holds**; difference +30.0 (+28.0 to +32.0)",
        "all of it",
        "81.0 (80.0 to 82.0)",
        "The 9 final runs took 3.0 processor minutes (about 1.5 minutes on two cores); tuning before them 1.0",
        "At the end of the grid, so that more might be had beyond: good (lr 0.5)",
        "python experiments/results.py made",
    ):
        assert words in text, words
    index = modules["index_text"].index([TABLE], 236.0, ["other"])
    assert "| [made](made.md) | 1,000 | b, 10 % | linear | epsilon 3 | good or alike |" in index
    assert "took 4 processor minutes with their tuning, the other pages, which scripts of the same command" in index
    assert "236 minutes on one core: together about 2.0 hours on two cores. Not in these figures" in index
    assert index.count("other.") == 1
    assert "One question each" not in index
    aside = {**TABLE, "study": {**TABLE["study"], "guides": False}}
    asked = modules["index_text"].index([aside])
    assert "| [made](made.md) | 1,000 |" not in asked
    assert f"## One question each\n\n- [{aside['study']['title']}](" in asked
    assert modules["summarising"].packaged([TABLE, aside])["studies"] == modules["summarising"].studies(TABLE)


def test_the_index_adds_up_what_pages_say_they_took(modules: Any, tmp_path: Path) -> None:
    (tmp_path / "idp_mnist.md").write_text("Made by a script; 30 minutes of runs on shared cores.")
    (tmp_path / "densities.md").write_text(
        "Made by another; 90 minutes of runs on shared cores, besides features and tuning."
    )
    found = modules["results"].index(tmp_path)
    assert (
        "120 minutes on one core: together about 1.0 hours on two cores. Not in these figures: features and " in found
    )
    assert "tuning of densities. " in found
    assert all(name in found for name in modules["results"].names())


def test_the_command_runs_a_small_part_and_writes_everything(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = modules["results"]
    monkeypatch.chdir(tmp_path)
    whole = sweep.table(HERE / "digits.toml")
    small = {**whole, "methods": ["dpsgd", "naive"], "claim": whole["claim"][1:]}
    monkeypatch.setattr(results.grid, "table", lambda path: small)
    assert results.main(["digits", "--quick", "--jobs", "1"]) == 0
    body = json.loads((tmp_path / "runs" / "quick" / "pages" / "digits.json").read_text())
    page = (tmp_path / "runs" / "quick" / "pages" / "digits.md").read_text()
    shown = 100 * body["entries"][0]["metrics"]["accuracy"]["value"]
    assert f"{shown:.1f}" in page
    ledgers = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("ledger.jsonl")}
    assert results.main(["digits", "--from", "runs/quick", "--out", "again"]) == 0
    assert (tmp_path / "again" / "digits.md").read_text() == page
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("ledger.jsonl")} == ledgers
    results.summarise(tmp_path / "again", tmp_path / "packaged.json")
    known = json.loads((tmp_path / "packaged.json").read_text())
    facts = recommend.Facts(1200, 3.0, 0.03, kind="images")
    for study in known["studies"]:
        assert (study["labels"], study["split"]) == (10, "All runs hold out the same records.")
        for best in study["best"].values():
            # one epoch teaches next to nothing, and of such a study no advice is made
            best.update(value=90.0, low=85.0, high=95.0)
    advice = recommend.recommend(facts, known=known)
    assert advice.measured
    assert advice.study == "digits"
    assert advice.settings["lr"] in (0.2, 0.5)


def test_runs_that_are_not_there_are_an_error(modules: Any, tmp_path: Path) -> None:
    assert modules["results"].main(["digits", "--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    with pytest.raises(SystemExit):
        modules["results"].main(["nothing"])
