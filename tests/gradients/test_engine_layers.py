"""Every kernel and shape option against vmap(grad) in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenhand.types import Pass

DOUBLE = torch.float64
Oracle = Callable[..., Pass]


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with a different gradient at every output."""
    flat = outputs.flatten(1)
    return (flat.sin() * targets[:, None]).sum(1) + flat.square().mean(1)


def targets(size: int) -> Tensor:
    return torch.linspace(0.5, 2, size, dtype=DOUBLE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (40,), (2, 5)])
@pytest.mark.parametrize("shape", [(3, 4), (30, 20)])
def test_linear(agrees: Oracle, lead: tuple[int, ...], shape: tuple[int, int], bias: bool) -> None:
    model = nn.Linear(*shape, bias=bias, dtype=DOUBLE)
    agrees(model, torch.randn(5, *lead, shape[0], dtype=DOUBLE), targets(5), total, kernels=True)


OPTIONS = list(itertools.product([1, 2], [0, (1, 2), "same", "valid"], [1, (2, 1)], [1, 2, 4], [3, (2, 4), 1]))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("bias", [True, False])
def test_conv2d_options(agrees: Oracle, bias: bool) -> None:
    tried = 0
    for stride, padding, dilation, groups, kernel in OPTIONS:
        if padding == "same" and stride != 1:
            continue
        layer = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, bias=bias, dtype=DOUBLE)
        model = nn.Sequential(nn.Conv2d(2, 4, 1, dtype=DOUBLE), layer)
        agrees(model, torch.randn(3, 2, 7, 6, dtype=DOUBLE), targets(3), total, kernels=True)
        tried += 1
    assert tried == 126


@pytest.mark.parametrize("shape", [(2, 2), (9, 9), (2, 9)])
@pytest.mark.parametrize("channels", [(1, 2), (24, 16)])
def test_conv2d_few_and_many_pixels(agrees: Oracle, shape: tuple[int, int], channels: tuple[int, int]) -> None:
    """Both forms of the norm: Gram matrices over few pixels, instantiated gradients over many."""
    model = nn.Conv2d(*channels, 3, padding=1, dtype=DOUBLE)
    agrees(model, torch.randn(4, channels[0], *shape, dtype=DOUBLE), targets(4), total, kernels=True)


def test_conv2d_channels_last(agrees: Oracle) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, dtype=DOUBLE), nn.Conv2d(4, 2, 2, dtype=DOUBLE))
    x = torch.randn(4, 3, 6, 6, dtype=DOUBLE).to(memory_format=torch.channels_last)
    agrees(model.to(memory_format=torch.channels_last), x, targets(4), total, kernels=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_conv2d_other_padding_modes_take_the_fallback(agrees: Oracle, mode: str) -> None:
    model = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode, dtype=DOUBLE)
    agrees(model, torch.randn(3, 2, 5, 5, dtype=DOUBLE), targets(3), total, kernels=False)


@pytest.mark.parametrize("tail", [(), (4,), (3, 2)])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_norm(agrees: Oracle, groups: int, tail: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.GroupNorm(groups, 6, dtype=DOUBLE), nn.Tanh(), nn.GroupNorm(1, 6, dtype=DOUBLE))
    if tail == () and groups == 6:
        pytest.skip("torch refuses a group of one value")
    x = torch.randn(5, 6, *tail, dtype=DOUBLE)
    agrees(model, x, targets(5), total, kernels=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("lead", "shape"), [((), (6,)), ((4,), (6,)), ((2, 3), (6,)), ((3,), (2, 6)), ((), (4, 6))])
def test_layer_norm(agrees: Oracle, lead: tuple[int, ...], shape: tuple[int, ...], bias: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(shape, bias=bias, dtype=DOUBLE), nn.Linear(6, 6, dtype=DOUBLE))
    model.append(nn.LayerNorm(shape, elementwise_affine=False, dtype=DOUBLE))
    agrees(model, torch.randn(5, *lead, *shape, dtype=DOUBLE), targets(5), total, kernels=True)


@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("lead", [(), (1,), (9,), (2, 3)])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_embedding(agrees: Oracle, lead: tuple[int, ...], padding: int | None, kind: torch.dtype) -> None:
    model = nn.Embedding(5, 3, padding_idx=padding, dtype=DOUBLE)
    agrees(model, torch.randint(5, (6, *lead)).to(kind), targets(6), total, kernels=True)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 3), (4, 3)),
        (nn.Linear(3, 3), (4, 5, 3)),
        (nn.Conv2d(3, 3, 2), (4, 3, 4, 4)),
        (nn.GroupNorm(1, 3), (4, 3, 4)),
        (nn.LayerNorm(3), (4, 5, 3)),
    ],
)
def test_half_frozen_layers(agrees: Oracle, layer: nn.Module, shape: tuple[int, ...], frozen: str) -> None:
    model = layer.double().requires_grad_(True)
    model.get_parameter(frozen).requires_grad_(False)
    result = agrees(model, torch.randn(shape, dtype=DOUBLE), targets(4), total, kernels=True)
    assert list(result.weighted_sum(torch.ones(4))) == [{"weight": "bias", "bias": "weight"}[frozen]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_convolutions(agrees: Oracle, data: st.DataObject) -> None:
    small = st.integers(1, 3)
    groups, stride, dilation = data.draw(small), data.draw(st.tuples(small, small)), data.draw(st.tuples(small, small))
    kernel, padding = data.draw(st.tuples(small, small)), data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    extra = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    side = [d * (k - 1) + 1 + e for d, k, e in zip(dilation, kernel, extra, strict=True)]
    channels, size = groups * data.draw(small), data.draw(st.integers(1, 4))
    model = nn.Conv2d(channels, groups * data.draw(small), kernel, stride, padding, dilation, groups, dtype=DOUBLE)
    agrees(model, torch.randn(size, channels, *side, dtype=DOUBLE), targets(size), total, kernels=True)
