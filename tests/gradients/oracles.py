"""Compare the engine with plain autograd, record by record: models, losses and oracles that tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from evenhand.types import Pass

Oracle = Callable[..., Pass]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


class Custom(nn.Module):
    """Layers by keyword and a forward function, in float64."""

    def __init__(self, forward: Any, **layers: nn.Module | nn.Parameter):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward
        self.double()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self._forward(self, *args, **kwargs)


def lin(a: int = 4, b: int = 3) -> nn.Linear:
    return nn.Linear(a, b)
