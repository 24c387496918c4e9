"""Schedules: how noise multiplier and clip bound move over the steps. They fix the shape; the plan finds the scale.

A schedule is a list of stretches of steps with one relative noise and one clip bound each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods.registry import register
from evenhand.types import Level

__all__ = ["Constant", "Linear", "Phases", "Schedule", "Step", "Table", "Time", "register"]


PRINTED_RATE = "sigma_0/T"
"""The rate of time decay that 004 prints: the first noise multiplier over the number of steps."""


class Schedule(ABC):
    """Public numbers only: a schedule never sees data, so it costs nothing beyond what the plan accounts."""

    kind: ClassVar[str] = "schedule"
    name: ClassVar[str]

    @abstractmethod
    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """Return ``(count, Level)`` in order; counts sum to ``steps``. The noise is relative, the bound absolute."""


def by_epoch(level: Callable[[int], Level], steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
    """Return one segment for each run of epochs with an equal level.

    Examples:
      >>> by_epoch(lambda epoch: Level(1.0, 2.0 if epoch < 2 else 1.0), 25, 10)
      [(20, Level(noise=1.0, bound=2.0)), (5, Level(noise=1.0, bound=1.0))]
    """
    result: list[tuple[int, Level]] = []
    done, epoch = 0, 0
    while done < steps:
        end = min(steps, max(done, math.ceil((epoch + 1) * steps_per_epoch - 1e-9)))
        epoch_level = level(epoch)
        if result and result[-1][1] == epoch_level:
            result[-1] = (result[-1][0] + end - done, epoch_level)
        elif end > done:
            result.append((end - done, epoch_level))
        done, epoch = end, epoch + 1
    return result


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
        """Return a single segment."""
        return [(steps, Level(noise=1.0, bound=self.bound))]


@dataclass(frozen=True)
class Decay(Schedule):
    """Noise VARIANCE as a function of the epoch, and on request the clip bound by the same shape.

    ``decay`` is the papers' R: the variance is multiplied (linear, step) or divided (time) by a term in it.
    ``bound_decay`` is the R of the clip bound itself (not squared); by default the bound stays.
    """

    decay: float
    bound: float = 1.0
    bound_decay: float | None = None

    def __post_init__(self) -> None:
        _validate.number(self.decay, "decay", low=0)
        _validate.number(self.bound, "bound", low=0)
        if self.bound_decay is not None:
            _validate.number(self.bound_decay, "bound_decay", low=0)

    @abstractmethod
    def shape(self, rate: float, epoch: int) -> float:
        """Return the decaying quantity in this epoch, relative to the first."""

    def level(self, epoch: int) -> Level:
        """Return noise and clip bound in this epoch."""
        falling = 1.0 if self.bound_decay is None else self.shape(self.bound_decay, epoch)
        return Level(noise=math.sqrt(self.shape(self.decay, epoch)), bound=self.bound * falling)

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """Return one segment for each run of epochs with an equal level."""
        return by_epoch(self.level, steps, steps_per_epoch)


@register
@dataclass(frozen=True)
class Linear(Decay):
    """Variance R^e in epoch e: the papers call this linear.

    Examples:
      >>> Linear(decay=0.25, bound_decay=0.5).segments(4, 2)
      [(2, Level(noise=1.0, bound=1.0)), (2, Level(noise=0.5, bound=0.5))]
    """

    decay: float = 0.99

    name = "linear"

    def shape(self, rate: float, epoch: int) -> float:
        """Return R^e."""
        return rate**epoch


@register
@dataclass(frozen=True)
class Time(Decay):
    """Variance 1 / (1 + R e) in epoch e.

    With ``decay="sigma_0/T"`` R is what 004 prints in its equation 40: the first noise multiplier over the number of
    steps. The plan solves for it, since both depend on each other, and records the number.

    Examples:
      >>> [round(level.noise, 4) for _, level in Time(decay=1.0).segments(3, 1)]
      [1.0, 0.7071, 0.5774]
    """

    decay: float | str = 0.01  # type: ignore[assignment]

    name = "time"

    def __post_init__(self) -> None:
        if isinstance(self.decay, str):
            _validate.known(self.decay, (PRINTED_RATE,), "decay of the noise over time")
            replace(self, decay=1.0)
        else:
            super().__post_init__()

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """Return one segment for each run of epochs with an equal level; raise if R is still to be solved for."""
        if isinstance(self.decay, str):
            raise UsageError(f"The rate {self.decay} depends on the calibrated noise: make a plan, which finds it.")
        return super().segments(steps, steps_per_epoch)

    def shape(self, rate: float, epoch: int) -> float:
        """Return 1 / (1 + R e)."""
        return 1.0 / (1.0 + rate * epoch)


@register
@dataclass(frozen=True)
class Step(Decay):
    """Variance R^floor(e / K): constant for ``every`` = K epochs at a time.

    Examples:
      >>> Step(decay=0.25, every=10).segments(40, 2)
      [(20, Level(noise=1.0, bound=1.0)), (20, Level(noise=0.5, bound=1.0))]
    """

    decay: float = 0.5
    every: int = 10

    name = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.whole(self.every, "every")

    def shape(self, rate: float, epoch: int) -> float:
        """Return R^floor(e / K)."""
        return float(rate ** (epoch // self.every))


@register
@dataclass(frozen=True)
class Phases(Schedule):
    """``n`` phases: noise starts low and grows by 1/``noise`` a phase, the bound starts high and falls by ``growth``.

    The paper swaps beta and gamma between its two algorithms; here ``noise`` is beta (sigma_i = sigma_n beta^(n-i)) and
    ``length`` is gamma (D_{i-1} = gamma D_i), the reading that its text and figures support. It gives no value for the
    clip bound's factor: 1.2 is ours.

    Examples:
      >>> [(count, round(level.noise, 2)) for count, level in Phases().segments(626, 31.3)]
      [(187, 0.64), (207, 0.8), (232, 1.0)]
    """

    n: int = 3
    noise: float = 0.8
    length: float = 0.9
    growth: float = 1.2
    bound: float = 1.0

    name = "phases"

    def __post_init__(self) -> None:
        _validate.whole(self.n, "n")
        for value, name in (
            (self.noise, "noise"),
            (self.length, "length"),
            (self.growth, "growth"),
            (self.bound, "bound"),
        ):
            _validate.number(value, name, low=0)

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """Return ``n`` segments; lengths are whole and the last takes the remainder."""
        shares = [self.length ** (self.n - 1 - phase) for phase in range(self.n)]
        counts = [max(1, int(steps * share / sum(shares))) for share in shares[:-1]]
        counts.append(steps - sum(counts))
        if counts[-1] < 1:
            raise UsageError(
                f"{self.n} phases of which each is {self.length:g} times as long as the next do not fit into {steps} "
                f"step{'s' if steps > 1 else ''}, since every phase needs at least one: take more epochs or a smaller "
                "batch size, or fewer phases (n=). Nothing was spent."
            )
        left = [self.n - 1 - phase for phase in range(self.n)]
        return [
            (count, Level(noise=self.noise**power, bound=self.bound * self.growth**power))
            for count, power in zip(counts, left, strict=True)
        ]


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
        """Return the table of ``function(epoch) -> (noise, bound)`` over ``epochs`` epochs."""
        rows = [function(epoch) for epoch in range(_validate.whole(epochs, "epochs"))]
        return cls(tuple(noise for noise, _ in rows), tuple(bound for _, bound in rows))

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """Return one segment for each run of epochs with an equal level."""
        last = len(self.noise) - 1
        return by_epoch(lambda e: Level(self.noise[min(e, last)], self.bound[min(e, last)]), steps, steps_per_epoch)
