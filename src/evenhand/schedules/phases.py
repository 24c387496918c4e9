"""Phases of growing noise and falling clip bound (SAD-DPSGD, paper 000)."""

from __future__ import annotations

from dataclasses import dataclass

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.registry import register
from evenhand.schedules.base import Schedule
from evenhand.types import Level


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
        """``n`` stretches; lengths are whole and the last takes the remainder."""
        if steps < self.n:
            raise UsageError(f"{self.n} phases need at least {self.n} steps, and there are {steps}: take more epochs.")
        shares = [self.length ** (self.n - 1 - phase) for phase in range(self.n)]
        counts = [max(1, int(steps * share / sum(shares))) for share in shares[:-1]]
        counts.append(steps - sum(counts))
        left = [self.n - 1 - phase for phase in range(self.n)]
        return [
            (count, Level(noise=self.noise**power, bound=self.bound * self.growth**power))
            for count, power in zip(counts, left, strict=True)
        ]
