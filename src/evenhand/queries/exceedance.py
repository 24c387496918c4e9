"""Noisy count of gradients that come near a rule's threshold: what Global-Adapt moves its threshold by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.queries.base import Count
from evenhand.registry import register
from evenhand.types import State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class Exceedance(Count):
    """How many sampled records have a gradient norm above ``factor`` times the rule's threshold.

    The threshold is the rule's own, from its memory: already private. One record changes the count by 1.

    Examples:
      >>> from evenhand.types import Facts
      >>> Exceedance(noise=10.0).width(Facts(10, (("all", 10),)))
      1
    """

    factor: float = 0.7

    name = "exceedance"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.number(self.factor, "factor", low=0)

    def places(self, groups: int) -> int:
        """One."""
        return 1

    def place(self, rows: Stats, state: State) -> Tensor:
        """0 if the norm exceeds factor * threshold, else 1, which is not counted."""
        if "threshold" not in state.memory:
            raise UsageError(
                "The query 'exceedance' counts norms above a rule's threshold, and this rule keeps none: use it with "
                "evenhand.rules.GlobalAdapt(), or leave it out."
            )
        near: Tensor = rows.norm > self.factor * state.memory["threshold"]
        return near.logical_not().long()
