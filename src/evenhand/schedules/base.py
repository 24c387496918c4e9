"""What a schedule is: stretches of steps with one relative noise and one clip bound each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from evenhand.types import Level


class Schedule(ABC):
    """Public numbers only: a schedule never sees data, so it costs nothing beyond what the plan accounts."""

    kind: ClassVar[str] = "schedule"
    name: ClassVar[str]

    @abstractmethod
    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """``(count, Level)`` in order; counts sum to ``steps``. The noise is relative, the bound absolute."""


def by_epoch(level: Callable[[int], Level], steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
    """One stretch for each run of epochs with the same level.

    Examples:
      >>> by_epoch(lambda epoch: Level(1.0, 2.0 if epoch < 2 else 1.0), 25, 10)
      [(20, Level(noise=1.0, bound=2.0)), (5, Level(noise=1.0, bound=1.0))]
    """
    result: list[tuple[int, Level]] = []
    done, epoch = 0, 0
    while done < steps:
        end = min(steps, max(done, math.ceil((epoch + 1) * steps_per_epoch - 1e-9)))
        found = level(epoch)
        if result and result[-1][1] == found:
            result[-1] = (result[-1][0] + end - done, found)
        elif end > done:
            result.append((end - done, found))
        done, epoch = end, epoch + 1
    return result
