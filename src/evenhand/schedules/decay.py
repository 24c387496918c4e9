"""Noise that falls over the epochs: linear (sic), time and step decay of the variance (paper 004, table 1)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from evenhand import _validate
from evenhand.registry import register
from evenhand.schedules.base import Schedule
from evenhand.types import Level


@dataclass(frozen=True)
class Decay(Schedule):
    """Variance as a function of the epoch; the clip bound stays.

    ``decay`` is the papers' R: the variance is multiplied (linear, step) or divided (time) by a term in it.
    """

    decay: float
    bound: float = 1.0

    def __post_init__(self) -> None:
        _validate.number(self.decay, "decay", low=0)
        _validate.number(self.bound, "bound", low=0)

    @abstractmethod
    def variance(self, epoch: int) -> float:
        """Variance in this epoch, relative to the first."""

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """One stretch for each run of epochs with the same noise."""
        result: list[tuple[int, Level]] = []
        done, epoch = 0, 0
        while done < steps:
            end = min(steps, max(done, math.ceil((epoch + 1) * steps_per_epoch - 1e-9)))
            level = Level(noise=math.sqrt(self.variance(epoch)), bound=self.bound)
            if result and result[-1][1] == level:
                result[-1] = (result[-1][0] + end - done, level)
            elif end > done:
                result.append((end - done, level))
            done, epoch = end, epoch + 1
        return result


@register
@dataclass(frozen=True)
class Linear(Decay):
    """Variance R^e in epoch e: the papers call this linear.

    Examples:
      >>> Linear(decay=0.25).segments(4, 2)
      [(2, Level(noise=1.0, bound=1.0)), (2, Level(noise=0.5, bound=1.0))]
    """

    name = "linear"

    def variance(self, epoch: int) -> float:
        """R^e."""
        return self.decay**epoch


@register
@dataclass(frozen=True)
class Time(Decay):
    """Variance 1 / (1 + R e) in epoch e.

    Examples:
      >>> [round(level.noise, 4) for _, level in Time(decay=1.0).segments(3, 1)]
      [1.0, 0.7071, 0.5774]
    """

    name = "time"

    def variance(self, epoch: int) -> float:
        """1 / (1 + R e)."""
        return 1.0 / (1.0 + self.decay * epoch)


@register
@dataclass(frozen=True)
class Step(Decay):
    """Variance R^floor(e / K): constant for ``every`` = K epochs at a time.

    Examples:
      >>> Step(decay=0.25, every=10).segments(40, 2)
      [(20, Level(noise=1.0, bound=1.0)), (20, Level(noise=0.5, bound=1.0))]
    """

    every: int = 10

    name = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.whole(self.every, "every")

    def variance(self, epoch: int) -> float:
        """R^floor(e / K)."""
        return float(self.decay ** (epoch // self.every))
