"""A run stays on its records, and is told by them: a hostile review found how not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from same_records import began, data, planned, raised, resumed

import evenhand as eh
from evenhand.data import wrap
from evenhand.errors import DataError, PlanMismatchError, UsageError
from evenhand.runs import recorder
from evenhand.runs.dataset_ledger import DatasetLedger, state_folder


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of one step, and a ledger of its own for every test."""
    monkeypatch.setattr(recorder, "BLOCK_SECONDS", 1e-9)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


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


def test_budgets_per_record_are_refused_while_a_run_goes_on(tmp_path: Path) -> None:
    old = eh.Budgets.per_record([1.0] * 100 + [3.0] * 100, 1e-3)
    records = data(owners=list(old.owners or ()))
    began(tmp_path / "run", records, planned(records, old, "idp_sample"), 5)
    with pytest.raises(UsageError, match="One epsilon per record"):
        eh.rebudget(tmp_path / "run", eh.Budgets.per_record([1.0] * 100 + [2.0] * 50 + [3.0] * 50), train=records)


def test_random_transforms_do_not_hide_that_the_records_are_the_same() -> None:
    shaken, again = (wrap(Shaken(), labels=["0", "1"]) for _ in range(2))
    state = torch.get_rng_state()
    assert DatasetLedger.of(shaken).folder == DatasetLedger.of(again).folder
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(DataError, match="twice gives different"):
        DatasetLedger.of(wrap(Shaken(torch.Generator()), labels=["0", "1"]))


class Shaken(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Records with random noise on them, as augmentation would add it."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, generator=self.generator) + index, index % 2


def test_a_relative_state_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", "state")
    with pytest.raises(UsageError, match="absolute"):
        state_folder()
