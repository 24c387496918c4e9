"""Runs on the same data add up, unless the trainer says otherwise, and then the statement says so."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.accounting import accountant
from evenhand.data import Data, wrap
from evenhand.data.fingerprint import fingerprint
from evenhand.mechanism.make_plan import Plan
from evenhand.mechanism.replan import replan
from evenhand.runs.dataset_ledger import DatasetLedger, state_folder
from evenhand.training.attach import Private

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
    assert last["epsilon_all_runs"] == pytest.approx(accountant.epsilon(alone * 10, tiny_plan.delta), rel=1e-3)
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
    said = (tmp_path / "b" / "statement.md").read_text()
    assert "promise nothing about single, whole records and are in no total" in said


def test_a_run_with_a_public_seed_is_in_no_later_total(tiny: Data, tiny_plan: Plan) -> None:
    ledger = DatasetLedger.of(tiny)
    first = ledger.enter(tiny_plan, seeded=True)
    assert (first["uncounted"], first["epsilons"]) == (0, DatasetLedger("other").enter(tiny_plan)["epsilons"])
    second = ledger.enter(tiny_plan)
    assert (second["runs"], second["uncounted"], second["epsilons"]) == (2, 1, first["epsilons"])


def test_an_attached_run_says_that_its_seed_is_public(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, held, LOSS, tiny_plan, out=tmp_path / "a", insecure_seed=0) as private:
        private.step(next(private.batches(tiny)))
    assert DatasetLedger.of(tiny).enter(tiny_plan)["uncounted"] == 1


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
    found = ledger.enter(tiny_plan)
    assert (found["runs"], found["uncounted"]) == (4, 1)  # its number is missing, so it is told
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


def owned(owners: list[str], inputs: torch.Tensor | None = None) -> Data:
    rows = torch.arange(1000.0)[:, None] if inputs is None else inputs
    return wrap(rows, [0, 1] * (len(rows) // 2), owners=owners)


def planned(data: Data, **budgets: float) -> Plan:
    return eh.plan("idp_sample", eh.Budgets(budgets, 1e-5), data=data.facts, epochs=5, batch_size=100)


def test_equal_names_of_other_records_are_not_taken_for_the_same_owner() -> None:
    before, after = owned(["a"] * 500 + ["b"] * 500), owned(["b"] * 500 + ["a"] * 500)
    first, second = planned(before, a=8.0, b=0.5), planned(after, a=0.5, b=8.0)
    assert DatasetLedger.of(before).folder == DatasetLedger.of(after).folder
    DatasetLedger.of(before).enter(first)
    found = DatasetLedger.of(after).enter(second)["epsilons"]
    true = accountant.epsilon([*first.events(0), *second.events(1)], 1e-5)
    assert max(found.values()) == pytest.approx(true, rel=1e-6)
    assert found["a"] >= accountant.epsilon([*first.events(1), *second.events(0)], 1e-5)


def test_the_same_owners_spend_each_their_own() -> None:
    data = owned(["a"] * 500 + ["b"] * 500)
    plan = planned(data, a=8.0, b=0.5)
    for _ in range(2):
        found = DatasetLedger.of(data).enter(plan)["epsilons"]
    assert found["b"] == pytest.approx(accountant.epsilon(plan.events(1) * 2, 1e-5), rel=1e-6)


def test_an_owner_of_an_earlier_run_does_not_vanish() -> None:
    before, after = owned(["a"] * 900 + ["gone"] * 100), owned(["a"] * 1000)
    DatasetLedger.of(before).enter(planned(before, a=0.5, gone=8.0))
    assert DatasetLedger.of(after).enter(planned(after, a=0.5))["epsilons"]["a"] > 8


def test_parts_with_the_same_pattern_of_owners_hold_other_records() -> None:
    whole = owned(["a", "a", "b", "b"] * 250)
    even, odd = (whole.take(torch.arange(begin, 1000 - 2 + begin, 2)) for begin in (0, 1))
    assert torch.equal(even.owner, odd.owner)
    assert DatasetLedger.of(even).folder == DatasetLedger.of(odd).folder == DatasetLedger.of(whole).folder
    assert len({DatasetLedger.of(part).owners for part in (even, odd, whole)}) == 3


def test_an_entry_that_does_not_say_who_owned_what_counts_as_the_dearest() -> None:
    data = owned(["a"] * 500 + ["b"] * 500)
    plan, ledger = planned(data, a=8.0, b=0.5), DatasetLedger.of(data)
    ledger.folder.mkdir(parents=True)
    (ledger.folder / "000000.json").write_text(json.dumps(plan.to_json()))
    found = ledger.enter(plan)
    assert found["runs"] == 2
    assert found["epsilons"]["b"] == pytest.approx(
        accountant.epsilon([*plan.events(0), *plan.events(1)], 1e-5), rel=1e-6
    )


def test_the_dearest_class_covers_all_of_them_where_budgets_changed_over() -> None:
    data, other = owned(["a"] * 500 + ["b"] * 500), owned(["b"] * 500 + ["a"] * 500)
    start = planned(data, a=4.0, b=0.5)
    changed = replan(start, eh.Budgets({"a": 4.2, "b": 8.0}), start.steps, epochs=5)
    DatasetLedger.of(data).enter(changed)
    found = DatasetLedger.of(other).enter(planned(other, a=0.5, b=0.5))["epsilons"]
    worst = [*start.events(0), *changed.events(1)[len(start.events(1)) :]]
    assert min(found.values()) > accountant.epsilon(worst, 1e-5)


def test_a_part_and_the_whole_are_the_same_data(tiny: Data, tmp_path: Path) -> None:
    for number, part in enumerate((tiny, tiny.take(torch.arange(30)), tiny.take(torch.arange(5, 40)))):
        plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=part.facts, epochs=1, batch_size=8)
        run(part, plan, tmp_path / str(number))
        assert statement(tmp_path / str(number))["accounting"]["runs_composed"] == number + 1


def test_a_density_without_a_folder_is_counted_too() -> None:
    inputs, labels = torch.randn(200, 3), [0, 1] * 100
    eh.density.MomentDensity(epsilon=1.0, delta=1e-4, compose=False).fit(inputs, labels)
    assert not state_folder().exists()
    eh.density.MomentDensity(epsilon=1.0, delta=1e-4).fit(inputs, labels)
    (folder,) = (state_folder() / "datasets").iterdir()
    assert [file.name for file in folder.glob("*.json")] == ["000000.json"]


def test_settings_chosen_on_these_records_are_named_also_after_a_change_of_budgets(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    run(replace(tiny, tuned=True), tiny_plan, tmp_path / "a")
    eh.rebudget(tmp_path / "a", eh.Privacy(4), epochs=1, train=tiny)
    found = statement(tmp_path / "a")["accounting"]
    assert (found["runs_composed"], found["tuning_counted"]) == (2, False)
    assert "no figure covers that choice" in (tmp_path / "a" / "statement.md").read_text()
