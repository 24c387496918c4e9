"""What a schedule is: stretches of steps with one relative noise and one clip bound each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from evenhand.types import Level


class Schedule(ABC):
    """Public numbers only: a schedule never sees data, so it costs nothing beyond what the plan accounts."""

    kind: ClassVar[str] = "schedule"
    name: ClassVar[str]

    @abstractmethod
    def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
        """``(count, Level)`` in order; counts sum to ``steps``. The noise is relative, the bound absolute."""
