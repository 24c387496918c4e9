"""Every kernel and shape option against vmap(grad) in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
