"""How a model uses its layers and parameters: learned while the engine is verified, and held to afterwards.

A batch of as many records as there are times would otherwise pass for something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

_INNER: dict[type[nn.Module], Callable[[Any], int]] = {
    nn.Linear: lambda module: 1,
    nn.LayerNorm: lambda module: len(module.normalized_shape),
    nn.Embedding: lambda module: 0,
}
"""Layers that do the same at every place: how many dimensions, the last ones, make a place."""


@dataclass
class Habits:
    """``batch``: where a layer's input has the records; None for a layer that sees something else.

    ``ways``: how parameters are used without a layer, see ``direct.py``.
    """

    learning: bool = True
    batch: dict[nn.Module, int | None] = field(default_factory=dict)
    ways: set[tuple[str, ...]] = field(default_factory=set)

    def place(self, module: nn.Module, x: Tensor, size: int) -> tuple[int | None, bool]:
        """Where ``x`` has the batch, and whether that is as it was. Only layers with places may have it second.

        >>> habits, layer = Habits(), nn.Linear(2, 2)
        >>> habits.place(layer, torch.ones(5, 3, 2), 3)
        (1, True)
        >>> habits.place(layer, torch.ones(3, 5, 2), 3)
        (0, False)
        >>> habits.learning = False
        >>> habits.place(layer, torch.ones(7, 7, 2), 7)
        (1, True)
        """
        if self.learning:
            found = next((dim for dim in range(_places(module, x)) if x.shape[dim] == size), None)
            return found, self.batch.setdefault(module, found) == found
        known = self.batch.get(module, 0)
        return known, known is None or (x.dim() > known and x.shape[known] == size)


def _places(module: nn.Module, x: Tensor) -> int:
    """How many of the leading dimensions may be the batch."""
    inner = _INNER.get(type(module))
    return min(1, x.dim()) if inner is None else max(min(1, x.dim()), min(2, x.dim() - inner(module)))
