"""No rule: weight 1 for every record. Plain SGD, kept beside the private methods for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import Guarantee, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class Identity(SampleRule):
    """Leave every gradient as it is.

    Formal guarantees:
      None: the sensitivity is infinite. Plans with this rule say "not private" and never print an epsilon.
    """

    name = "identity"
    reference = "plain stochastic gradient descent"
    guarantee: ClassVar[Guarantee] = "not private"

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return 1 for every record."""
        return row.norm.new_ones(row.norm.shape)

    def sensitivity(self, state: State) -> Tensor:
        """Return infinity for every owner class."""
        return state.bound.new_full(state.bound.shape, float("inf"))
