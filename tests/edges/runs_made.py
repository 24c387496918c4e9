"""Small private runs that stop where a test wants them to."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import evenhand as eh
from evenhand.data.dataset import Data
from evenhand.training.attach import Private

RECORDS, STEPS = 200, 20


def records(owners: str | None = None) -> Data:
    """Two hundred records with three numbers and a label each."""
    inputs = torch.arange(RECORDS * 3.0).remainder(7.0).view(RECORDS, 3) + torch.linspace(0, 1, RECORDS)[:, None]
    named = None if owners is None else [owners[i % len(owners)] for i in range(RECORDS)]
    return eh.data.wrap(inputs, [i % 2 for i in range(RECORDS)], labels=(0, 1), owners=named)


def planned(data: Data, promise: eh.Privacy | eh.Budgets | None = None, method: str = "dpsgd") -> eh.Plan:
    """Twenty steps."""
    return eh.plan(method, promise or eh.Privacy(3, 1e-4), data=data.facts, epochs=2, batch_size=20)


def begun(out: Path, steps: int, data: Data | None = None, plan: eh.Plan | None = None) -> Private:
    """A run that has taken so many steps and is still open."""
    data = records() if data is None else data
    plan = planned(data) if plan is None else plan
    model = nn.Linear(3, 2)
    loss = nn.CrossEntropyLoss(reduction="none")
    private = eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, plan, out=out)
    for _, batch in zip(range(steps), private.batches(data), strict=False):
        private.step(batch)
    private.checkpoint()
    return private
