"""Side queries: one bounded vector per record, summed over the gradient's own sample and released with noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods.registry import register
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Count", "Exceedance", "GroupCounts", "GroupLosses", "GroupSizes", "Query", "Unclipped", "register"]


@dataclass(frozen=True)
class Query(ABC):
    """Sum over the sampled records of ``value(row)``, a vector of L2 norm at most ``sensitivity``, plus noise.

    It shares the gradient's sample, so both are accounted as ONE subsampled Gaussian (law 6). Its noise is given
    either as a ``share`` of the step's privacy (``z_query^-2 = share * z^-2``) or as a fixed multiplier ``noise``.

    Formal guarantees:
      The step scales every value down to norm ``sensitivity`` and drops non-finite rows: by construction.
    """

    share: float | None = None
    noise: float | None = None

    kind: ClassVar[str] = "query"
    name: ClassVar[str]
    sensitivity: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if (self.share is None) == (self.noise is None):
            raise UsageError(f"{self.name}: give either share= (of the step's privacy, e.g. 0.05) or noise= (e.g. 10).")
        if self.share is not None:
            _validate.number(self.share, "share", low=0, high=1)
        if self.noise is not None:
            _validate.number(self.noise, "noise", low=0)
        _validate.number(self.sensitivity, "sensitivity", low=0)

    @abstractmethod
    def width(self, facts: Facts) -> int:
        """Return the length of the answer, from public facts only: an empty batch has an answer of this length too."""

    @abstractmethod
    def value(self, rows: Stats, state: State) -> Tensor:
        """Return one vector of length ``width`` per row."""


class Count(Query):
    """A query that counts records by place: each adds 1 at the place it names, and nothing elsewhere.

    Quicker than vectors, of which it makes none.

    Formal guarantees:
      The step adds 1 (or the declared sensitivity, if that is less) at no more than one place per record, whatever
      ``place`` returns: sensitivity 1, by construction.
    """

    @abstractmethod
    def places(self, groups: int) -> int:
        """Return the number of places for data with ``groups`` groups."""

    @abstractmethod
    def place(self, rows: Stats, state: State) -> Tensor:
        """Return one whole number per row, from 0 to ``places - 1``; a record with any other one is not counted."""

    def width(self, facts: Facts) -> int:
        """Return the number of places: one count each."""
        return self.places(len(facts.groups))

    def value(self, rows: Stats, state: State) -> Tensor:
        """Return one vector per row: 1 at the record's place, 0 elsewhere."""
        import torch

        place = self.place(rows, state)
        return (torch.arange(self.places(state.public.groups), device=place.device) == place.unsqueeze(-1)).double()


@register
@dataclass(frozen=True)
class Exceedance(Count):
    """Number of sampled records whose gradient norm is above ``factor`` times the rule's threshold.

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
        """Return 1."""
        return 1

    def place(self, rows: Stats, state: State) -> Tensor:
        """Return 0 if the norm exceeds factor * threshold, else 1, which is not counted."""
        if "threshold" not in state.memory:
            raise UsageError(
                "The query 'exceedance' counts norms above a rule's threshold, and this rule keeps none: use it with "
                "evenhand.methods.rules.GlobalAdapt(), or leave it out."
            )
        near: Tensor = rows.norm > self.factor * state.memory["threshold"]
        return near.logical_not().long()


@register
@dataclass(frozen=True)
class GroupSizes(Count):
    """Number of sampled records of each group: G counts, of which one record changes one by 1.

    Examples:
      >>> from evenhand.types import Facts
      >>> GroupSizes(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      3
    """

    name = "group_sizes"

    def places(self, groups: int) -> int:
        """Return one place per group."""
        return groups

    def place(self, rows: Stats, state: State) -> Tensor:
        """Return the record's group."""
        return rows.group


@register
@dataclass(frozen=True)
class GroupCounts(Count):
    """Number of records of each group with a gradient above the clip bound, then of those without: 2 G counts.

    Examples:
      >>> from evenhand.types import Facts
      >>> GroupCounts(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      6
    """

    name = "group_counts"

    def places(self, groups: int) -> int:
        """Return two places per group."""
        return 2 * groups

    def place(self, rows: Stats, state: State) -> Tensor:
        """Return the record's group, plus the number of groups if its norm is at most the bound."""
        return rows.group.long().add(rows.norm <= state.bound[rows.owner], alpha=state.public.groups)


@register
@dataclass(frozen=True)
class Unclipped(Query):
    """Sum of 1/2 for every sampled record whose norm is at most the adaptive bound, and of -1/2 for every other one.

    Divided by the expected batch size and with 1/2 added it is their share. Centred, one record moves it by 1/2 only.

    Examples:
      >>> Unclipped(noise=10.0).sensitivity
      0.5
    """

    name = "unclipped"
    sensitivity = 0.5

    def width(self, facts: Facts) -> int:
        """Return 1."""
        return 1

    def value(self, rows: Stats, state: State) -> Tensor:
        """Return 1/2 if the norm is at most the bound times the rule's factor, else -1/2."""
        if "factor" not in state.memory:
            raise UsageError(
                "The query 'unclipped' compares norms with an adaptive bound, and this rule keeps none: use it with "
                "evenhand.methods.rules.AdaptiveClip(), or leave it out."
            )
        inside: Tensor = rows.norm <= state.bound[rows.owner] * state.memory["factor"]
        return (inside.double() - 0.5).unsqueeze(-1)


@register
@dataclass(frozen=True)
class GroupLosses(Query):
    """Sum of the losses of each group, held to [0, ``cap``] and divided by it, then its number of records: 2 G numbers.

    A record adds (loss / cap, 1) at the two places of its group: a vector of norm at most sqrt(2). The ratio of the two
    sums is the mean loss of the group, as a share of the cap.

    Examples:
      >>> from evenhand.types import Facts
      >>> GroupLosses(share=0.01).width(Facts(10, (("all", 10),), groups=("a", "b", "c")))
      6
    """

    cap: float = 5.0

    name = "group_losses"
    sensitivity = math.sqrt(2.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.number(self.cap, "cap", low=0)

    def width(self, facts: Facts) -> int:
        """Return two places per group."""
        return 2 * len(facts.groups)

    def value(self, rows: Stats, state: State) -> Tensor:
        """Return one vector per row: its bounded loss and a 1 at the places of its group."""
        import torch

        mine = (torch.arange(state.public.groups, device=rows.group.device) == rows.group.unsqueeze(-1)).double()
        losses = mine * (rows.loss.double().clamp(0.0, self.cap) / self.cap).unsqueeze(-1)
        return torch.cat([losses, mine], dim=-1)
