"""Small chains of layers, and what plain autograd says about each of their records alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenhand.gradients import Engine

LOSS = nn.CrossEntropyLoss(reduction="none")


def mlp(*, classes: int = 3) -> nn.Sequential:
    """Six inputs, two hidden layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, classes))


def batch(size: int = 12, classes: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Records for it."""
    return torch.randn(size, 2, 3, dtype=dtype), torch.randint(classes, (size,))


def alone(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Each record's gradients, from plain autograd on the record by itself."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = []
    for i in range(len(x)):
        one = loss(model(x[i : i + 1]), y[i : i + 1]).sum()
        each.append(torch.autograd.grad(one, list(trained.values())))
    return {name: torch.stack(column) for name, column in zip(trained, zip(*each, strict=True), strict=True)}


def norms(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """Their norms."""
    rows = alone(model, loss, x, y).values()
    return torch.stack([r.double().reshape(len(x), -1).square().sum(1) for r in rows]).sum(0).sqrt()


def chained(engine: Engine, x: Any, y: Any) -> bool:
    """Whether this batch is run without a tape."""
    engine.run(x, y)
    return (
        engine._path is not None
        and engine._path_works
        and any(chain and habits is not None for (chain, *_), habits in engine._habits.items())
    )
