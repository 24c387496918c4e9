"""Check convolutions against plain autograd in every form."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from evenhand.gradients.layers import conv, conv_patches
from evenhand.gradients.layers.base import Share, kernel_for
from evenhand.gradients.layers.conv_patches import ChannelsLast, Geometry, KernelRows, Patches
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import RowNorms

DOUBLE = torch.float64


FORMS = {
    "kernel rows": (False, False, KernelRows),
    "channels last": (False, False, ChannelsLast),
    "gram": (True, False, KernelRows),
    "lean kernel rows": (False, True, KernelRows),
    "lean channels last": (False, True, ChannelsLast),
    "lean gram": (True, True, KernelRows),
}


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
