"""Noisy counts per group: what DPSGD-F and the naive baseline look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand.queries.base import Count
from evenhand.registry import register
from evenhand.types import State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class GroupSizes(Count):
    """How many sampled records each group has: G counts, of which one record changes one by 1.

    Examples:
      >>> from evenhand.types import Facts
      >>> GroupSizes(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      3
    """

    name = "group_sizes"

    def places(self, groups: int) -> int:
        """One per group."""
        return groups

    def place(self, rows: Stats, state: State) -> Tensor:
        """The record's group."""
        return rows.group


@register
@dataclass(frozen=True)
class GroupCounts(Count):
    """How many records of each group have a gradient above the clip bound, then how many have not: 2 G counts.

    Examples:
      >>> from evenhand.types import Facts
      >>> GroupCounts(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      6
    """

    name = "group_counts"

    def places(self, groups: int) -> int:
        """Two per group."""
        return 2 * groups

    def place(self, rows: Stats, state: State) -> Tensor:
        """The record's group, in the half that says on which side of the bound its norm lies."""
        return rows.group.long().add(rows.norm <= state.bound[rows.owner], alpha=state.public.groups)
