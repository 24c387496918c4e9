"""The same noise and clip bound at every step."""

from __future__ import annotations

from dataclasses import dataclass

from evenhand import _validate
from evenhand.registry import register
from evenhand.schedules.base import Schedule
from evenhand.types import Level


@register
@dataclass(frozen=True)
class Constant(Schedule):
    """One level for the whole run.

    Examples:
      >>> Constant(bound=2.0).segments(100, 10)
      [(100, Level(noise=1.0, bound=2.0))]
    """

    bound: float = 1.0

    name = "constant"

    def __post_init__(self) -> None:
        _validate.number(self.bound, "bound", low=0)

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """A single stretch."""
        return [(steps, Level(noise=1.0, bound=self.bound))]
