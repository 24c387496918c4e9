"""Noise and clip bound that fall over the epochs: linear (sic), time and step decay (paper 004, table 1)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from evenhand import _validate
from evenhand.registry import register
from evenhand.schedules.base import Schedule, by_epoch
from evenhand.types import Level


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
        """What falls, in this epoch, relative to the first."""

    def level(self, epoch: int) -> Level:
        """Noise and clip bound in this epoch."""
        falling = 1.0 if self.bound_decay is None else self.shape(self.bound_decay, epoch)
        return Level(noise=math.sqrt(self.shape(self.decay, epoch)), bound=self.bound * falling)

    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """One stretch for each run of epochs with the same level."""
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
        """R^e."""
        return rate**epoch


@register
@dataclass(frozen=True)
class Time(Decay):
    """Variance 1 / (1 + R e) in epoch e.

    Examples:
      >>> [round(level.noise, 4) for _, level in Time(decay=1.0).segments(3, 1)]
      [1.0, 0.7071, 0.5774]
    """

    decay: float = 0.01

    name = "time"

    def shape(self, rate: float, epoch: int) -> float:
        """1 / (1 + R e)."""
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
        """R^floor(e / K)."""
        return float(rate ** (epoch // self.every))
