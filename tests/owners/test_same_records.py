"""A run stays on its records, and is counted wherever its folder went: a hostile review found how not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand import forking, recording
from evenhand.attachment import start
from evenhand.data import Data, wrap
from evenhand.datasets import DatasetLedger, state_folder
from evenhand.errors import DataError, EvenhandError, PlanMismatchError, UsageError
from evenhand.plans import Plan
from evenhand.privacy import accountants
from evenhand.privacy.ledger import Ledger
from evenhand.runs import Folder

LOSS = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of one step, and a ledger of its own for every test."""
    monkeypatch.setattr(recording, "BLOCK_SECONDS", 1e-9)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def data(seed: int = 1, owners: list[str] | None = None) -> Data:
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(seed))
    return wrap(inputs, (inputs[:, 0] > 0).long(), owners=owners)


def planned(records: Data, promise: Any = None, method: str = "dpsgd") -> Plan:
    return eh.plan(method, promise or eh.Privacy(3, 1e-3), data=records.facts, epochs=2, batch_size=20)


def began(out: Path, records: Data, plan: Plan, steps: int) -> Folder:
    model = nn.Linear(3, 2)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, held, LOSS, plan, out=out) as private:
        for _, batch in zip(range(steps), private.batches(records), strict=False):
            private.step(batch)
            if private.position % 5 == 0:
                private.checkpoint()
    return Folder.existing(out)


def resumed(out: Path, records: Data) -> Folder:
    eh.resume(out, model=nn.Linear(3, 2), train=records, progress=False)
    assert eh.verify(out)["ok"]
    return Folder.existing(out)


def runs(folder: Folder) -> int:
    counted = folder.composition()
    assert counted is not None
    return int(counted["runs"])


def test_a_run_does_not_go_on_with_other_owners(tmp_path: Path) -> None:
    one, two = data(owners=["a", "b"] * 100), data(owners=["b", "a"] * 100)
    began(tmp_path / "run", one, planned(one, eh.Budgets({"a": 0.5, "b": 8}, 1e-4), "idp_sample"), 5)
    with pytest.raises(PlanMismatchError, match="owners changed"):
        resumed(tmp_path / "run", two)
    resumed(tmp_path / "run", one)


@pytest.mark.parametrize("change", [lambda run, other: resumed(run, other), lambda run, other: raised(run, other)])
def test_a_run_does_not_go_on_with_other_records(change: Any, tmp_path: Path) -> None:
    began(tmp_path / "run", data(), planned(data()), 5)
    with pytest.raises(PlanMismatchError, match="not the records"):
        change(tmp_path / "run", data(seed=2))


def raised(run: Path, records: Data) -> Plan:
    return eh.rebudget(run, eh.Privacy(4), train=records)


def test_budgets_per_record_are_refused_while_a_run_goes_on(tmp_path: Path) -> None:
    old = eh.Budgets.per_record([1.0] * 100 + [3.0] * 100, 1e-3)
    records = data(owners=list(old.owners or ()))
    began(tmp_path / "run", records, planned(records, old, "idp_sample"), 5)
    with pytest.raises(UsageError, match="One epsilon per record"):
        eh.rebudget(tmp_path / "run", eh.Budgets.per_record([1.0] * 100 + [2.0] * 50 + [3.0] * 50), train=records)


def test_every_copy_of_a_run_that_goes_on_is_counted(tmp_path: Path) -> None:
    plan = planned(data())
    began(tmp_path / "run", data(), plan, 5)
    for name in "ab":
        shutil.copytree(tmp_path / "run", tmp_path / name)
    folders = [resumed(tmp_path / name, data()) for name in ("run", "a", "b")]
    assert [runs(folder) for folder in folders] == [1, 2, 3]
    three = accountants.epsilon(3 * plan.events(0), plan.delta)
    assert (folders[2].composition() or {})["epsilons"]["all"] == pytest.approx(three, rel=1e-6)


def test_a_copy_that_went_on_meanwhile_is_noticed_at_the_release(tmp_path: Path) -> None:
    plan, model = planned(data()), nn.Linear(3, 2)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, held, LOSS, plan, out=tmp_path / "run") as private:
        for batch in private.batches(data()):
            private.step(batch)
            if private.position == 5:
                private.checkpoint()
                shutil.copytree(tmp_path / "run", tmp_path / "copy")
                resumed(tmp_path / "copy", data())
        private.release()
    assert runs(Folder.existing(tmp_path / "run")) == 2


def test_another_state_folder_is_told_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(data())
    began(tmp_path / "a", data(), plan, 5)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
    resumed(tmp_path / "a", data())
    assert runs(began(tmp_path / "b", data(), plan, 1)) == 2


def test_an_equal_plan_of_another_run_does_not_stand_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(data())
    began(tmp_path / "a", data(), plan, plan.steps)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
    began(tmp_path / "b", data(), plan, plan.steps)
    new = eh.rebudget(tmp_path / "a", eh.Privacy(3.2), epochs=1, train=data())
    counted = Folder.existing(tmp_path / "a").composition() or {}
    both = accountants.epsilon(new.events(0) + plan.events(0), plan.delta)
    assert counted["epsilons"]["all"] == pytest.approx(both, rel=1e-6)


def test_a_ledger_that_forgot_runs_stops_new_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        began(tmp_path / name, data(), planned(data()), 5)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
    with pytest.raises(EvenhandError, match="knows fewer runs"):
        raised(tmp_path / "c", data())
    assert runs(Folder.existing(tmp_path / "c")) == 3


def test_random_transforms_do_not_hide_that_the_records_are_the_same() -> None:
    shaken, again = (wrap(Shaken(), labels=["0", "1"]) for _ in range(2))
    state = torch.get_rng_state()
    assert DatasetLedger.of(shaken).folder == DatasetLedger.of(again).folder
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(DataError, match="Reading a record twice"):
        DatasetLedger.of(wrap(Shaken(torch.Generator()), labels=["0", "1"]))


class Shaken(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Records with random noise on them, as augmentation would add it."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, generator=self.generator) + index, index % 2


def test_only_one_fork_of_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began(tmp_path / "old", data(), planned(data(), eh.Privacy(4, 1e-3)), 15)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(forking, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            eh.rebudget(tmp_path / "old", eh.Privacy(2.9), train=data(), out=tmp_path / "x")
    eh.rebudget(tmp_path / "old", eh.Privacy(2.8), train=data(), out=tmp_path / "y")
    with pytest.raises(EvenhandError):
        eh.rebudget(tmp_path / "old", eh.Privacy(2.9), train=data(), out=tmp_path / "x")


def test_the_ledger_has_a_release_before_the_model_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(data())
    folder = began(tmp_path / "run", data(), plan, plan.steps - 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "release", killed)
        with pytest.raises(KeyboardInterrupt):
            resumed(tmp_path / "run", data())
    assert not folder.model_file.exists()
    resumed(tmp_path / "run", data())
    assert folder.model_file.exists()


def test_a_run_that_became_public_by_a_seed_is_in_no_later_total(tmp_path: Path) -> None:
    plan = planned(data())
    began(tmp_path / "a", data(), plan, 5)
    model = nn.Linear(3, 2)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(model, held, LOSS, plan, Folder.existing(tmp_path / "a"), insecure_seed=0) as private:
        private.step(next(private.batches(data())))
    counted = began(tmp_path / "b", data(), plan, 1).composition() or {}
    assert (counted["runs"], counted["uncounted"]) == (2, 1)


def test_a_relative_state_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", "state")
    with pytest.raises(UsageError, match="absolute"):
        state_folder()
