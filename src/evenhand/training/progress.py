"""Show progress in a terminal or a notebook: step, epsilon charged and planned, loss, time left."""

from __future__ import annotations

import bisect
import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from evenhand._numbers import promised, rounded_up
from evenhand.accounting.owner_classes import chosen_few
from evenhand.gradients import MicroBatches
from evenhand.gradients.batch_utils import buffers_restored
from evenhand.gradients.pass_context import preserved
from evenhand.mechanism.random_streams import Stream
from evenhand.reporting.text import label
from evenhand.terminal import plain, say, shows_progress
from evenhand.training.guards.model_guards import Compute

if TYPE_CHECKING:
    from torch import Tensor

    from evenhand.data import Data
    from evenhand.mechanism.make_plan import Plan

CLASSES = 3
"""Owner classes whose spend is shown one by one; of more the cheapest and the dearest."""
EVERY_SECONDS = 0.25
"""A notebook is redrawn at most this often."""


class Progress:
    """A context manager around the loop. The loss it shows is not private: it stays on the trainer's screen.

    No epsilon holds for a stop that is decided by looking at that loss.
    """

    def __init__(self, plan: Plan, position: int, *, enabled: bool | None) -> None:
        self._on = shows_progress(enabled) or (enabled is None and in_notebook())
        self._plan, self._position = plan, position
        self._bar: Bar | None = None
        self._curves: dict[int, list[tuple[int, float]]] = {}

    def __enter__(self) -> Progress:
        if self._on:
            count = len(self._plan.rates) if len(self._plan.rates) <= CLASSES else 2
            shown = chosen_few(self._plan.epsilons, count) if self._differ else [0]
            self._curves = {owner: self._plan.spending(owner) for owner in shown if self._plan.certified}
            kind = NotebookBar if in_notebook() else TerminalBar
            with contextlib.suppress(OSError):
                self._bar = kind(self._plan.steps, self._position)
        return self

    def __exit__(self, *exc: object) -> None:
        self._draw(lambda bar: bar.stop())

    def started(self, lost: int) -> None:
        """Say how many charged steps a crash has lost, if any."""
        if lost:
            say(
                f"{lost} step(s) were charged but are not in the checkpoint; training goes on with the "
                f"{self._plan.steps - self._position} that remain."
            )

    def step(self, position: int, losses: Tensor) -> None:
        """Show one more step."""
        if self._bar is not None:
            loss = f"loss {losses.mean().item():.3f}" if losses.numel() else "empty batch"
            words = plain(f"{self._spent(position)}  {loss}")
            self._draw(lambda bar: bar.update(position, words))

    def _draw(self, action: Callable[[Bar], None]) -> None:
        """Draw if there is a bar; when the terminal is gone, training goes on without it."""
        if self._bar is not None:
            try:
                action(self._bar)
            except OSError:
                self._bar = None

    def _spent(self, position: int) -> str:
        """Return the epsilon charged so far, in words."""
        if not self._curves:
            return "not private"
        parts = [self._of(owner, position, self._differ) for owner in self._curves]
        if self._differ and len(self._plan.rates) > len(parts):
            return f"epsilon {' to '.join(parts)} ({len(self._plan.rates)} owners)"
        return f"epsilon {', '.join(parts)}"

    @property
    def _differ(self) -> bool:
        """Return whether owner classes differ in budget, rate or bound."""
        return len(set(zip(self._plan.rates, self._plan.scales, self._plan.budgets, strict=True))) > 1

    def _of(self, owner: int, position: int, named: bool) -> str:
        """Return what one owner class has spent, and of how much."""
        curve, budget = self._curves[owner], self._plan.budgets[owner]
        planned = promised(budget, missing=rounded_up(curve[-1][1]))
        index = min(bisect.bisect_left(curve, (position, 0.0)), len(curve) - 1)
        name = f"{label(self._plan.facts.owner_names[owner], 16)} " if named else ""
        return f"{name}{rounded_up(curve[index][1])} of {planned}"


class Bar(Protocol):
    """A place where progress is drawn."""

    def __init__(self, total: int, done: int) -> None: ...

    def update(self, done: int, words: str) -> None:
        """Show so many steps, and these words."""

    def stop(self) -> None:
        """Draw for the last time."""


class TerminalBar:
    """A progress line on stderr, drawn by rich."""

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task("starting", total=total, completed=done)

    def update(self, done: int, words: str) -> None:
        """Show so many steps, and these words."""
        self._bar.update(self._task, completed=done, description=words)

    def stop(self) -> None:
        """Draw for the last time."""
        self._bar.stop()


class NotebookBar:
    """A progress line in a notebook: one plain-text output, updated in place. Rich would need ipywidgets for that."""

    def __init__(self, total: int, done: int) -> None:
        display: Any = importlib.import_module("IPython.display")
        self._total, self._first, self._done, self._words = total, done, done, "starting"
        self._began = self._drawn = time.monotonic()
        self._handle = display.display(self._picture(), raw=True, display_id=True)

    def update(self, done: int, words: str) -> None:
        """Show so many steps, and these words; not more often than every ``EVERY_SECONDS``."""
        self._done, self._words = done, words
        if time.monotonic() - self._drawn >= EVERY_SECONDS:
            self.stop()

    def stop(self) -> None:
        """Draw the present state."""
        self._drawn = time.monotonic()
        self._handle.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, str]:
        full = 30 * self._done // self._total
        run = self._done - self._first
        left = (time.monotonic() - self._began) / run * (self._total - self._done) if run else None
        clock = "" if left is None else f"  {int(left) // 60}:{int(left) % 60:02d} left"
        bar = "\u2588" * full + "\u2591" * (30 - full)
        return {"text/plain": f"step {self._done}/{self._total} {bar} {self._words}{clock}"}


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this process. Imports nothing: in a notebook IPython is loaded already.

    Examples:
      >>> in_notebook()
      False
    """
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def seconds(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], plan: Plan, data: Data, compute: Compute | None = None
) -> float:
    """Return the estimated seconds of all steps, from one pass over a batch of the expected size and one draw of noise.

    Nothing is updated, released or charged: gradients are thrown away, the noise comes from a key of its own, and
    buffers and random state are put back. The estimate depends on shapes, not on values of records.

    Examples:
      >>> import evenhand as eh
      >>> train, _ = eh.data.digits()
      >>> plan = eh.plan("dpsgd", eh.Privacy(3), data=train.facts, epochs=1)
      >>> seconds(nn.Linear(64, 10), nn.CrossEntropyLoss(reduction="none"), plan, train) > 0
      True
    """
    rows = torch.arange(min(len(data), max(1, round(plan.expected_batch))))
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    chosen = compute or Compute()
    engine = MicroBatches(model, loss, lean=chosen.lean, limit=chosen.micro_batch)

    def step() -> None:
        result = engine.run(*data.fetch(rows))
        result.weighted_sum(torch.ones_like(result.norm))
        Stream.fresh().normals("gradient", 0, count)

    with preserved(model), buffers_restored(model):
        step()
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * plan.steps


def words(duration: float) -> str:
    """Return a duration as people say it.

    Examples:
      >>> words(0.4), words(75), words(5400)
      ('about a second', 'about 75 seconds', 'about 90 minutes')
    """
    if duration < 1.5:
        return "about a second"
    if duration < 100:
        return f"about {duration:.0f} seconds"
    if duration < 6000:
        return f"about {duration / 60:.0f} minutes"
    return f"about {duration / 3600:.1f} hours"
