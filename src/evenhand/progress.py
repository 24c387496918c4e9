"""Progress in a terminal: step, spent of promised epsilon, loss, time left. Silent when nobody watches."""

from __future__ import annotations

import bisect
import sys
from typing import TYPE_CHECKING, Any

from evenhand.privacy.statement import rounded_up

if TYPE_CHECKING:
    from torch import Tensor

    from evenhand.planning import Plan


class Progress:
    """A context manager around the loop. The loss it shows is not private: it stays on the trainer's screen."""

    def __init__(self, plan: Plan, position: int, *, enabled: bool | None) -> None:
        self._on = sys.stderr.isatty() if enabled is None else enabled
        self._plan, self._position = plan, position
        self._bar: Any = None
        self._task: Any = None
        self._curve: list[tuple[int, float]] = []

    def __enter__(self) -> Progress:
        if self._on:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Bars(*columns, console=Console(stderr=True))
            self._curve = self._plan.spending()
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._plan.steps, completed=self._position)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, lost: int) -> None:
        """Say what a crash cost, if it cost anything."""
        if lost:
            print(
                f"{lost} step(s) were charged but are not in the checkpoint; training goes on with the "
                f"{self._plan.steps - self._position} that remain.",
                file=sys.stderr,
            )

    def step(self, position: int, losses: Tensor) -> None:
        """Show one more step."""
        if self._bar is not None:
            loss = f"loss {losses.mean().item():.3f}" if losses.numel() else "empty batch"
            self._bar.update(self._task, completed=position, description=f"{self._spent(position)}  {loss}")

    def _spent(self, position: int) -> str:
        if not self._curve:
            return "not private"
        index = min(bisect.bisect_left(self._curve, (position, 0.0)), len(self._curve) - 1)
        budget = self._plan.budgets[0]
        return f"epsilon {rounded_up(self._curve[index][1])}" + ("" if budget is None else f" of {budget:g}")
