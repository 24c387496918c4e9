from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.errors import (
    BatchReuseError,
    BudgetExhausted,
    DataError,
    PlanMismatchError,
    UnsupportedModelError,
    UsageError,
)
from evenhand.mechanism.make_plan import Plan
from evenhand.runs.ledger import read
from evenhand.training.attach import Private

LOSS = nn.CrossEntropyLoss(reduction="none")


def attached(plan: Plan, out: Path, model: nn.Module | None = None, **options: object) -> Private:
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eh.attach(model, optimizer, LOSS, plan, out=out, **options)


def test_own_loop_own_objects(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    keys = list(model.state_dict())
    before = [parameter.clone() for parameter in model.parameters()]
    with attached(tiny_plan, tmp_path, model) as private:
        sizes = [len(private.step(batch)) for batch in private.batches(tiny)]
    assert len(sizes) == tiny_plan.steps
    assert private.model is model
    assert list(model.state_dict()) == keys
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(vars(parameter) == {} for parameter in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.reserved == reading.committed == tiny_plan.steps
    assert eh.verify(tmp_path)["ok"]


@pytest.mark.parametrize("factory", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_optimizer_and_scheduler(factory: type, tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = factory(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with eh.attach(model, optimizer, LOSS, tiny_plan, out=tmp_path) as private:
        for batch in private.batches(tiny):
            private.step(batch)
            scheduler.step()
    assert torch.isfinite(model.weight).all()


def test_the_charge_is_on_disk_before_the_weights_change(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(tiny_plan, tmp_path) as private:
        update = private._update

        def checked(gradient: dict[str, torch.Tensor]) -> None:
            assert read(tmp_path / "ledger.jsonl").reserved >= private.position
            update(gradient)

        monkeypatch.setattr(private, "_update", checked)
        for batch in private.batches(tiny):
            private.step(batch)


def test_a_skipped_batch_stops_the_loop(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batches = private.batches(tiny)
        first = next(batches)
        with pytest.raises(BatchReuseError, match="drawn but not stepped"):
            next(batches)
        assert next(private.batches(tiny)) is first, "a new pass goes on with the draw that there is"


def test_a_batch_is_stepped_once(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batch = next(private.batches(tiny))
        private.step(batch)
        with pytest.raises(BatchReuseError, match="used already"):
            private.step(batch)


def test_foreign_batches_are_refused(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path / "a") as one, attached(tiny_plan, tmp_path / "b") as two:
        batch = next(one.batches(tiny))
        for foreign in (batch, (torch.ones(2, 3), torch.zeros(2))):
            with pytest.raises(BatchReuseError, match="not drawn by this run"):
                two.step(foreign)


def test_added_rows_are_refused(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batch = next(private.batches(tiny))
        twice = dataclasses.replace(batch, inputs=torch.cat([batch.inputs] * 2), targets=torch.cat([batch.targets] * 2))
        with pytest.raises(DataError, match="never add any"):
            private.step(twice)


def test_a_failing_optimizer_cannot_make_noise_serve_twice(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batch = next(private.batches(tiny))

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("broken optimizer")

        private.optimizer.step = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="broken"):
            private.step(batch)
        with pytest.raises(BatchReuseError):
            private.step(batch)


def test_steps_end_with_the_plan(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        for batch in private.batches(tiny):
            private.step(batch)
        assert list(private.batches(tiny)) == []
        with pytest.raises(BudgetExhausted, match="Nothing was released"):
            private._ledger.reserve(1)


def test_other_facts_than_planned_are_refused_before_spending(tiny_plan: Plan, tmp_path: Path) -> None:
    other = wrap(torch.ones(41, 3), [0, 1] * 20 + [0])
    with attached(tiny_plan, tmp_path) as private, pytest.raises(PlanMismatchError, match="nothing was spent"):
        next(private.batches(other))
    assert read(tmp_path / "ledger.jsonl").reserved == 0


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - x.mean(0))


@pytest.mark.parametrize("model", [Coupled(), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))])
def test_records_that_influence_each_other_are_refused_before_spending(
    model: nn.Module, tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError), attached(tiny_plan, tmp_path, model) as private:
        next(private.batches(tiny))
    assert not (tmp_path / "ledger.jsonl").exists() or read(tmp_path / "ledger.jsonl").reserved == 0


def test_an_optimizer_of_other_parameters_is_refused(tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="does not hold exactly"):
        eh.attach(model, torch.optim.SGD([model.weight], lr=1.0), LOSS, tiny_plan, out=tmp_path)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="no trainable"):
        eh.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), LOSS, tiny_plan, out=tmp_path / "b")


def test_a_folder_with_a_run_is_not_overwritten(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
    with pytest.raises(UsageError, match="evenhand resume"):
        attached(tiny_plan, tmp_path)


def test_a_run_refused_before_its_first_charge_leaves_the_folder_usable(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError), attached(tiny_plan, tmp_path, Coupled()) as private:
        next(private.batches(tiny))
    with attached(tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))


def test_an_insecure_seed_repeats_the_run_bit_by_bit_and_is_named(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        with attached(tiny_plan, tmp_path / name, insecure_seed=5) as private:
            for batch in private.batches(tiny):
                private.step(batch)
            private.release()
        weights.append(private.model.weight.detach().clone())
    assert torch.equal(*weights)
    statement = (tmp_path / "a" / "statement.md").read_text()
    assert "PUBLIC SEED" in statement
    assert "Warning" in statement


def test_without_it_no_two_runs_agree(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        with attached(tiny_plan, tmp_path / name) as private:
            for batch in private.batches(tiny):
                private.step(batch)
        weights.append(private.model.weight.detach().clone())
    assert not torch.equal(*weights)
