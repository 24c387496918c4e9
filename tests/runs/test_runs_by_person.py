"""Runs whose unit is a person: from a file to a statement, resumed, added up with runs by record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from commands import evenhand, result
from evenhand.accounting import accountant
from evenhand.data import Data, wrap
from evenhand.data.persons import by_person
from evenhand.data.tables import split
from evenhand.errors import DataError, PlanMismatchError, UsageError
from evenhand.runs import statement_files
from evenhand.runs.dataset_ledger import DatasetLedger
from evenhand.training.config import Config

NAMES = np.repeat(np.arange(60), np.arange(60) % 5 + 1)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def people(names: np.ndarray | None = NAMES) -> Data:
    inputs = torch.randn(len(NAMES), 3, generator=torch.Generator().manual_seed(0))
    return wrap(inputs, np.arange(len(NAMES)) % 2, labels=[0, 1], persons=names)


def plan(data: Data) -> eh.Plan:
    return eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=data.facts, epochs=3, batch_size=8)


def entered(data: Data) -> dict:
    return DatasetLedger.of(data).enter(plan(data))


def test_from_a_file_to_a_statement_about_persons(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{draw.integers(0, 100)},{'no' if draw.random() < 0.5 else 'yes'},person {p}" for p in NAMES]
    (tmp_path / "people.csv").write_text("age,ill,who\n" + "\n".join(rows) + "\n")
    init = ("init", "people.csv", "--label", "ill", "--labels", "no,yes", "--number", "age=0:100", "--only-declared")
    assert evenhand(*init, cwd=tmp_path).returncode == 0
    asked = ("--persons", "who", "--epsilon", "3", "--epochs", "2", "--model", "linear", "--batch-size", "10")
    done = evenhand("train", "people.toml", *asked, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    statement = result("statement", tmp_path / "run")
    assert statement["guarantee"]["unit"] == "person"
    assert statement["public_inputs"]["persons"] == "who"
    assert statement["public_inputs"]["records"] < 60
    assert not any("several records of one person" in text for text in statement["does_not_cover"])
    words = " ".join((tmp_path / "run" / "statement.md").read_text().split())
    assert "If one person is added or removed, with all of their records," in words
    assert "one record of each person" in words, "counts of labels"
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads((tmp_path / "run" / "statement.json").read_text()), statement_files.schema())
    checked = result("verify", tmp_path / "run")
    assert checked["ok"]
    assert checked["epsilon"] <= 3
    shared = [file for file in (tmp_path / "run").iterdir() if file.is_file()]
    assert not [file for file in shared if b"person 1" in file.read_bytes()], "names of persons are in no file"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "training persons" in page or " persons" in page
    both = evenhand("train", "people.toml", *asked, "--keep-together", "who", "--out", "other", cwd=tmp_path)
    assert both.returncode == 2
    assert "persons or keep_together" in both.stderr


class Crash:
    """A logger that ends the process's work at the first evaluation."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise KeyboardInterrupt


def test_a_run_goes_on_with_the_same_persons_only(tmp_path: Path) -> None:
    data, test = (
        people(),
        wrap(torch.randn(50, 3, generator=torch.Generator().manual_seed(7)), [0, 1] * 25, labels=[0, 1]),
    )
    asked = {"epsilon": 3.0, "delta": 1e-3, "epochs": 6, "batch_size": 8, "test": test}
    with pytest.raises(KeyboardInterrupt):
        eh.fit(nn.Linear(3, 2), data, **asked, out=tmp_path / "run", loggers=[Crash()])
    again = {"model": nn.Linear(3, 2), "test": test}
    with pytest.raises(PlanMismatchError, match="other public facts"):
        eh.resume(tmp_path / "run", train=people(None), **again)
    moved = NAMES.copy()
    moved[[2, 5]] = moved[[5, 2]]
    with pytest.raises(PlanMismatchError, match="not the records that this run was started on"):
        eh.resume(tmp_path / "run", train=people(moved), **again)
    run = eh.resume(tmp_path / "run", train=data, **again)
    assert run.plan.unit == "person"
    assert eh.verify(tmp_path / "run")["ok"]


def test_runs_by_person_add_up() -> None:
    data = people()
    once, twice = entered(data), entered(data)
    assert twice["runs"] == 2
    assert twice["uncounted"] == 0
    events = plan(data).events(0)
    assert twice["epsilons"]["all"] == pytest.approx(accountant.epsilon(events * 2, 1e-3), rel=1e-6)
    assert once["epsilons"]["all"] < twice["epsilons"]["all"]


def test_runs_by_record_and_by_other_persons_are_in_no_total_of_a_run_by_person() -> None:
    entered(people(None))
    entered(people(np.roll(NAMES, 1)))
    counted = entered(people())
    assert counted["runs"] == 3
    assert counted["uncounted"] == 2
    assert counted["epsilons"]["all"] == pytest.approx(accountant.epsilon(plan(people()).events(0), 1e-3), rel=1e-6)


def test_a_run_by_person_counts_as_replacing_one_in_a_run_by_record() -> None:
    """A person stays when one of their records goes: their contribution changes by up to twice the bound."""
    entered(people())
    counted = entered(people(None))
    assert counted["runs"] == 2
    assert counted["uncounted"] == 0
    events = plan(people()).events(0) + plan(people(None)).events(0)
    replaced = accountant.epsilon(events, 1e-3, relation="replace_one")
    assert counted["epsilons"]["all"] == pytest.approx(replaced, rel=1e-6)
    assert replaced > accountant.epsilon(events, 1e-3)


def test_other_splits_encodings_and_trials_are_of_the_same_persons() -> None:
    """Who is kept together is told from the whole data: parts and features of them are of the same persons."""
    data = people()
    entered(data)
    train, _ = split(data, 0.3, 0)
    other, _ = split(data, 0.3, 1)
    records = replace(train.by_record, fetch=data.by_record.fetch)
    for number, part in enumerate((train, other, by_person(records, records.together)), 2):
        counted = entered(part)
        assert counted["runs"] == number
        assert counted["uncounted"] == 0


def test_data_without_persons_refuse_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'digits' do not say which records are of one 'who'"):
        Config(data="digits", persons="who").load_data()
    lesions = replace(people(None), together=torch.from_numpy(NAMES), together_by="lesion")
    monkeypatch.setattr(eh.data, "load", lambda *_, **__: (lesions, None))
    with pytest.raises(
        UsageError, match=r"one 'patient' \(what they say: their records are told apart by 'lesion' only"
    ):
        Config(data="ham10000", persons="patient").load_data()
    train, _ = Config(data="ham10000", persons="lesion").load_data()
    assert (train.facts.unit, train.facts.told_apart) == ("person", "lesion")


def test_a_plan_by_person_is_made_before_anything_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    lesions = replace(people(None), together=torch.from_numpy(NAMES), together_by="lesion")
    monkeypatch.setattr(eh.data, "load", lambda *_, **__: (lesions, None))
    asked = ("plan", "--epsilon", "3", "--delta", "1e-3", "--epochs", "2", "--batch-size", "10")
    planned = result(*asked, "--data", "ham10000", "--persons", "lesion", "--records-per-person", "2")
    assert planned["unit"] == "person"
    assert (planned["facts"]["records"], planned["facts"]["records_per_person"]) == (60, 2)
    refused = evenhand(*asked, "--records", "100", "--persons", "who")
    assert refused.returncode == 2
    assert "--records N is their number" in refused.stderr


def test_a_plan_whose_units_contradict_each_other_is_not_read() -> None:
    written = plan(people()).to_json()
    for unit, of_facts in (("one record", "person"), ("person", "record"), ("person", "household")):
        wrong = {**written, "unit": unit, "facts": {**written["facts"], "unit": of_facts}}
        with pytest.raises(UsageError, match="damaged or edited"):
            eh.Plan.from_json(wrong)
    with pytest.raises(DataError, match="if and only if they hold persons"):
        replace(people(None), facts=people().facts)


def test_a_comparison_with_a_density_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Densities promise for single records"):
        eh.compare(people(), ["dpsgd", "moment_density"], [3.0], seeds=1, epochs=1, out=tmp_path / "compared")
    assert not [*(tmp_path / "compared").rglob("ledger.jsonl")]


def test_replicas_and_comparisons_train_persons_one_run_at_a_time(tmp_path: Path) -> None:
    asked = {"epochs": 1, "batch_size": 8, "model": "linear", "replicas": "auto", "out": tmp_path / "compared"}
    assert len(eh.compare(people(), ["dpsgd"], [3.0], seeds=2, **asked).table)
    statements = [*(tmp_path / "compared").rglob("statement.json")]
    assert len(statements) == 2
    assert {json.loads(file.read_text())["guarantee"]["unit"] for file in statements} == {"person"}
