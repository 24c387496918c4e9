"""Adaptive quantile clipping: the clip bound follows a quantile of the gradient norms, by a noisy count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenhand import _validate
from evenhand.methods import references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor

FACTORS = (1e-6, 1e6)
"""The factor of the bound stays in here, whatever the noise."""
_BOUNDS = (1e-30, 1e30)


@register
@dataclass(frozen=True)
class AdaptiveClip(SampleRule):
    """Clip to ``C_t = C f_t``; f follows the ``quantile`` of the norms: ``f <- f exp(-rate (share - quantile))``.

    ``share = 1/2 + a / B``, where a is the noisy answer of the query ``unclipped`` (sampled records with a norm of at
    most C_t, each counted as 1/2, the others as -1/2) and B the EXPECTED batch size. Published code divides by the
    realised size, which leaks it. With ``normalize`` what is summed is divided by f, so that the length of a step does
    not follow C_t; relative to the noise nothing changes.

    Formal guarantees:
      Unit one record, add/remove: ``min(1, C_t / n) n <= C_t``, and the noise is in proportion to C_t. C_t depends on
      the data through noisy answers of earlier steps only.

    Examples:
      >>> import torch
      >>> from evenhand.types import Public, State
      >>> state = State(0, torch.ones(1), {"unclipped": torch.tensor([50.0])}, {"factor": 2.0}, Public(batch=100.0))
      >>> AdaptiveClip().sensitivity(state), round(AdaptiveClip().advance(state)["factor"], 4)
      (tensor([2.]), 1.8097)
    """

    quantile: float = 0.5
    rate: float = 0.2
    normalize: bool = False

    name = "adaptive_clip"
    reference = references.ANDREW.text

    def __post_init__(self) -> None:
        _validate.number(self.quantile, "quantile", low=0, high=1)
        _validate.number(self.rate, "rate", low=0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the queries: the share of norms that the bound leaves alone."""
        return ("unclipped",)

    @property
    def limits(self) -> tuple[float, float]:
        """Return the least and the largest factor of the bound."""
        return FACTORS

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return the first factor, 1: the bound of the schedule."""
        return {"factor": 1.0}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the next factor, from the noisy count and the expected batch size."""
        share = 0.5 + float(state.answers["unclipped"][0]) / state.public.batch
        moved = math.log(state.memory["factor"]) - self.rate * (share - self.quantile)
        low, high = self.limits
        return {"factor": math.exp(min(max(moved, math.log(low)), math.log(high)))}

    def clipped_at(self, state: State) -> Tensor:
        """Return C_t of each owner class, within the range of floats."""
        bounds: Tensor = state.bound * state.memory["factor"]
        return bounds.clamp(*_BOUNDS)

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return C_t; with bounds per owner, the largest."""
        return {"clip bound": [float(self.clipped_at(state).max())]}

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return min(1, C_t / n); with ``normalize`` divided by C_t / C."""
        weight = self.unscaled(row.norm, self.clipped_at(state)[row.owner])
        return weight * (state.bound / self.clipped_at(state))[row.owner] if self.normalize else weight

    def unscaled(self, norm: Tensor, bound: Tensor) -> Tensor:
        """Return the weight that keeps a gradient of this norm within the bound."""
        return (bound / norm).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """Return C_t of each owner class; with ``normalize`` the schedule's bound."""
        return state.bound if self.normalize else self.clipped_at(state)
