"""A clip bound per group (DPSGD-F): groups whose gradients are clipped more often get a larger bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods import averages, references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class GroupClip(SampleRule):
    """Clip to ``C0 (1 + (m_k / b_k) / (m / B))``, where m_k of the b_k sampled records of group k exceed C0.

    The counts are the noisy answers of the query ``group_counts``; B is the EXPECTED batch size. Noisy ratios can be
    negative or explode, so they are clamped, in this order: b_k to at least 1, m_k into [0, b_k], their sum m to at
    least 1, and the bound into [C0, ``most`` C0].

    ``memory`` averages the noisy counts over the steps before the bounds are computed: "none" (as published), "full",
    or a number between 0 and 1 for an exponential mean. Where a group has few records per step, the noise of a single
    answer decides its bound; averages of released answers cost nothing.

    Formal guarantees:
      Unit one record, add/remove: ``min(1, C_k / n) n <= max_k C_k``, over ALL groups, not only those in the batch.

    Examples:
      >>> import torch
      >>> from evenhand.types import Public, State
      >>> answers = {"group_counts": torch.tensor([8.0, 2.0, 2.0, 8.0])}
      >>> state = State(step=0, bound=torch.tensor([1.0]), answers=answers, public=Public(batch=20.0, groups=2))
      >>> GroupClip().factors(state)
      tensor([2.6000, 1.4000])
    """

    most: float = 5.0
    memory: str | float = "none"

    name = "group_clip"
    reference = references.XU.text

    def __post_init__(self) -> None:
        _validate.number(self.most, "most", low=1, open_low=False)
        averages.decay_of(self.memory)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the queries: how many records of each group lie above and below the base bound."""
        return ("group_counts",)

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return an empty memory; refuse data with a single group."""
        several(facts, self.name)
        return {}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the sums of the noisy counts so far; nothing without memory."""
        return {} if self.memory == "none" else averages.remembered(state, "group_counts", self.memory)

    def factors(self, state: State) -> Tensor:
        """Return C_k / C0 for every group, from the noisy counts alone."""
        groups = state.public.groups
        noisy = averages.averaged(state, "group_counts", self.memory)  # few numbers: quicker outside torch
        sizes = [max(1.0, over + under) for over, under in zip(noisy[:groups], noisy[groups:], strict=True)]
        clipped = [max(0.0, min(over, size)) for over, size in zip(noisy, sizes, strict=False)]
        share = max(1.0, sum(clipped)) / state.public.batch
        factors = [min(1.0 + over / size / share, self.most) for over, size in zip(clipped, sizes, strict=True)]
        return state.answers["group_counts"].new_tensor(factors)

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return C_k of every group; with bounds per owner, those of the largest."""
        return {"clip bound": (state.bound.max() * self.factors(state)).tolist()}

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return min(1, C_k / n) with the bound of the record's group."""
        return (state.bound[row.owner] * self.factors(state)[row.group] / row.norm).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """Return the largest bound of any group."""
        return state.bound * self.factors(state).max()


def several(facts: Facts, name: str) -> None:
    """Refuse data with one group: there would be nothing to compare, and the side query would still be paid for."""
    if len(facts.groups) < 2:
        raise UsageError(
            f"{name!r} treats groups differently, and this data has one group: pass groups= (one name per record), or "
            "take the method 'dpsgd'. Nothing was spent."
        )
