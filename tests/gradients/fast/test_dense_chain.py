"""One dense layer after the other: exact without a tape, and on a tape wherever something comes between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from dense_models import LOSS, alone, batch, chained, mlp, norms
from evenhand.errors import UnsupportedModelError
from evenhand.gradients import Engine
from evenhand.gradients.fast.dense_chain import DenseGradients
from evenhand.training.losses import CrossEntropy
from evenhand.types import Pass

Oracle = Callable[..., Pass]
BENDS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_chain_is_exact(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    width, layers = data.draw(st.integers(1, 70)), []
    first = width
    for _ in range(data.draw(st.integers(1, 4))):
        wide = data.draw(st.sampled_from([1, 2, 5, 16, 17, 40]))
        linear = nn.Linear(width, wide, bias=data.draw(st.booleans()))
        linear.weight.requires_grad_(data.draw(st.booleans()))
        layers += [linear, *(kind() for kind in data.draw(st.lists(st.sampled_from(BENDS), max_size=2)))]
        width = wide
    layers[0].weight.requires_grad_(True)
    single = data.draw(st.booleans())
    model = nn.Sequential(*layers).to(torch.float32 if single else torch.float64)
    size = data.draw(st.integers(2, 9))
    x, y = torch.randn(size, first), torch.randint(width, (size,))
    tolerance = 1e-4 if single else 1e-9
    engine = Engine(model, LOSS)
    result = engine.run(x.to(model[0].weight.dtype), y)
    exact = copy.deepcopy(model).double()
    expected = alone(exact, LOSS, x.double(), y)
    norm = norms(exact, LOSS, x.double(), y)
    torch.testing.assert_close(result.norm, norm, rtol=1e-5 if single else tolerance, atol=1e-6)
    weights = torch.randn(size, dtype=torch.float64)
    for name, part in result.weighted_sum(weights).items():
        wanted = torch.tensordot(weights, expected[name], dims=1)
        torch.testing.assert_close(part.double(), wanted, rtol=tolerance, atol=tolerance)


LOSSES: dict[str, Any] = {
    "cross-entropy": LOSS,
    "ours": CrossEntropy(),
    "smoothed": CrossEntropy(0.1),
    "torch, smoothed": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.2),
    "weighted": nn.CrossEntropyLoss(reduction="none", weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
    "function": lambda out, y: functional.cross_entropy(out, y, reduction="none"),
    "squares": lambda out, y: (out - y.unsqueeze(1)).square().mean(1),
    "one output": lambda out, y: out[:, 0] * y,
    "hinge": lambda out, y: (1 + out - out.gather(1, y.unsqueeze(1))).relu().sum(1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_exact_without_a_tape(name: str, agrees: Oracle) -> None:
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    agrees(model, x, y, LOSSES[name], kernels=True)
    assert chained(Engine(model, LOSSES[name]), x, y)


@pytest.mark.parametrize("classes", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_usual_loss_by_formula(classes: int, dtype: torch.dtype, agrees: Oracle) -> None:
    model, (x, y) = mlp(classes=classes).to(dtype), batch(70, classes, dtype)
    result = agrees(model, x, y, LOSS, tolerance=1e-4 if dtype == torch.float32 else 1e-9)
    torch.testing.assert_close(result.loss, LOSS(model(x), y).detach().double(), rtol=1e-5, atol=1e-6)


def test_small_models_keep_no_tape_and_leave_no_trace() -> None:
    model, (x, y) = mlp(), batch()
    before = copy.deepcopy(model.state_dict())
    engine = Engine(model, LOSS)
    result = engine.run(x, y)
    assert isinstance(result.weighted_sum.__self__._raw, DenseGradients)  # type: ignore[attr-defined]
    result.weighted_sum(torch.ones(12))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_layer_that_is_used_twice(agrees: Oracle) -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Flatten(), shared, nn.Tanh(), shared, nn.Linear(6, 3)).double()
    x, y = batch(dtype=torch.float64)
    agrees(model, x, y, kernels=True)


@pytest.mark.parametrize("tied", ["weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_of_two_layers(tied: str, dtype: torch.dtype, agrees: Oracle) -> None:
    """Its gradients are added before a norm is taken."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    setattr(model[3], tied, getattr(model[1], tied))
    x, y = batch(dtype=dtype)
    agrees(model.to(dtype), x, y, LOSS, kernels=True, tolerance=1e-9 if dtype == torch.float64 else 1e-5)


def test_frozen_layers_before_between_and_after(agrees: Oracle) -> None:
    for frozen in ([0], [2], [4], [0, 2], [2, 4], [0, 4]):
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)).double()
        for place in frozen:
            model[place].requires_grad_(False)
        agrees(model, torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,)), kernels=True)


def test_records_that_are_not_in_the_order_of_their_memory(agrees: Oracle) -> None:
    model, (x, y) = mlp(), batch(40)
    agrees(model, x.permute(2, 1, 0).contiguous().permute(2, 1, 0), y, tolerance=1e-4)
    every = torch.randint(3, (80,))
    agrees(model, x, every[::2], tolerance=1e-4)


def test_half_precision_goes_by_the_tape() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    with torch.autocast("cpu", torch.bfloat16):
        engine.run(x, y)
    assert not any(chain for chain, *_ in engine._habits)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15, 1e22])
def test_extreme_records_have_their_norm(scale: float) -> None:
    model, (x, y) = mlp(), batch()
    x[2] *= scale
    exact = copy.deepcopy(model).double()
    norm = norms(exact, LOSS, x.double(), y)
    torch.testing.assert_close(Engine(model, LOSS).run(x, y).norm, norm, rtol=1e-4, atol=1e-6)


def test_a_record_that_is_not_finite_contributes_nothing() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    engine.run(x, y)
    x[4, 0, 0] = torch.nan
    result = engine.run(x, y)
    assert not bool(torch.isfinite(result.norm[4]))
    total = result.weighted_sum(torch.ones(12))
    keep = [i for i in range(12) if i != 4]
    wanted = engine.run(x[keep], y[keep]).weighted_sum(torch.ones(11))
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


def test_inputs_changed_between_pass_and_sum_are_noticed() -> None:
    model, (x, y) = mlp(), batch()
    result = Engine(model, LOSS).run(x, y)
    x.mul_(2)
    with pytest.raises(Exception, match="changed in place"):
        result.weighted_sum(torch.ones(12))


def test_a_frozen_model_and_a_constant_loss_are_refused() -> None:
    model, (x, y) = mlp(), batch()
    with pytest.raises(UnsupportedModelError, match="does not depend"):
        Engine(model, lambda out, target: target.float() * torch.ones(1, requires_grad=True)).run(x, y)
