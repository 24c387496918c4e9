"""Runs on two hundred records that are stopped, copied and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenhand as eh
from evenhand.accounting.plan import Plan
from evenhand.data import Data, wrap
from evenhand.runs.folder import Folder

LOSS = nn.CrossEntropyLoss(reduction="none")


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


def total(folder: Folder) -> float:
    counted = folder.composition()
    assert counted is not None
    return float(counted["epsilons"]["all"])


def raised(run: Path, records: Data) -> Plan:
    return eh.rebudget(run, eh.Privacy(4), train=records)
