"""Runs that were stopped, and forks of them under lower budgets."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import nn

import evenhand as eh
from evenhand.accounting.plan import Plan
from evenhand.data import Data, wrap
from evenhand.runs.folder import Folder
from evenhand.training.attach import Private

LOSS = nn.CrossEntropyLoss(reduction="none")
OLD = eh.Budgets({"a": 2, "b": 4}, 1e-3)
LOWER = eh.Budgets({"a": 1.3, "b": 2.8})


def data() -> Data:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 3, generator=generator)
    return wrap(inputs, (inputs[:, 0] > 0).long(), owners=["a", "b"] * 100)


@functools.cache
def planned() -> Plan:
    return eh.plan("idp_scale", OLD, data=data().facts, epochs=3, batch_size=20)


def parts() -> tuple:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS


def trained(out: Path, steps: int = 25, **options: object) -> Folder:
    """A run that was stopped after ``steps`` of its 30 steps, with a checkpoint every five."""
    with eh.attach(*parts(), planned(), out=out, **options) as private:
        further(private, steps)
    return Folder.existing(out)


def further(private: Private, steps: int) -> None:
    for _, batch in zip(range(steps), private.batches(data()), strict=False):
        private.step(batch)
        if private.position % 5 == 0:
            private.checkpoint()


def resumed(path: Path) -> dict:
    eh.resume(path, model=nn.Linear(3, 2), train=data(), progress=False)
    return eh.verify(path)


def gone_back(tmp_path: Path, budgets: eh.Budgets = LOWER, **options: object) -> tuple[Folder, Folder, Plan]:
    old = trained(tmp_path / "old")
    made = eh.rebudget(old.path, budgets, train=data(), out=tmp_path / "new", **options)
    return old, Folder.existing(tmp_path / "new"), made


def recounted(folder: Folder, plan: Plan, owner: int) -> float:
    """Epsilon of the steps that the ledger charges, by another library, from what the commits used."""
    reading = folder.ledger()
    assert reading.committed == reading.reserved
    assert {plan.rates, *(stage.rates for stage in plan.earlier)} == {(0.1, 0.1)}, "idp_scale samples all alike"
    counts: Counter[float] = Counter()
    for commit in reading.commits:
        counts[round(commit.std / commit.sensitivity[owner], 12)] += commit.count
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for noise, count in counts.items():
        accountant.compose(PoissonSampledDpEvent(plan.rates[owner], GaussianDpEvent(noise)), count)
    return float(accountant.get_epsilon(plan.delta))
