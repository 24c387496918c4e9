"""Every method of the catalogue, end to end on digits: stopped by a crash, resumed, within its promise, verified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.methods.catalogue import catalogue

NAMES = [recipe.name for recipe in catalogue()]


class Crash:
    """A logger that ends the process's work at the first evaluation."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise KeyboardInterrupt


def test_there_are_at_least_eighteen() -> None:
    assert len(NAMES) >= 18


@pytest.mark.parametrize("name", NAMES)
def test_a_method_trains_resumes_and_verifies(name: str, tmp_path: Path) -> None:
    inputs, labels = eh.data.digits()[0].fetch(torch.arange(400))
    owners = ["strict" if i % 3 else "open" for i in range(400)]
    groups = ["even" if label % 2 == 0 else "odd" for label in labels.tolist()]
    train = eh.data.wrap(inputs, labels, owners=owners, groups=groups, labels=[str(i) for i in range(10)])
    test = eh.data.digits()[1]
    budgets = {} if name == "sgd" else {"privacy": eh.Budgets({"strict": 2.0, "open": 6.0}, 1e-4)}
    model = nn.Linear(64, 10)
    with pytest.raises(KeyboardInterrupt):
        eh.fit(
            *(model, train),
            **budgets,  # type: ignore[arg-type]
            method=name,
            epochs=3,
            batch_size=100,
            test=test,
            out=tmp_path / "run",
            compose=False,
            loggers=[Crash()],
        )
    run = eh.resume(tmp_path / "run", model=nn.Linear(64, 10), train=train, test=test)
    checked = eh.verify(tmp_path / "run")
    assert checked["ok"], checked["problems"]
    if name == "sgd":
        assert "NOT private" in str(run.privacy)
        return
    for owner, promised in (("strict", 2.0), ("open", 6.0)):
        spent = checked["owners"][owner]
        assert 0 < (spent["epsilon"] if isinstance(spent, dict) else spent) <= promised
