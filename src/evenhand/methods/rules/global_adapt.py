"""Global clipping with an adaptive threshold (DP-SGD-Global-Adapt): weight C / max(n, Z)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenhand import _validate
from evenhand.methods import averages, references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import Facts, State, Stats

if TYPE_CHECKING:
    from torch import Tensor

_RANGE = (1e-30, 1e30)


@register
@dataclass(frozen=True)
class GlobalAdapt(SampleRule):
    """Scale gradients up to the threshold Z alike and normalise larger ones; Z follows a noisy count.

    ``Z <- Z exp(-rate + b / B)``, where b is the noisy answer of the query ``exceedance`` (how many norms lie above
    a fraction of Z) and B the EXPECTED batch size. Published code divides by the realised size, which leaks it.
    ``memory`` averages the noisy counts first ("none" as published, "full", or a number between 0 and 1). Z itself is a
    product over all steps, in which noise averages out already, so this smooths its path rather than its end.

    Formal guarantees:
      Unit one record, add/remove: ``n C / max(n, Z) <= C`` for any Z. Z depends on the data through noisy answers only.

    Examples:
      >>> import torch
      >>> from evenhand.types import State, Stats
      >>> zero = torch.zeros(2, dtype=torch.long)
      >>> rows = Stats(norm=torch.tensor([1.0, 8.0]), loss=torch.zeros(2), group=zero, owner=zero, record=zero)
      >>> GlobalAdapt().weight(rows, State(step=0, bound=torch.tensor([1.0]), memory={"threshold": 4.0}))
      tensor([0.2500, 0.1250])
    """

    threshold: float = 50.0
    rate: float = 0.1
    memory: str | float = "none"

    name = "global_adapt"
    reference = references.ESIPOVA.text

    def __post_init__(self) -> None:
        _validate.number(self.threshold, "threshold", low=0)
        _validate.number(self.rate, "rate", low=0)
        averages.decay_of(self.memory)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the queries: the count of norms above a fraction of the threshold."""
        return ("exceedance",)

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return the first threshold, a public setting."""
        return {"threshold": self.threshold}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the next threshold, from the noisy count and the expected batch size, within the range of floats."""
        power = averages.averaged(state, "exceedance", self.memory)[0] / state.public.batch - self.rate
        low, high = _RANGE
        moved = math.log(state.memory["threshold"]) + power
        earlier = {} if self.memory == "none" else averages.remembered(state, "exceedance", self.memory)
        return {**earlier, "threshold": math.exp(min(max(moved, math.log(low)), math.log(high)))}

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return the threshold Z."""
        return {"threshold Z": [state.memory["threshold"]]}

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return C / Z if n <= Z, else C / n."""
        return state.bound[row.owner] / row.norm.clamp(min=state.memory["threshold"])

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound
