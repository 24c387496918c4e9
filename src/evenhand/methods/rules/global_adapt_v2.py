"""Global clipping with a threshold that decays over the epochs (DP-SGD-Global-Adapt-V2): no side query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand import _validate
from evenhand.methods import references
from evenhand.methods.registry import register
from evenhand.methods.rules.base import SampleRule
from evenhand.types import State, Stats

if TYPE_CHECKING:
    from torch import Tensor

_SHAPES: dict[str, Callable[[float, int, int], float]] = {
    "no": lambda rate, epoch, every: 1.0,
    "linear": lambda rate, epoch, every: float(rate**epoch),
    "time": lambda rate, epoch, every: 1.0 / (1.0 + rate * epoch),
    "step": lambda rate, epoch, every: float(rate ** (epoch // every)),
}


@register
@dataclass(frozen=True)
class GlobalAdaptV2(SampleRule):
    """Scale gradients up to z alike and treat larger ones as PSAC does; z falls over the epochs by a public formula.

    With ``shape="step"`` (the paper's choice) ``z = threshold * rate^floor(epoch / every)``; "linear", "time" and "no"
    are the paper's other decays. ``floor`` is the paper's lower bound c_0, which its algorithm does not apply: 0 here.
    The paper gives no value for w = ``r``; 0.1 is PSAC's.

    Formal guarantees:
      Unit one record, add/remove: ``n C / z <= C`` for ``n <= z``, and ``C n / (n + r/(n + r)) < C``, for any z.

    Examples:
      >>> import torch
      >>> from evenhand.types import State
      >>> state = State(step=10, bound=torch.tensor([1.0]))
      >>> GlobalAdaptV2(threshold=3.0, rate=0.5, every=5).z(state)
      0.75
    """

    threshold: float = 3.0
    rate: float = 0.5
    every: int = 10
    shape: str = "step"
    floor: float = 0.0
    r: float = 0.1

    name = "global_adapt_v2"
    reference = references.CHILUKOTI_2025.text

    def __post_init__(self) -> None:
        _validate.known(self.shape, _SHAPES, "shape of the threshold")
        _validate.whole(self.every, "every")
        _validate.number(self.floor, "floor", low=0, open_low=False)
        for value, name in ((self.threshold, "threshold"), (self.rate, "rate"), (self.r, "r")):
            _validate.number(value, name, low=0)

    def z(self, state: State) -> float:
        """Return the threshold in this step's epoch."""
        return max(self.floor, self.threshold * _SHAPES[self.shape](self.rate, state.epoch, self.every))

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return the threshold z."""
        return {"threshold z": [self.z(state)]}

    def weight(self, row: Stats, state: State) -> Tensor:
        """Return C / z if n <= z, else C / (n + r / (n + r))."""
        bound, z = state.bound[row.owner], self.z(state)
        beyond = bound / (row.norm + self.r / (row.norm + self.r))
        return beyond.where(row.norm > z, bound / z)

    def sensitivity(self, state: State) -> Tensor:
        """Return the clip bound of each owner class."""
        return state.bound
