"""Every copy of a run that goes on is counted, whatever becomes of the ledger: two reviews found how not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from same_records import LOSS, began, data, planned, raised, resumed, runs, total
from torch import nn

import evenhand as eh
from evenhand.accounting import accountant
from evenhand.errors import EvenhandError
from evenhand.runs import recorder
from evenhand.runs.dataset_ledger import DatasetLedger
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger
from evenhand.training import rebudget
from evenhand.training.attach import start


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of one step, and a ledger of its own for every test."""
    monkeypatch.setattr(recorder, "BLOCK_SECONDS", 1e-9)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_asking_again_does_not_get_past_a_ledger_that_forgot_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        began(tmp_path / name, data(), planned(data()), 5)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
    for _ in range(3):
        with pytest.raises(EvenhandError, match="does not know this run"):
            raised(tmp_path / "b", data())
    assert not list(DatasetLedger.of(data()).folder.glob("*.json"))


def test_a_run_that_was_alone_gets_new_budgets_elsewhere_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began(tmp_path / "a", data(), planned(data()), 5)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
    assert raised(tmp_path / "a", data()).epsilons[0] == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize(("here", "there"), [(8, 0.2), (0.2, 8)])
def test_no_total_falls_under_another_state_folder(
    here: float, there: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap, dear, other = (planned(data(), eh.Privacy(epsilon, 1e-3)) for epsilon in (0.2, here, there))
    began(tmp_path / "a", data(), dear, 5)
    run = began(tmp_path / "run", data(), cheap, 5)
    before = total(run)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
    for name in "xyz":
        began(tmp_path / name, data(), other, 5)
    after = total(resumed(tmp_path / "run", data()))
    assert after >= before
    assert after >= accountant.epsilon(3 * other.events(0) + cheap.events(0), 1e-3) * (1 - 1e-6)


def test_new_budgets_of_a_run_whose_copy_went_on_count_both(tmp_path: Path) -> None:
    plan = planned(data())
    began(tmp_path / "run", data(), plan, 5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    resumed(tmp_path / "copy", data())
    new = raised(tmp_path / "run", data())
    both = accountant.epsilon(new.events(0) + plan.events(0), plan.delta)
    assert total(Folder.existing(tmp_path / "run")) >= both * (1 - 1e-6)


def test_copies_that_take_turns_are_counted_once_each(tmp_path: Path) -> None:
    plan = planned(data())
    began(tmp_path / "a", data(), plan, 5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in "abab":
        model = nn.Linear(3, 2)
        held = torch.optim.SGD(model.parameters(), lr=0.1)
        with start(model, held, LOSS, plan, Folder.existing(tmp_path / name)) as private:
            private.step(next(private.batches(data())))
    assert len(list(DatasetLedger.of(data()).folder.glob("*.json"))) == 2


@pytest.mark.parametrize("where", ["rename", "statement"])
def test_a_crash_at_the_end_of_a_run_with_new_budgets_is_mended_by_resume(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(data())
    folder = began(tmp_path / "run", data(), plan, plan.steps - 1)
    old = resumed(tmp_path / "run", data()).model_file.read_bytes()
    eh.rebudget(tmp_path / "run", eh.Privacy(4), epochs=1, train=data())
    replaced = os.replace

    def renamed(before: Any, after: Any) -> None:
        if Path(after) == folder.model_file:
            raise KeyboardInterrupt
        replaced(before, after)

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "replace", renamed) if where == "rename" else (Folder, "write_statement", killed)))
        with pytest.raises(KeyboardInterrupt):
            resumed(tmp_path / "run", data())
    resumed(tmp_path / "run", data())
    assert folder.finished()
    assert folder.model_file.read_bytes() != old


def test_every_copy_of_a_run_that_goes_on_is_counted(tmp_path: Path) -> None:
    plan = planned(data())
    began(tmp_path / "run", data(), plan, 5)
    for name in "ab":
        shutil.copytree(tmp_path / "run", tmp_path / name)
    folders = [resumed(tmp_path / name, data()) for name in ("run", "a", "b")]
    assert [runs(folder) for folder in folders] == [1, 2, 3]
    three = accountant.epsilon(3 * plan.events(0), plan.delta)
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
    both = accountant.epsilon(new.events(0) + plan.events(0), plan.delta)
    assert counted["epsilons"]["all"] == pytest.approx(both, rel=1e-6)


def test_only_one_fork_of_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began(tmp_path / "old", data(), planned(data(), eh.Privacy(4, 1e-3)), 15)

    with monkeypatch.context() as patch:
        patch.setattr(rebudget, "finish", killed)
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
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    model = nn.Linear(3, 2)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(model, held, LOSS, plan, Folder.existing(tmp_path / "a"), insecure_seed=0) as private:
        private.step(next(private.batches(data())))
    counted = began(tmp_path / "b", data(), plan, 1).composition() or {}
    assert (counted["runs"], counted["uncounted"]) == (2, 1)
    resumed(tmp_path / "copy", data())  # it has no seed of its own, but the same name
    counted = began(tmp_path / "c", data(), plan, 1).composition() or {}
    assert (counted["runs"], counted["uncounted"]) == (4, 2)
