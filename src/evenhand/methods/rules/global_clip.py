"""Global clipping: one factor C / Z for all gradients up to a public threshold Z, nothing for larger ones."""

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
class Global(SampleRule):
    """Scale all gradients of norm up to Z = ``threshold`` alike, so that their mean keeps its direction; drop the rest.

    Formal guarantees:
      Unit one record, add/remove: ``n C / Z <= C`` for ``n <= Z``.

    Examples:
      >>> import torch
      >>> from evenhand.types import State, Stats
      >>> zero = torch.zeros(2, dtype=torch.long)
      >>> rows = Stats(norm=torch.tensor([4.0, 5.0]), loss=torch.zeros(2), group=zero, owner=zero, record=zero)
      >>> Global(threshold=4.0).weight(rows, State(step=0, bound=torch.tensor([1.0])))
      tensor([0.2500, 0.0000])
    """

    threshold: float = 100.0

    name = "global"
    reference = references.BU_2021.text

    def __post_init__(self) -> None:
        _validate.number(self.threshold, "threshold", low=0)

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return C / Z if n <= Z, else 0."""
        return (row.norm <= self.threshold) * (state.bound[row.owner] / self.threshold)

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound
