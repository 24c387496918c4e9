"""Noisy counts per group: what DPSGD-F and the naive baseline look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand.queries.base import Query
from evenhand.registry import register
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class GroupSizes(Query):
    """How many sampled records each group has: G counts, of which one record changes one by 1.

    Examples:
      >>> GroupSizes(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      3
    """

    name = "group_sizes"

    def width(self, facts: Facts) -> int:
        """One count per group."""
        return len(facts.groups)

    def value(self, rows: Stats, state: State) -> Tensor:
        """1 at the place of the record's group."""
        return _one_at(rows.group, state.public.groups)


@register
@dataclass(frozen=True)
class GroupCounts(Query):
    """How many records of each group have a gradient above the clip bound, then how many have not: 2 G counts.

    Examples:
      >>> GroupCounts(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      6
    """

    name = "group_counts"

    def width(self, facts: Facts) -> int:
        """Two counts per group."""
        return 2 * len(facts.groups)

    def value(self, rows: Stats, state: State) -> Tensor:
        """1 at the place of the record's group, in the half that says on which side of the bound its norm lies."""
        under = (rows.norm <= state.bound[rows.owner]).long()
        return _one_at(rows.group + state.public.groups * under, 2 * state.public.groups)


def _one_at(place: Tensor, width: int) -> Tensor:
    import torch

    return (torch.arange(width, device=place.device) == place.unsqueeze(-1)).double()
