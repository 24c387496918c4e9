"""Per-sample adaptive clipping (PSAC): weight C / (n + r / (n + r))."""

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
class Psac(SampleRule):
    """Normalise large gradients to about C, and do not blow up small ones: the weight of a zero gradient is C.

    Formal guarantees:
      Unit one record, add/remove: ``C n / (n + r/(n + r)) < C``.

    Examples:
      >>> import torch
      >>> from evenhand.types import State, Stats
      >>> zero = torch.zeros(2, dtype=torch.long)
      >>> rows = Stats(norm=torch.tensor([0.0, 0.9]), loss=torch.zeros(2), group=zero, owner=zero, record=zero)
      >>> Psac(r=0.1).weight(rows, State(step=0, bound=torch.tensor([2.0])))
      tensor([2., 2.])
    """

    r: float = 0.1

    name = "psac"
    reference = references.XIA.text

    def __post_init__(self) -> None:
        _validate.number(self.r, "r", low=0)

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return C / (n + r / (n + r))."""
        return state.bound[row.owner] / (row.norm + self.r / (row.norm + self.r))

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound
