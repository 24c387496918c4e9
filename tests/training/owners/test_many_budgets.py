"""Fifty thousand distinct budgets: planned in seconds, every one kept, and no slower a step than with one budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.accounting.accountant import epsilon
from evenhand.accounting.plan import Plan
from evenhand.data import Data, wrap
from evenhand.types import Facts

RECORDS, BATCH, STEPS = 50_000, 256, 150


def planned(method: str, budgets: np.ndarray, epochs: float = 4) -> Plan:
    promised = eh.Budgets.per_record(budgets, 1e-6)
    facts = Facts(budgets.size, tuple((name, 1) for name in promised.epsilons))
    return eh.plan(method, promised, data=facts, epochs=epochs, batch_size=BATCH)


@pytest.mark.parametrize("method", ["idp_sample", "idp_scale"])
def test_no_owner_is_ever_charged_more_than_its_budget_with_loud_steps(method: str) -> None:
    """Little noise and few steps: here certificates between wide knots once said 0.05 % too much."""
    budgets = np.linspace(1, 8, 2000)
    made = planned(method, budgets, epochs=1)
    ratio = np.array(made.spent_by_owner()) / budgets
    assert ratio.max() <= 1
    assert ratio.min() >= 0.997
    assert max(np.array(made.epsilons) / budgets) <= 1
    for owner in (0, 777, 1999):
        exact = epsilon(made.events(owner), 1e-6)
        assert exact * (1 - 1e-6) <= made.spent_by_owner()[owner] <= exact * 1.003


@pytest.mark.slow
@pytest.mark.parametrize("method", ["idp_sample", "idp_scale"])
def test_fifty_thousand_budgets_are_planned_in_five_seconds(method: str) -> None:
    seconds = []
    for _ in range(2):  # the better of two: other work on the machine slows one down
        started = time.thread_time()
        made = planned(method, np.linspace(1, 8, RECORDS))
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 5
    ratio = np.array(made.spent_by_owner()) / np.linspace(1, 8, RECORDS)
    assert 0.997 <= ratio.min() <= ratio.max() <= 1


@pytest.mark.slow
def test_a_step_takes_at_most_five_percent_longer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(RECORDS, 64), torch.randint(0, 10, (RECORDS,))
    budgets = eh.Budgets.per_record(np.linspace(1, 8, RECORDS), 1e-6)
    one = wrap(inputs, labels, labels=range(10))
    many = wrap(inputs, labels, labels=range(10), owners=budgets.owners)
    plans = {
        "one": (one, eh.plan("dpsgd", eh.Privacy(3, 1e-6), data=one.facts, batch_size=BATCH)),
        "sample": (many, eh.plan("idp_sample", budgets, data=many.facts, batch_size=BATCH)),
        "scale": (many, eh.plan("idp_scale", budgets, data=many.facts, batch_size=BATCH)),
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    with ExitStack() as stack:
        steps = {name: stepping(data, plan, tmp_path / name, stack) for name, (data, plan) in plans.items()}
        for _ in range(STEPS):
            for name, step in steps.items():
                started = time.thread_time()
                step()
                times[name].append(time.thread_time() - started)
    usual = {name: statistics.median(found[20:]) for name, found in times.items()}
    assert max(usual["sample"], usual["scale"]) < 1.05 * usual["one"], usual


def stepping(data: Data, plan: Plan, out: Path, stack: ExitStack) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = stack.enter_context(eh.attach(model, optimizer, loss, plan, out=out, compose=False))
    batches = private.batches(data)
    return lambda: private.step(next(batches))
