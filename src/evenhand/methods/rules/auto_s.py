"""Automatic clipping (AUTO-S) and normalised SGD: weight C / (n + gamma)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand import _validate
from evenhand.methods import references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class AutoS(SampleRule):
    """Normalise every gradient to about C; ``gamma`` keeps small gradients small.

    Formal guarantees:
      Unit one record, add/remove: ``C n / (n + gamma) < C``.

    Examples:
      >>> import torch
      >>> from evenhand.types import State, Stats
      >>> zero = torch.zeros(2, dtype=torch.long)
      >>> rows = Stats(norm=torch.tensor([0.09, 3.99]), loss=torch.zeros(2), group=zero, owner=zero, record=zero)
      >>> AutoS(gamma=0.01).weight(rows, State(step=0, bound=torch.tensor([1.0])))
      tensor([10.0000,  0.2500])
    """

    gamma: float = 0.01

    name = "auto_s"
    reference = references.BU_2023.text

    def __post_init__(self) -> None:
        _validate.number(self.gamma, "gamma", low=0)

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return C / (n + gamma)."""
        return state.bound[row.owner] / (row.norm + self.gamma)

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound


@register
@dataclass(frozen=True)
class Nsgd(AutoS):
    """Normalised SGD: the same weight as AUTO-S, found independently; ``gamma`` is its regulariser r.

    Formal guarantees:
      Those of AutoS.
    """

    name = "nsgd"
    reference = references.YANG.text
