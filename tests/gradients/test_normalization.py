"""Normalisation within a record, every option against autograd record by record, and sums made to cancel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_checks import check
from torch import Tensor, nn

from evenhand.gradients import per_sample
from evenhand.gradients.layers import normalization
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.record_by_record import reference, row_norms
from evenhand.gradients.row_norms import CarefulRowNorms
from evenhand.types import Pass

DOUBLE = torch.float64
Oracle = Callable[..., Pass]
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalization, "CHUNK", 50)


def shaken(layer: nn.Module) -> nn.Module:
    """The layer with parameters that are not zeros and ones."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sin() * targets[:, None]).sum(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tail", [(), (4,), (3, 2), (2, 2, 3)])
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("mean", [0.0, 9.0])
def test_group_norm(groups: int, tail: tuple[int, ...], bias: bool, mean: float) -> None:
    if tail == () and groups == 6:
        pytest.skip("torch refuses a group of one value")
    layer = shaken(nn.GroupNorm(groups, 6, bias=bias, dtype=DOUBLE))
    for lean in (False, True):
        check(layer, mean + torch.randn(5, 6, *tail, dtype=DOUBLE), lean)


@pytest.mark.parametrize("tail", [(), (1,), (4,), (3, 2)])
@pytest.mark.parametrize("mean", [0.0, 9.0])
def test_group_norm_in_float32(tail: tuple[int, ...], mean: float) -> None:
    layer = shaken(nn.Sequential(nn.GroupNorm(3, 6), nn.Softplus(), nn.GroupNorm(3, 6)))
    x = mean + torch.randn(5, 6, *tail)
    result = per_sample(layer, total, x, torch.ones(5))
    every = [torch.autograd.grad(total(layer(x[i : i + 1]), torch.ones(1)).sum(), layer.parameters()) for i in range(5)]
    slow = torch.stack([torch.cat([part.flatten().double() for part in parts]).norm() for parts in every])
    torch.testing.assert_close(result.norm.double(), slow, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("lead", "shape"), [((), (6,)), ((4,), (6,)), ((2, 3), (6,)), ((3,), (2, 6)), ((), (4, 6))])
def test_layer_norm(lead: tuple[int, ...], shape: tuple[int, ...], bias: bool) -> None:
    layer = shaken(nn.LayerNorm(shape, bias=bias, dtype=DOUBLE))
    check(layer, 3 + torch.randn(5, *lead, *shape, dtype=DOUBLE), lean=False)


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize(("lead", "shape"), [((), (6,)), ((4,), (6,)), ((2, 3), (6,)), ((3,), (2, 6))])
def test_rms_norm(lead: tuple[int, ...], shape: tuple[int, ...], eps: float | None) -> None:
    layer = shaken(nn.RMSNorm(shape, eps=eps, dtype=DOUBLE))
    check(layer, torch.randn(5, *lead, *shape, dtype=DOUBLE), lean=False)


@pytest.mark.parametrize("dimensions", INSTANCE)
def test_instance_norm(dimensions: int) -> None:
    layer = shaken(INSTANCE[dimensions](3, affine=True, dtype=DOUBLE))
    check(layer, 1 + torch.randn(5, 3, *[4] * dimensions, dtype=DOUBLE), lean=False)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(("layer", "shape"), [(nn.GroupNorm(1, 3), (4, 3, 4)), (nn.LayerNorm(3), (4, 5, 3))])
def test_half_frozen(layer: nn.Module, shape: tuple[int, ...], frozen: str) -> None:
    layer = shaken(layer.double().requires_grad_(True))
    layer.get_parameter(frozen).requires_grad_(False)
    check(layer, torch.randn(shape, dtype=DOUBLE), lean=False)


def test_other_memory_formats() -> None:
    layer, x = shaken(nn.GroupNorm(2, 4, dtype=DOUBLE)), torch.randn(3, 4, 5, 6, dtype=DOUBLE)
    check(layer, x.to(memory_format=torch.channels_last), lean=False)
    check(shaken(nn.LayerNorm(5, dtype=DOUBLE)), x.mT, lean=False)


def test_the_engine_serves_them_all(agrees: Oracle) -> None:
    model = nn.Sequential(
        nn.GroupNorm(2, 4, dtype=DOUBLE), nn.Tanh(), nn.InstanceNorm1d(4, affine=True, dtype=DOUBLE), nn.Tanh(),
        nn.LayerNorm(5, dtype=DOUBLE), nn.RMSNorm(5, dtype=DOUBLE), nn.LayerNorm(5, elementwise_affine=False),
    )  # fmt: skip
    agrees(model, torch.randn(3, 4, 5, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE), total, kernels=True)


def test_running_statistics_take_the_fallback(agrees: Oracle) -> None:
    model = nn.InstanceNorm1d(3, affine=True, track_running_stats=True, dtype=DOUBLE).eval()
    agrees(model, torch.randn(3, 3, 5, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE), total, kernels=False)


LAYERS: dict[str, tuple[nn.Module, bool]] = {
    "group": (nn.GroupNorm(3, 6), True),
    "instance": (nn.InstanceNorm1d(6, affine=True), True),
    "layer": (nn.LayerNorm(6), False),
    "rms": (nn.RMSNorm(6), False),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mean", [0.0, 1.5, 100.0])
@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
def test_sums_that_cancel(kind: str, mean: float, rest: float) -> None:
    """Every place twice, with output gradients that cancel up to a remainder, around a mean that cancels as well."""

    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).flatten(1).sum(1)

    layer, channels_first = LAYERS[kind]
    x, y = mean + torch.randn(4, 30, 6).repeat(1, 2, 1), torch.randn(4, 30, 6)
    y = torch.cat([y, -y * (1 + rest * torch.randn(4, 1, 1))], dim=1)
    if channels_first:
        x, y = x.mT.contiguous(), y.mT.contiguous()
    exact = row_norms(reference(layer, summed, x, y, DOUBLE)[1])
    torch.testing.assert_close(per_sample(layer, summed, x, y).norm, exact, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("mean", [0.0, 1.5, 100.0])
def test_sums_left_by_the_backward(mean: float) -> None:
    """Channels without a gradient, or with one that float32 cannot square, have their lengths taken again."""
    layer, kernel, names = shaken(nn.GroupNorm(3, 6)), normalization.GroupNormKernel(), frozenset({"weight", "bias"})
    x, grad = mean + torch.randn(4, 6, 5, 5), torch.randn(4, 6, 5, 5)
    grad[1, 2], grad[2, 3] = 0.0, 1e-30
    with torch.no_grad():
        saved = kernel.forward(layer, x)[1]
        dx, left = kernel.backward(layer, x, saved, grad)
        assert len(left) == 4
        exact = kernel.input_gradient(
            copy.deepcopy(layer).double(), x.double(), tuple(t.double() for t in saved), grad.double()
        )
        torch.testing.assert_close(dx, exact.float())
        ours, alone = (kernel.share(layer, x, s, grad, names, ScratchBuffers(False)) for s in ((*saved, *left), saved))
        for name, rows in alone.instantiate().items():
            torch.testing.assert_close(ours.instantiate()[name], rows)
        torch.testing.assert_close(ours.reach(CarefulRowNorms()), alone.reach(CarefulRowNorms()))


@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-4, 1e-2])
def test_cancelling_sums_left_by_the_backward(rest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).flatten(1).sum(1)

    def watched(*args: Any) -> Any:
        left.append(backward(*args))
        return left[-1]

    left: list[Any] = []
    backward = normalization.GroupNormKernel.backward
    monkeypatch.setattr(normalization.GroupNormKernel, "backward", watched)
    layer, x, y = nn.GroupNorm(3, 6), torch.randn(4, 6, 30).repeat(1, 1, 2), torch.randn(4, 6, 30)
    y = torch.cat([y, -y * (1 + rest * torch.randn(4, 1, 1))], dim=2)
    exact = row_norms(reference(layer, summed, x, y, DOUBLE)[1])
    torch.testing.assert_close(per_sample(layer, summed, x.requires_grad_(), y).norm, exact, rtol=1e-5, atol=1e-12)
    assert any(extra for _, extra in left)
