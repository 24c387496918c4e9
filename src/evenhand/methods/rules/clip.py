"""Clipping, the rule of DP-SGD: weight min(1, C / n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand.methods import references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class Clip(SampleRule):
    """Scale a gradient of norm n down to the bound C of its owner class, and leave smaller ones alone.

    Formal guarantees:
      Unit one record, add/remove: ``min(1, C/n) * n <= C``.

    Examples:
      >>> import torch
      >>> from evenhand.types import State, Stats
      >>> zero = torch.zeros(2, dtype=torch.long)
      >>> rows = Stats(norm=torch.tensor([0.5, 4.0]), loss=torch.zeros(2), group=zero, owner=zero, record=zero)
      >>> Clip().weight(rows, State(step=0, bound=torch.tensor([1.0])))
      tensor([1.0000, 0.2500])
    """

    name = "clip"
    reference = references.ABADI.text

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return min(1, C / n); 1 for a zero gradient."""
        return (state.bound[row.owner] / row.norm).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound
