"""`per_sample` in a loop learns about a model once, and anew when the model or the loss is another one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import batch, compare, oracle
from oracles import Custom, cross_entropy, lin
from torch import Tensor, nn

from evenhand.gradients import engine as engine_module
from evenhand.gradients import per_sample
from evenhand.gradients.learned_models import _REMEMBERED
from evenhand.gradients.self_check import Comparison


@pytest.fixture
def first_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the comparisons of a first batch."""
    seen: list[int] = []

    class Counting(Comparison):
        def agree(self, inputs: Any, targets: Any, size: int) -> bool | None:
            seen.append(size)
            return super().agree(inputs, targets, size)

    monkeypatch.setattr(engine_module, "Comparison", Counting)
    return seen


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.softmax(self.scale, 0)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(lin(4, 4), nn.Tanh(), lin()).double(),
    "kernels": lambda: Custom(lambda m, x: m.b(torch.tanh(m.a(x))), a=lin(4, 4), b=lin()),
    "a module apart": lambda: Custom(lambda m, x: m.b(m.g(m.a(x))), a=lin(4, 4), g=Gate(), b=lin()),
    "unlike": lambda: Custom(lambda m, x: m.b(m.a(x)), a=Doubled(4, 4), b=lin()),
    "whole": lambda: Custom(lambda m, x: m.b(x * torch.softmax(m.p, 0)), b=lin(), p=nn.Parameter(torch.ones(4))),
}


def exact(model: nn.Module) -> None:
    x, y = batch()
    compare(per_sample(model, cross_entropy, x, y), oracle(model, cross_entropy, x, y))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_looked_at_once(first_looks: list[int], name: str) -> None:
    model = MODELS[name]()
    exact(model)
    looks = len(first_looks)
    assert looks > 0
    for _ in range(2):
        exact(model)
    assert len(first_looks) == looks


def train_mode(model: Any) -> None:
    model.eval()


def freeze(model: Any) -> None:
    model.a.weight.requires_grad_(False)


def hook(model: Any) -> None:
    model.a.register_forward_hook(lambda *_: None)


def replace_module(model: Any) -> None:
    model.a = lin(4, 4).double()


def replace_parameter(model: Any) -> None:
    model.a.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def tie(model: Any) -> None:
    model.a.bias = nn.Parameter(model.a.bias.detach().clone())
    model.g = lin(4, 4).double()
    model.g.weight = model.a.weight


def own_forward(model: Any) -> None:
    layer = model.a
    layer.forward = lambda x: 3 * nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("change", [train_mode, freeze, hook, replace_module, replace_parameter, tie, own_forward])
def test_a_changed_model_is_looked_at_anew(first_looks: list[int], change: Callable[[Any], None]) -> None:
    model = MODELS["a module apart"]()
    exact(model)
    looks = len(first_looks)
    change(model)
    exact(model)
    assert len(first_looks) > looks


def test_another_loss_is_looked_at_anew(first_looks: list[int]) -> None:
    model, (x, y) = MODELS["kernels"](), batch()
    per_sample(model, cross_entropy, x, y)
    looks = len(first_looks)
    per_sample(model, lambda out, target: cross_entropy(out, target) * 2, x, y)
    assert len(first_looks) > looks


def test_another_use_of_the_same_modules_is_noticed() -> None:
    """An attribute is no part of the description; the guard of every batch is there for that."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) + (x @ torch.softmax(m.a.weight, 0))[:, :3] if m.more else m.b(m.a(x))

    model = Custom(forward, a=lin(4, 4), b=lin())
    for more in (False, True, False, True):
        model.more = more
        exact(model)


def test_comparisons_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []

    class Counting(Comparison):
        def still_agree(self, inputs: Any, targets: Any, size: int) -> bool | None:
            again.append(size)
            return super().still_agree(inputs, targets, size)

    monkeypatch.setattr(engine_module, "Comparison", Counting)
    model = MODELS["kernels"]()
    for _ in range(8):
        exact(model)
    assert len(again) == 3  # at 2, 4 and 8


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_not_held(name: str) -> None:
    model = MODELS[name]()
    exact(model)
    gone, before = weakref.ref(model), len(_REMEMBERED)
    del model
    gc.collect()
    assert gone() is None
    assert len(_REMEMBERED) < before


def test_a_pass_keeps_its_memory_beside_the_next() -> None:
    model, (x, y) = MODELS["kernels"](), batch()
    first = per_sample(model, cross_entropy, x, y)
    wanted = oracle(model, cross_entropy, x, y)
    exact(model)
    compare(first, wanted)
