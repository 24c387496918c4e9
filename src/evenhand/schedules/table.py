"""A schedule of your own: one noise and one clip bound per epoch, written down or made by a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.registry import register
from evenhand.schedules.base import Schedule, by_epoch
from evenhand.types import Level


@register
@dataclass(frozen=True)
class Table(Schedule):
    """Relative noise multipliers and clip bounds by epoch; the last ones stay when the table ends.

    The plan records the values, so a run can be checked without the function that made them.

    Examples:
      >>> Table(noise=(2.0, 1.0), bound=(1.0, 0.5)).segments(6, 2)
      [(2, Level(noise=2.0, bound=1.0)), (4, Level(noise=1.0, bound=0.5))]
      >>> Table.of(lambda epoch: (1.0, 2.0 / (1 + epoch)), epochs=3).bound
      (2.0, 1.0, 0.6666666666666666)
    """

    noise: tuple[float, ...] = (1.0,)
    bound: tuple[float, ...] = (1.0,)

    name = "table"

    def __post_init__(self) -> None:
        for name in ("noise", "bound"):
            values = tuple(_validate.number(value, name, low=0) for value in getattr(self, name))
            object.__setattr__(self, name, values)
        if not self.noise or len(self.noise) != len(self.bound):
            raise UsageError(
                "A table needs one noise and one clip bound per epoch: give as many of one as of the other."
            )

    @classmethod
    def of(cls, function: Callable[[int], tuple[float, float]], epochs: int) -> Table:
        """The table of ``function(epoch) -> (noise, bound)`` over ``epochs`` epochs."""
        rows = [function(epoch) for epoch in range(_validate.whole(epochs, "epochs"))]
        return cls(tuple(noise for noise, _ in rows), tuple(bound for _, bound in rows))

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """One stretch for each run of epochs with the same level."""
        last = len(self.noise) - 1
        return by_epoch(lambda e: Level(self.noise[min(e, last)], self.bound[min(e, last)]), steps, steps_per_epoch)
