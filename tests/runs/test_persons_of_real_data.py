"""Runs by person on real pictures: stopped, resumed, verified and reported. Both read the files of ../shared/data."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from commands import result
from evenhand.data.persons import by_person
from processes import started, wait_for

SHARED = Path(os.environ.get("EVENHAND_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def pictures(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"the files of {name} are not in {SHARED}")
    return SHARED


def check_reported(run: Path, counted: tuple[int, str], name: str, learned: tuple[str, float]) -> None:
    """Verify a finished run, and look at what statement and page say of its persons and how well it does."""
    checked = result("verify", run)
    assert checked["ok"], checked["problems"]
    assert checked["epsilon"] <= 3
    statement = json.loads((run / "statement.json").read_text())
    assert statement["guarantee"]["unit"] == "person"
    assert (statement["public_inputs"]["records"], statement["public_inputs"]["persons"]) == (counted[0], name)
    page = Path(result("report", run)["report"]).read_text()
    assert f"on {counted[0]} {counted[1]}" in page
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measure, least = learned
    assert max(row[measure] for row in rows if measure in row) > least


@pytest.mark.parametrize("way", ["--records-per-person", "--person-cap"])
def test_ham10000_by_lesion_is_stopped_and_resumed_on_the_command_line(way: str, tmp_path: Path) -> None:
    folder = pictures("ham10000")
    train, _ = eh.data.load("ham10000", data_dir=folder)
    assert train.together is not None
    pictures_of_each = torch.unique(train.together, return_counts=True)[1]
    lesions = len(pictures_of_each)
    assert lesions < len(train)
    asked = ("--data", "ham10000", "--data-dir", folder, "--persons", "lesion", way, "2")
    trained = ("--epsilon", "3", "--epochs", "6", "--batch-size", "256", "--model", "linear", "--lr", "0.05")
    process, run = started("train", *asked, *trained, "--out", "run"), tmp_path / "run"
    wait_for(lambda: (run / "ledger.jsonl").exists() and eh.verify(run)["steps"] > 20)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    before = eh.verify(run)["steps"]
    assert 20 < before < result("resume", run)["steps"] == eh.verify(run)["steps"]
    kept = int(pictures_of_each.clamp(max=2).sum())
    counted = (kept, "records") if way == "--person-cap" else (lesions, "persons")
    check_reported(run, counted, "lesion", ("roc_auc", 0.6))


class Crash:
    """A logger that ends the process's work at the first evaluation."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise KeyboardInterrupt


def test_mnist_with_one_to_twenty_pictures_a_person_is_resumed(tmp_path: Path) -> None:
    train, test = eh.data.load("mnist", data_dir=pictures("mnist"))
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 21, len(train))
    person = torch.from_numpy(np.repeat(np.arange(len(train)), sizes)[: len(train)][draw.permutation(len(train))])
    data = by_person(replace(train, together_by="writer", together=person), person, records_per_person=4)
    persons = len(torch.unique(person))
    assert data.persons is not None
    counts = data.persons.starts.diff()
    assert (len(data), int(counts.min()), int(counts.max())) == (persons, 1, 20)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))

    asked = {"epsilon": 3.0, "delta": 1e-5, "epochs": 4, "batch_size": 256, "lr": 0.5, "test": test}
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        eh.fit(model(), data, **asked, out=run, loggers=[Crash()])
    lost = eh.verify(run)["steps"]
    done = eh.resume(run, model=model(), train=data, test=test)
    assert 0 < lost < eh.verify(run)["steps"] == done.plan.steps
    check_reported(run, (persons, "persons"), "writer", ("accuracy", 0.6))
