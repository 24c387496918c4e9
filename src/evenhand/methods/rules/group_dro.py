"""Private group weights by group losses (group DRO): the group with the highest loss counts in full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods import averages, references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.methods.rules.group_clip import several
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class GroupDro(SampleRule):
    """Clip to C, then multiply by q_k in [``least``, 1]: ``q_k <- q_k exp(rate L_k)``, scaled so that the largest is 1.

    L_k is the mean bounded loss of group k as a share of its cap, in [0, 1]: the ratio of the noisy sums of the query
    ``group_losses``, averaged over the steps by ``memory`` (see GroupClip) with the number of records held to at least
    1. The weights go on multiplying until the losses are equal; ``least`` keeps every group in the sum. The
    paper samples groups evenly; here they come as they are, which moves where the weights begin, not where they end.

    Formal guarantees:
      Unit one record, add/remove: ``q_k min(1, C / n) n <= C``, since no q_k exceeds 1. The weights depend on the data
      through noisy answers of earlier steps only.

    Examples:
      >>> import torch
      >>> from evenhand.types import Public, State
      >>> answers = {"group_losses": torch.tensor([2.0, 3.0, 10.0, 5.0])}
      >>> state = State(0, torch.ones(1), answers, {"logs": [0.0, 0.0]}, Public(batch=15.0, groups=2))
      >>> [round(log, 3) for log in GroupDro(rate=0.1).advance(state)["logs"]]
      [-0.04, 0.0]
    """

    rate: float = 0.1
    least: float = 0.1
    memory: str | float = 0.9

    name = "group_dro"
    reference = references.SAGAWA.text

    def __post_init__(self) -> None:
        _validate.number(self.rate, "rate", low=0)
        if _validate.number(self.least, "least", low=0) > 1:
            raise UsageError("least is the lowest weight of a group and the highest is 1: pass for example least=0.1.")
        averages.decay_of(self.memory)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the queries: losses and number of the sampled records of each group."""
        return ("group_losses",)

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return equal weights, as logarithms; refuse data with a single group."""
        several(facts, self.name)
        return {"logs": [0.0] * len(facts.groups)}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the next weights, from the noisy sums alone."""
        groups = state.public.groups
        sums = averages.averaged(state, "group_losses", self.memory)
        losses = [min(max(loss / max(1.0, size), 0.0), 1.0) for loss, size in zip(sums, sums[groups:], strict=False)]
        logs = [log + self.rate * loss for log, loss in zip(state.memory["logs"], losses, strict=True)]
        lowest, highest = math.log(self.least), max(logs)
        return {
            **averages.remembered(state, "group_losses", self.memory),
            "logs": [max(log - highest, lowest) for log in logs],
        }

    def factors(self, state: State) -> Tensor:
        """Return q_k for every group."""
        return state.bound.new_tensor([math.exp(log) for log in state.memory["logs"]])

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return the weight of every group."""
        return {"weight": self.factors(state).tolist()}

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return q_k min(1, C / n)."""
        return self.factors(state)[row.group] * (state.bound[row.owner] / row.norm).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound
