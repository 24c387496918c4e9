"""Averages of the weights over training. Every iterate is private already, so averaging them costs no privacy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import _validate
from evenhand.errors import UsageError


@dataclass(frozen=True)
class EMA:
    """An exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    With ``warm_up`` update t uses ``min(decay, (1 + t) / (10 + t))``, so that the first weights, which are random, are
    soon forgotten in a short training (De et al. 2022).

    Examples:
      >>> [round(EMA(0.999).decay_at(t), 3) for t in (0, 100, 100_000)]
      [0.1, 0.918, 0.999]
    """

    decay: float = 0.999
    warm_up: bool = True

    def __post_init__(self) -> None:
        _validate.number(self.decay, "decay", low=0, high=1, open_low=False)

    def decay_at(self, update: int) -> float:
        """Return the share of the old average that stays at this update, counted from 0."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warm_up else self.decay


def named(average: float | EMA | None) -> EMA | None:
    """Return an EMA with warm-up for a number, its decay; an EMA or None is returned as it is.

    Examples:
      >>> named(0.99)
      EMA(decay=0.99, warm_up=True)
    """
    if average is None or isinstance(average, EMA):
        return average
    return EMA(_validate.number(average, "average", low=0, high=1, open_low=False))


class Average:
    """The running average of a model's trained weights, in memory of its own; updates do not change the model.

    Examples:
      >>> model = nn.Linear(1, 1, bias=False)
      >>> with torch.no_grad(): _ = model.weight.fill_(0.0)
      >>> average = Average(model, EMA(0.5, warm_up=False))
      >>> with torch.no_grad(): _ = model.weight.fill_(1.0)
      >>> average.update()
      >>> with average.shown(): model.weight.item()
      0.5
      >>> model.weight.item()
      1.0
    """

    def __init__(self, model: nn.Module, rule: EMA) -> None:
        self._rule = rule
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._values = {name: _wide(p.detach()).clone() for name, p in self._parameters.items()}
        self._updates = 0

    def update(self) -> None:
        """Add the present weights to the average."""
        with torch.no_grad():
            now = [_wide(p.detach()) for p in self._parameters.values()]
            torch._foreach_lerp_(list(self._values.values()), now, 1 - self._rule.decay_at(self._updates))
        self._updates += 1

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Give the model the average as its weights inside the context. Storage is exchanged, so nothing is written."""
        weights = {name: p.data for name, p in self._parameters.items()}
        try:
            for name, p in self._parameters.items():
                p.data = self._values[name].to(p.dtype)
            yield
        finally:
            for name, p in self._parameters.items():
                p.data = weights[name]

    def apply(self) -> None:
        """Give the model the average for good."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(self._values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"values": dict(self._values), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        values: Mapping[str, Tensor] = state["values"]
        if {n: v.shape for n, v in values.items()} != {n: v.shape for n, v in self._values.items()}:
            raise UsageError("The checkpoint's average belongs to a model with other trained weights.")
        for name, value in values.items():
            self._values[name].copy_(value)
        self._updates = int(state["updates"])


def _wide(value: Tensor) -> Tensor:
    """Return the value in float32 or better: an average with fewer digits would lose small changes."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
