"""What a reader who tried to fool the chain found: each of these was wrong, or crashed, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dense_models import LOSS, batch, mlp, norms
from evenhand.gradients import Engine
from evenhand.gradients.fast import lstm_native
from evenhand.gradients.fast.dense_chain import DenseChain
from evenhand.gradients.model_layout import Layout
from evenhand.gradients.row_norms import RUN, row_lengths
from evenhand.training.losses import CrossEntropy

Change = Callable[[nn.Sequential, pytest.MonkeyPatch], Any]


def total(out: Tensor, y: Tensor) -> Tensor:
    return (out.sum(1) - y).square()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_number_for_all_outputs_of_a_record(dtype: torch.dtype) -> None:
    """Autograd gives the slope of a sum as one number in many places: to write there would be to write everywhere."""
    model, y = nn.Sequential(nn.Linear(6, 8), nn.ReLU()).to(dtype), torch.rand(6, dtype=dtype)
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.zero_()
    engine = Engine(model, total)
    for _ in range(2):  # compared with autograd, while all units are alive
        engine.run(torch.rand(6, 6, dtype=dtype), y)
    x = torch.randn(6, 6, dtype=dtype)
    torch.testing.assert_close(engine.run(x, y).norm, norms(model, total, x, y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("last", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_a_sum_over_the_outputs_of_an_activation(last: type[nn.Module]) -> None:
    model, x, y = nn.Sequential(nn.Linear(6, 8), last()), torch.randn(6, 6), torch.rand(6)
    torch.testing.assert_close(Engine(model, total).run(x, y).norm, norms(model, total, x, y), rtol=1e-5, atol=1e-6)


class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, y: Tensor) -> Tensor:
        ctx.y = y
        return (out * y).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.y, None


def test_targets_are_not_written() -> None:
    model, x, y = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), torch.randn(6, 6), torch.randn(6, 8)
    before = y.clone()
    Engine(model, Given.apply).run(x, y)
    assert torch.equal(y, before)


@pytest.mark.parametrize("tied", ["weight", "bias"])
def test_a_tie_that_the_first_batches_do_not_show(tied: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    setattr(model[2], tied, getattr(model[0], tied))
    with torch.no_grad():
        model[2].bias.fill_(-0.1)
    engine, y = Engine(model, LOSS), torch.randint(3, (8,))
    for _ in range(2):
        engine.run(torch.zeros(8, 6), y)
    x = torch.randn(8, 6)
    torch.testing.assert_close(engine.run(x, y).norm, norms(model, LOSS, x, y), rtol=1e-5, atol=1e-6)


def test_a_bias_of_another_shape_makes_no_chain() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 16))
    model[2].bias = nn.Parameter(torch.full((1,), 0.5))
    assert DenseChain.of(Layout.read(model)) is None


def test_parameters_that_change_their_shape_or_kind_are_looked_at_again() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    for _ in range(2):
        engine.run(x, y)
    model[5].bias.data = torch.zeros(1)
    torch.testing.assert_close(engine.run(x, y).norm, norms(model, LOSS, x, y), rtol=1e-5, atol=1e-6)
    model, x = mlp().double(), x.double()
    engine = Engine(model.float(), LOSS)
    engine.run(x.float(), y)
    model.double()
    result = engine.run(x, y)
    torch.testing.assert_close(result.norm, norms(model, LOSS, x, y), rtol=1e-9, atol=1e-9)
    assert result.weighted_sum(torch.ones(12))["1.weight"].dtype == torch.float64


DEVICE = """
import torch
from torch import nn
from evenhand.gradients import Engine
from evenhand.gradients.fast import dense_native, lstm_native
model, x, y = nn.Sequential(nn.Linear(6, 3)), torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
torch.set_default_device("meta")
print(dense_native.loops() is None, lstm_native.compiled() is None)
engine = Engine(model, nn.CrossEntropyLoss(reduction="none"))
torch.set_default_device("cpu")
engine.run(x, y)
torch.set_default_device("meta")
try:
    engine.run(x, y)
except Exception as error:
    print(type(error).__name__)
"""


def test_another_default_device_reads_no_foreign_memory() -> None:
    done = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == [str(lstm_native.compiled() is None)] * 2


def test_another_default_precision_leaves_the_loops_as_they_are() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert (lstm_native.compiled.__wrapped__() is None) == (lstm_native.compiled() is None)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("width", [3 * RUN, 16 * RUN + 5, 150_528])
def test_roundings_of_long_rows_do_not_add_up(width: int) -> None:
    rows = [torch.full((width,), 0.3), torch.full((width,), (1 + 13 * 2.0**-23) ** 0.5), torch.full((width,), 2.4e-4)]
    rows[2][:64] = 1.0
    x = torch.stack(rows)
    exact = x.double().norm(dim=1)
    assert float(((row_lengths(x) - exact) / exact).abs().max()) < 3e-6
    model = nn.Sequential(nn.Linear(width, 2, bias=False))
    result = Engine(model, lambda out, y: out[:, 0] * y).run(x, torch.ones(3))
    assert float(((result.norm - exact) / exact).abs().max()) < 3e-6


class Louder(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is functional.relu or func is torch.relu else out


class Deeper(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _call(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    plain = model[2]._call_impl
    model[2]._call_impl = lambda x: 3 * plain(x)


def _every_call(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    plain = nn.Module.__call__
    patch.setattr(nn.Module, "__call__", lambda self, *a: (3 if isinstance(self, nn.ReLU) else 1) * plain(self, *a))


def _class_call(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.ReLU, "__call__", lambda self, x: 3 * x.relu(), raising=False)


def _function(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(functional, "relu", lambda x, inplace=False: 3 * x.clamp(min=0))


@pytest.mark.parametrize("change", [_call, _every_call, _class_call, _function])
def test_code_that_is_replaced_later_is_called(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    for _ in range(2):
        engine.run(x, y)
    change(model, monkeypatch)
    torch.testing.assert_close(engine.run(x, y).norm, norms(model, LOSS, x, y), rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_hidden_by_another_is_not_differentiated_as_if_it_were_used() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    for _ in range(2):
        engine.run(x, y)
    model[5].__dict__["weight"] = 2 * model[5].weight.detach()
    assert DenseChain.of(Layout.read(model)) is None


@pytest.mark.parametrize("place", ["forward", "cross_entropy"])
def test_a_loss_that_is_replaced_later_is_called(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    before = engine.run(x, y).norm
    if place == "forward":
        plain = nn.CrossEntropyLoss.forward
        monkeypatch.setattr(nn.CrossEntropyLoss, "forward", lambda self, out, t: 5 * plain(self, out, t))
    else:
        original = functional.cross_entropy
        monkeypatch.setattr(functional, "cross_entropy", lambda *args, **kwargs: 5 * original(*args, **kwargs))
    torch.testing.assert_close(engine.run(x, y).norm, 5 * before, rtol=1e-5, atol=1e-6)


def test_a_setting_of_our_loss_that_is_forced_counts() -> None:
    loss, model, (x, y) = CrossEntropy(), mlp(), batch()
    engine = Engine(model, loss)
    engine.run(x, y)
    object.__setattr__(loss, "smoothing", 0.5)
    torch.testing.assert_close(engine.run(x, y).norm, norms(model, loss, x, y), rtol=1e-5, atol=1e-6)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("mode", [Louder, Deeper, _nothing])
def test_who_watches_every_operation_sees_them(mode: Callable[[], Any]) -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    for _ in range(2):
        engine.run(x, y)
    with mode():
        found, expected = engine.run(x, y).norm, norms(model, LOSS, x, y)
        chained = engine._path is not None and engine._path.suits(x, y)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert chained is (mode is _nothing)


def test_outputs_that_a_loss_changes_unnoticed_by_autograd() -> None:
    def sneaky(out: Tensor, y: Tensor) -> Tensor:
        loss = LOSS(out, y)
        with torch.no_grad():
            out.mul_(0.1)
        return loss

    model, x, y = nn.Sequential(nn.Linear(6, 3), nn.Tanh()), torch.randn(5, 6), torch.randint(3, (5,))
    engine = Engine(model, sneaky)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.run(x, y)


def test_a_loss_that_looks_at_the_graph_is_served() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, lambda out, t: LOSS(out, t) * len(out.grad_fn.name()) / 10)
    assert bool(torch.isfinite(engine.run(x, y).norm).all())
    assert not engine._path_works


def test_negated_weights_keep_their_sign() -> None:
    model, (x, y) = mlp(), batch()
    result, weights = Engine(model, LOSS).run(x, y), torch.rand(12, dtype=torch.float64)
    torch.testing.assert_close(result.weighted_sum(torch._neg_view(weights)), result.weighted_sum(-weights))
