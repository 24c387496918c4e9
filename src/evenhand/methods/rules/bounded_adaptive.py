"""Bounded adaptive clipping: a clip bound that follows the gradient norms, but never below a floor."""

from __future__ import annotations

from dataclasses import dataclass

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods import references
from evenhand.methods.registry import register
from evenhand.methods.rules.adaptive_clip import FACTORS, AdaptiveClip


@register
@dataclass(frozen=True)
class BoundedAdaptive(AdaptiveClip):
    """Clip as AdaptiveClip, with C_t held in [``least`` C, ``most`` C], where C is the bound of the schedule.

    Left alone the bound follows a majority that fits well down to tiny values, and the gradients of records that do not
    fit are cut to nothing. The paper's lower bound is a length; here it is a multiple of C, so that it holds for
    schedules and for owners with bounds of their own.

    Formal guarantees:
      Those of AdaptiveClip: the floor is public.

    Examples:
      >>> import torch
      >>> from evenhand.types import Public, State
      >>> state = State(0, torch.ones(1), {"unclipped": torch.tensor([50.0])}, {"factor": 0.52}, Public(batch=100.0))
      >>> BoundedAdaptive(least=0.5).advance(state)
      {'factor': 0.5}
    """

    least: float = 0.5
    most: float = 10.0

    name = "bounded_adaptive"
    reference = references.ZHAO.text

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = FACTORS
        if not low <= _validate.number(self.least, "least", low=0) <= 1.0 <= _validate.number(self.most, "most", low=0):
            raise UsageError("The bound begins at C: pass least= from 1e-6 to 1 and most= from 1 to 1e6.")
        if self.most > high:
            raise UsageError(f"most={self.most:g} bounds nothing: pass at most {high:g}.")

    @property
    def limits(self) -> tuple[float, float]:
        """Return the floor and the ceiling, as multiples of the schedule's bound."""
        return self.least, self.most
