"""Reweighting by noisy group size: the naive baseline of the DPSGD-F paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenhand import _validate
from evenhand.methods import averages, references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.methods.rules.group_clip import several
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class GroupReweight(SampleRule):
    """Clip to C, then multiply by ``theta_k = (B / K) / b_k``, so that each of K groups counts alike.

    b_k is the noisy answer of the query ``group_sizes``, clamped to at least 1; B is the EXPECTED batch size; theta is
    clamped into [1 / ``most``, ``most``]. ``memory`` averages the noisy sizes over the steps first, as in GroupClip.

    Formal guarantees:
      Unit one record, add/remove: ``theta_k min(1, C / n) n <= C max_k theta_k``, over ALL groups.

    Examples:
      >>> import torch
      >>> from evenhand.types import Public, State
      >>> answers = {"group_sizes": torch.tensor([15.0, 5.0])}
      >>> state = State(step=0, bound=torch.tensor([1.0]), answers=answers, public=Public(batch=20.0, groups=2))
      >>> GroupReweight().factors(state)
      tensor([0.6667, 2.0000])
    """

    most: float = 10.0
    memory: str | float = "none"

    name = "group_reweight"
    reference = references.XU.text

    def __post_init__(self) -> None:
        _validate.number(self.most, "most", low=1, open_low=False)
        averages.decay_of(self.memory)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the queries: how many records of each group were sampled."""
        return ("group_sizes",)

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return an empty memory; refuse data with a single group."""
        several(facts, self.name)
        return {}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the sums of the noisy sizes so far; nothing without memory."""
        return {} if self.memory == "none" else averages.remembered(state, "group_sizes", self.memory)

    def factors(self, state: State) -> Tensor:
        """Return theta_k for every group, from the noisy sizes alone."""
        usual = state.public.batch / state.public.groups
        sizes = averages.averaged(state, "group_sizes", self.memory)  # few numbers: quicker outside torch
        factors = [min(max(usual / max(1.0, size), 1.0 / self.most), self.most) for size in sizes]
        return state.answers["group_sizes"].new_tensor(factors)

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return the weight of every group."""
        return {"weight": self.factors(state).tolist()}

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return theta_k min(1, C / n)."""
        return self.factors(state)[row.group] * (state.bound[row.owner] / row.norm).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound times the largest factor of any group."""
        return state.bound * self.factors(state).max()
