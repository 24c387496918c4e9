"""Convolutions of one, two and three dimensions, every option through every form, against autograd record by record."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from conv_checks import DOUBLE, OPTIONS, check, form
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenhand.gradients import per_sample
from evenhand.gradients.layers import conv_patches
from evenhand.gradients.layers.conv_patches import Geometry
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.record_by_record import reference, row_norms
from evenhand.types import Pass

LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
Oracle = Callable[..., Pass]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

__all__ = ["form"]


@pytest.mark.parametrize("bias", [True, False])
def test_every_option_of_conv2d(form: bool, bias: bool) -> None:
    options = [o for o in OPTIONS if o[1] != "same" or o[0] == 1]
    assert len(options) == 126
    for stride, padding, dilation, groups, kernel in options[:: 2 if bias else 5]:
        layer = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, bias=bias, dtype=DOUBLE)
        check(layer, torch.randn(3, 4, 7, 6, dtype=DOUBLE), form)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_convolutions(form: bool, data: st.DataObject) -> None:
    dimensions, small = data.draw(st.integers(1, 3)), st.integers(1, 3)

    def each(low: int, high: int) -> tuple[int, ...]:
        return data.draw(st.tuples(*[st.integers(low, high)] * dimensions))

    groups, kernel, stride, dilation = data.draw(small), each(1, 4), each(1, 3), each(1, 3)
    padding: str | tuple[int, ...] = each(0, 2)
    if set(stride) == {1} and data.draw(st.booleans()):
        padding = data.draw(st.sampled_from(["same", "valid"]))
    side = [d * (k - 1) + 1 + e for d, k, e in zip(dilation, kernel, each(0, 3), strict=True)]
    inputs, outputs, size = groups * data.draw(small), groups * data.draw(small), data.draw(st.integers(1, 4))
    layer = LAYERS[dimensions](
        inputs, outputs, kernel, stride, padding, dilation, groups, data.draw(st.booleans()), dtype=DOUBLE
    )
    check(layer, torch.randn(size, inputs, *side, dtype=DOUBLE), form)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dimensions", LAYERS)
def test_other_padding_modes(form: bool, dimensions: int, mode: str) -> None:
    for kernel, padding in ((3, 1), (4, "same")):
        layer = LAYERS[dimensions](2, 3, kernel, padding=padding, padding_mode=mode, dtype=DOUBLE)
        check(layer, torch.randn(3, 2, *[5] * dimensions, dtype=DOUBLE), form)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_frozen(form: bool, frozen: str) -> None:
    layer = nn.Conv2d(3, 4, 3, 2, padding=1, dtype=DOUBLE)
    layer.get_parameter(frozen).requires_grad_(False)
    check(layer, torch.randn(3, 3, 6, 5, dtype=DOUBLE), form)


def test_float32(form: bool) -> None:
    for layer, shape in ((nn.Conv1d(3, 8, 5, 2), (3, 40)), (nn.Conv2d(8, 16, 3, padding=1), (8, 9, 9))):
        check(layer, torch.randn(4, *shape), form, tolerance=2e-5)


def test_channels_last_views_and_expanded_inputs(form: bool) -> None:
    layer, x = nn.Conv2d(3, 4, (3, 1), (2, 3), padding=(1, 0), dtype=DOUBLE), torch.randn(3, 3, 6, 8, dtype=DOUBLE)
    for form_of_x in (x.to(memory_format=torch.channels_last), x.mT, x[:, :, ::2], x[:, :1].expand(-1, 3, -1, -1)):
        check(layer, form_of_x, form)


@pytest.mark.parametrize("shape", [(2, 2), (9, 9), (2, 9)])
@pytest.mark.parametrize("channels", [(1, 2), (24, 16)])
def test_the_engine_chooses(agrees: Oracle, shape: tuple[int, int], channels: tuple[int, int]) -> None:
    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.flatten(1).sin() * targets[:, None]).sum(1)

    model = nn.Sequential(nn.Conv2d(*channels, 3, padding=1, dtype=DOUBLE), nn.Tanh(), nn.Flatten(2))
    model.append(nn.Conv1d(channels[1], 2, 2, padding_mode="circular", padding=1, dtype=DOUBLE))
    agrees(model, torch.randn(4, channels[0], *shape, dtype=DOUBLE), torch.ones(4, dtype=DOUBLE), total, kernels=True)


def test_inner_products_are_taken_in_float64() -> None:
    geometry = Geometry((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), (4, 4))
    x, grad = torch.randn(3, 6, 4, 4), torch.randn(3, 5, 4, 4)
    grad[..., 2:] = -grad[..., :2]
    single, double = (
        conv_patches.gram_lengths(geometry, x.to(d), grad.to(d), 1, ScratchBuffers(False)) for d in (x.dtype, DOUBLE)
    )
    torch.testing.assert_close(single, double, rtol=1e-12, atol=0)


def test_how_many_patches_share_a_place() -> None:
    for kernel, stride, dilation in itertools.product([1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 3]):
        out = (60 - dilation * (kernel - 1) - 1) // stride + 1
        seen = torch.zeros(60)
        for place, element in itertools.product(range(out), range(kernel)):
            seen[place * stride + element * dilation] += 1
        geometry = Geometry((60,), (kernel,), (stride,), (dilation,), (0,), (0,), (out,))
        assert geometry.overlap == int(seen.max()), geometry


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).flatten(1).sum(1)


@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize(("channels", "side"), [(1, 12), (16, 4)])
def test_gradients_that_cancel_over_the_pixels(form: bool, channels: int, side: int, rest: float) -> None:
    """The same picture twice, zeros between, with output gradients that cancel up to a remainder."""
    layer = nn.Conv2d(channels, 5, 3, padding=1)
    x, y = torch.randn(4, channels, side, side), torch.randn(4, 5, side, side)
    x[..., 0] = x[..., -1] = 0.0
    x = torch.cat([x, x], dim=3)
    y = torch.cat([y, -y * (1 + rest * torch.randn(4, 1, 1, 1))], dim=3)
    exact = row_norms(reference(layer, summed, x, y, DOUBLE)[1])
    result = per_sample(layer, summed, x, y)
    torch.testing.assert_close(result.norm, exact, rtol=1e-5, atol=1e-12)
    for i, row in enumerate(torch.eye(4, dtype=DOUBLE)):
        length = torch.cat([part.flatten() for part in result.weighted_sum(row).values()]).double().norm()
        assert float(length) <= float(exact[i]) * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_row_that_float32_cannot_carry_is_noticed(form: bool, value: float) -> None:
    layer, x, y = nn.Conv2d(2, 3, 2, bias=False), torch.randn(4, 2, 3, 3), torch.randn(4, 3, 2, 2)
    x[1, 0, 1, 1] = value
    result, clean = per_sample(layer, summed, x, y), per_sample(layer, summed, x[2:], y[2:])
    exact = row_norms(reference(layer, summed, x, y, DOUBLE)[1])
    torch.testing.assert_close(result.norm[2:], clean.norm)
    assert bool(torch.isfinite(result.norm[1])) == bool(torch.isfinite(exact[1]))
    part = result.weighted_sum(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=DOUBLE))["weight"]
    torch.testing.assert_close(part, clean.weighted_sum(torch.ones(2))["weight"])
