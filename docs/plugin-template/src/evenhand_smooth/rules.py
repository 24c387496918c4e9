"""The rule of this package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenhand.methods.rules import SampleRule, register
from evenhand.types import State, Stats


@register
@dataclass(frozen=True)
class SmoothClip(SampleRule):
    """Scale every gradient by C / sqrt(n^2 + C^2).

    Formal guarantees:
      Unit one record, add/remove: ``C n / sqrt(n^2 + C^2) < C``.
    """

    name = "smooth_clip"
    reference = "the plugin template of evenhand"

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return the weight of one record."""
        bound = state.bound[row.owner]
        return bound / torch.sqrt(row.norm**2 + bound**2)

    def sensitivity(self, state: State) -> Tensor:
        """Return the largest change of the sum by one record, per owner class."""
        return state.bound
