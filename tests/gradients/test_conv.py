"""Convolutions of one, two and three dimensions, every option through every form, against autograd record by record."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenhand.gradients import per_sample
from evenhand.gradients.layers import conv, conv_patches
from evenhand.gradients.layers.base import Share, kernel_for
from evenhand.gradients.layers.conv_patches import ChannelsLast, Geometry, KernelRows, Patches
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.record_by_record import reference, row_norms
from evenhand.gradients.row_norms import RowNorms
from evenhand.types import Pass

DOUBLE = torch.float64
LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FORMS = {
    "kernel rows": (False, False, KernelRows),
    "channels last": (False, False, ChannelsLast),
    "gram": (True, False, KernelRows),
    "lean kernel rows": (False, True, KernelRows),
    "lean channels last": (False, True, ChannelsLast),
    "lean gram": (True, True, KernelRows),
}
Oracle = Callable[..., Pass]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Force one form of the norm; the fixture's value is whether memory is to be saved."""
    gram, lean, kind = FORMS[request.param]

    def chosen(geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: ScratchBuffers) -> Patches:
        if kind is ChannelsLast and groups == 1:
            return ChannelsLast(geometry, x, grad, room)
        return KernelRows(geometry, x, grad, groups, room)

    monkeypatch.setattr(conv, "ghost_is_cheaper", lambda *args, **kwargs: gram)
    monkeypatch.setattr(conv, "patches_of", chosen)
    monkeypatch.setattr(conv_patches, "CHUNK", 300)
    monkeypatch.setattr(conv_patches, "PIXEL_CHUNK", 2000)
    monkeypatch.setattr(conv, "SCALED", 100)
    return lean


def records(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Each record's gradients and the gradient of the input, by autograd alone."""
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    leaf = x.clone().requires_grad_()
    each = []
    for i in range(len(x)):
        wanted = [leaf, *(layer.get_parameter(name) for name in names)]
        each.append(torch.autograd.grad(layer(leaf[i : i + 1]), wanted, grad[i : i + 1]))
    columns = [torch.stack(column) for column in zip(*each, strict=True)]
    return dict(zip(names, columns[1:], strict=True)), columns[0].sum(0)


def check(layer: nn.Module, x: Tensor, lean: bool, tolerance: float = 1e-9, last: bool = False) -> Share:
    """Output, input gradient, norms, reach, weighted sums and instances of one layer, twice in the same room.

    ``last``: by the kernel that leaves the channels last, whose input and gradient come like that too.
    """
    kernel, room = kernel_for(layer), ScratchBuffers(lean)
    assert kernel is not None
    if last:
        kernel, x = kernel.channels_last(layer), x.contiguous(memory_format=torch.channels_last)
    assert kernel.accepts(layer, x)
    close = {"rtol": tolerance, "atol": tolerance}
    with torch.no_grad():
        out, saved = kernel.forward(layer, x)
        torch.testing.assert_close(out, layer(x))
    for size in (len(x), max(1, len(x) - 1)):
        part, grad = x[:size], torch.randn_like(out[:size])
        expected, dx = records(layer, part, grad)
        norm = torch.stack([rows.flatten(1).norm(dim=1) for rows in expected.values()]).norm(dim=0)
        with torch.no_grad():
            own = tuple(t[:size] for t in saved)
            torch.testing.assert_close(kernel.input_gradient(layer, part, own, grad), dx, **close)
            early = kernel.share(layer, part, own, grad, frozenset(expected), room).reach(RowNorms())
            assert early is None or bool((early >= norm * (1 - 1e-6)).all())
            share, gauge = kernel.share(layer, part, own, grad, frozenset(expected), room), RowNorms()
            lengths = torch.stack([column.to(DOUBLE) for column in share.lengths(gauge)]).norm(dim=0)
            torch.testing.assert_close(lengths, norm.to(DOUBLE), **close)
            reach = share.reach(gauge)
            assert reach is None or bool((reach >= norm * (1 - 1e-6)).all())
            for weights in torch.randn(2, size, dtype=x.dtype):
                sums = share.weighted_sum(weights, slice(0, size))
                assert sums.keys() == expected.keys()
                for name, rows in expected.items():
                    torch.testing.assert_close(sums[name], torch.tensordot(weights, rows, dims=1), **close)
            for name, rows in share.instantiate().items():
                torch.testing.assert_close(rows, expected[name], **close)
    return share


OPTIONS = list(itertools.product([1, 2], [0, (1, 2), "same", "valid"], [1, (2, 1)], [1, 2, 4], [3, (2, 4), 1]))


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
