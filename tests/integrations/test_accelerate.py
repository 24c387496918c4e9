"""The private loop of accelerate over a stand-in of its Accelerator; the real one runs in test_real_libraries.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.integrations.accelerate import prepare
from evenhand.runs.ledger import read

ONE: dict[str, Any] = {
    "num_processes": 1,
    "mixed_precision": "no",
    "gradient_accumulation_steps": 1,
    "device": torch.device("cpu"),
}


def prepared(
    tiny: Data, out: Path, model: nn.Module | None = None, asked: Any = None, decay: bool = False, **accelerator: Any
) -> Any:
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return prepare(
        SimpleNamespace(**ONE | accelerator),
        model,
        optimizer,
        DataLoader(TensorDataset(*tiny.fetch(torch.arange(40))), batch_size=8, shuffle=True),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if decay else None,
        loss=nn.CrossEntropyLoss(reduction="none"),
        epochs=3,
        **(asked or {"epsilon": 3.0, "delta": 1e-3, "out": out}),
    )


def test_a_schedule_is_saved_with_the_run(tiny: Data, tmp_path: Path) -> None:
    private, loader = prepared(tiny, tmp_path, decay=True)
    with private:
        for batch in loader:
            private.step(batch)
        private._extras["scheduler"].step()
        private.checkpoint()
    private, _ = prepared(tiny, tmp_path, decay=True, asked={"resume": tmp_path})
    with private:
        assert private._extras["scheduler"].last_epoch == 1


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_epochs_takes_the_whole_plan(precision: str, tiny: Data, tmp_path: Path) -> None:
    private, loader = prepared(tiny, tmp_path, mixed_precision=precision)
    with private:
        for _ in range(3):
            for batch in loader:
                private.step(batch)
        private.release()
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.reserved == reading.committed == private.plan.steps == 15
    assert eh.verify(tmp_path)["ok"]


def test_it_goes_on_where_it_was_left(tiny: Data, tmp_path: Path) -> None:
    private, loader = prepared(tiny, tmp_path)
    with private:
        for batch in loader:
            private.step(batch)
        private.checkpoint()
    private, loader = prepared(tiny, tmp_path, asked={"resume": tmp_path})
    with private:
        assert private.position == 5
        assert sum(1 for _ in range(2) for batch in loader if len(private.step(batch)) >= 0) == 10


@pytest.mark.parametrize(
    ("accelerator", "message"),
    [
        ({"num_processes": 2}, "launch one process"),
        ({"gradient_accumulation_steps": 4}, "micro_batch"),
        ({"mixed_precision": "fp16"}, "before they are bounded"),
    ],
)
def test_what_would_void_the_promise_is_refused(
    accelerator: dict[str, Any], message: str, tiny: Data, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        prepared(tiny, tmp_path / "run", **accelerator)
    wrapped = type("Wrapped", (nn.Linear,), {"__module__": "accelerate.utils"})(3, 2)
    with pytest.raises(UsageError, match=r"accelerator\.prepare already"):
        prepared(tiny, tmp_path / "run", model=wrapped)
    assert not (tmp_path / "run").exists()


def test_a_plan_and_a_promise_are_not_both_given(tiny: Data, tiny_plan: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        prepared(tiny, tmp_path, asked={"plan": tiny_plan, "epsilon": 3.0, "out": tmp_path})
