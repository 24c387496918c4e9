"""A pass stays flat: from `Engine.run` to the work of a layer's kernel, or to a speed path, are few calls."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenhand
from evenhand.gradients.engine import Engine

PACKAGE = str(Path(evenhand.__file__).parent)
WORK = (f"{PACKAGE}/gradients/layers/", f"{PACKAGE}/gradients/fast/dense_chain.py")
METHOD = re.compile(r"\w+\.\w+$")
"""Methods of kernels, shares and chains; functions beside them (``shadowed``) ask about the state of a module."""
MOST = 3
"""`Engine.run` -> A -> B -> kernel."""


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def sequences() -> nn.Module:
    """A linear layer over time, which no speed path takes."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2))


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dense": (nn.Linear(6, 2), (6,)),
    "linear": (sequences(), (5, 3)),
    "cnn": (pictures(), (1, 6, 6)),
    "lstm": (Letters(), (4, 3)),
}


def entries(engine: Engine, inputs: Tensor, targets: Tensor) -> dict[str, list[str]]:
    """The functions between `Engine.run` and each method that begins a kernel's work; of several ways the longest.

    Only functions of the package count, and no comprehension: what torch and the model call in between is not ours.
    What a kernel calls is its own work.
    """
    chains: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if (
            event != "call"
            or not frame.f_code.co_filename.startswith(WORK)
            or not METHOD.match(frame.f_code.co_qualname)
        ):
            return
        chain: list[str] = []
        caller: FrameType | None = frame.f_back
        while caller is not None and caller.f_code is not Engine.run.__code__:
            code = caller.f_code
            if code.co_filename.startswith(WORK):
                return
            if code.co_filename.startswith(PACKAGE) and code.co_name not in ("<listcomp>", "<genexpr>", "<dictcomp>"):
                chain.append(code.co_qualname)
            caller = caller.f_back
        name = frame.f_code.co_qualname
        if caller is not None and len(chain) >= len(chains.get(name, ())):
            chains[name] = chain[::-1]

    sys.setprofile(note)
    try:
        engine.run(inputs, targets)
    finally:
        sys.setprofile(None)
    return chains


@pytest.mark.parametrize("name", MODELS)
def test_few_calls_lead_to_a_kernel(name: str) -> None:
    model, shape = MODELS[name]
    engine = Engine(model, nn.CrossEntropyLoss(reduction="none"))
    x, y = torch.randn(20, *shape), torch.arange(20) % 2
    for _ in range(4):  # the fifth batch is a usual one: comparisons with autograd are at batches 1, 2 and 4
        engine.run(x, y)
    chains = entries(engine, x, y)
    assert len(chains) > 1, "the way leads past kernels"
    deep = {end: chain for end, chain in chains.items() if len(chain) + 1 > MOST}
    assert not deep, f"more than {MOST} calls from Engine.run: {deep}"
