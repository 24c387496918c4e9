"""Runs on the same data add up, unless the trainer says otherwise, and then the statement says so."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.attachment import Private
from evenhand.data import Data, wrap
from evenhand.data.fingerprint import fingerprint
from evenhand.datasets import DatasetLedger, state_folder
from evenhand.planning import Plan
from evenhand.privacy import accountants

LOSS = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def run(data: Data, plan: Plan, out: Path, **options: object) -> Private:
    model = nn.Linear(3, 2)
    with eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, plan, out=out, **options) as private:
        for batch in private.batches(data):
            private.step(batch)
        private.release()
    return private


def statement(out: Path) -> dict:
    return json.loads((out / "statement.json").read_text())


def test_ten_runs_spend_what_ten_runs_spend(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    for number in range(10):
        run(tiny, tiny_plan, tmp_path / str(number))
    last = statement(tmp_path / "9")["accounting"]
    assert last["runs_composed"] == 10
    alone = tiny_plan.events(0)
    assert last["epsilon_all_runs"] == pytest.approx(accountants.epsilon(alone * 10, tiny_plan.delta), rel=1e-3)
    assert last["epsilon_all_runs"] > 2 * tiny_plan.epsilons[0]
    words = (tmp_path / "9" / "statement.md").read_text()
    assert "counts 10 runs" in words
    assert "first run" in (tmp_path / "0" / "statement.md").read_text()


def test_opting_out_is_named(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    run(tiny, tiny_plan, tmp_path / "a", compose=False)
    assert statement(tmp_path / "a")["accounting"]["runs_composed"] is None
    assert "NOT added up" in (tmp_path / "a" / "statement.md").read_text()
    assert not state_folder().exists()


def test_other_data_do_not_add_up(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    run(tiny, tiny_plan, tmp_path / "a")
    inputs, targets = tiny.fetch(torch.arange(40))
    other = wrap(inputs + 1, targets, groups=["a", "b"] * 20, owners=["x"] * 30 + ["y"] * 10)
    run(other, tiny_plan, tmp_path / "b")
    assert statement(tmp_path / "b")["accounting"]["runs_composed"] == 1


def test_a_resumed_run_is_one_run(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, tiny_plan, out=tmp_path / "a") as private:
        private.step(next(private.batches(tiny)))
    eh.resume(tmp_path / "a", model=model, train=tiny)
    assert statement(tmp_path / "a")["accounting"]["runs_composed"] == 1


def test_runs_without_a_guarantee_are_counted_but_in_no_total(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    run(tiny, eh.plan("sgd", None, data=tiny.facts, epochs=1), tmp_path / "a")
    run(tiny, tiny_plan, tmp_path / "b")
    found = statement(tmp_path / "b")["accounting"]
    assert (found["runs_composed"], found["uncounted_runs"]) == (2, 1)
    assert "without any guarantee" in (tmp_path / "b" / "statement.md").read_text()


def test_an_owner_that_another_run_did_not_know_counts_with_its_dearest_class(tiny_plan: Plan, tiny: Data) -> None:
    ledger = DatasetLedger("secret")
    other = eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=wrap(torch.ones(40, 3), [0, 1] * 20).facts, epochs=1)
    ledger.enter(other)
    found = ledger.enter(tiny_plan)
    assert set(found["epsilons"]) == {"x", "y"}
    assert found["epsilons"]["x"] > tiny_plan.epsilons[0]


def test_the_ledger_is_private_and_tells_nothing_about_the_data(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    run(tiny, tiny_plan, tmp_path / "a")
    secret = fingerprint(tiny)
    (folder,) = (state_folder() / "datasets").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shared = [path for path in (tmp_path / "a").iterdir() if path.is_file()]
    assert all(secret not in path.read_text(errors="ignore") for path in shared)
    assert secret not in folder.name


def test_a_state_folder_that_cannot_be_written_stops_before_spending(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "file"))
    with pytest.raises(eh.errors.EvenhandError, match="EVENHAND_STATE"):
        run(tiny, tiny_plan, tmp_path / "a")
    assert eh.verify(tmp_path / "a")["steps"] == 0


def test_a_lost_entry_is_never_overwritten_by_the_next(tiny_plan: Plan) -> None:
    ledger = DatasetLedger("secret")
    for _ in range(3):
        ledger.enter(tiny_plan)
    (ledger.folder / "000001.json").unlink()
    assert ledger.enter(tiny_plan)["runs"] == 3
    assert sorted(file.stem for file in ledger.folder.glob("*.json")) == ["000000", "000002", "000003"]


def test_the_total_of_many_owners_covers_the_dearest_one() -> None:
    facts = wrap(torch.ones(100, 3), [0, 1] * 50, owners=[f"o{index:03d}" for index in range(100)]).facts
    budgets = eh.Budgets(dict.fromkeys(facts.owner_names[:-1], 1.0) | {facts.owner_names[-1]: 4.0}, delta=1e-4)
    plan = eh.plan("idp_scale", budgets, data=facts, epochs=2, batch_size=10)
    dearest = plan.epsilons[-1]
    assert dearest is not None
    assert dearest > 3.9
    once = DatasetLedger("secret").enter(plan)["epsilons"]
    twice = DatasetLedger("secret").enter(plan)["epsilons"]
    assert once["any owner"] == pytest.approx(dearest, rel=3e-3)
    assert twice["any owner"] > 1.2 * dearest
