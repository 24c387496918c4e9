"""Callbacks of ``fit``: given released values only, and able to stop a run without weakening what it promises.

A stop that is decided by released values is a part of what the whole plan may do, so the statement says the epsilon of
the whole plan, however early the stop. It says less only where a person declares that the stop did not depend on the
data (``evenhand statement RUN --stopped-independently``), which a stop by a held-out metric does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from evenhand import _validate
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.terminal import say

if TYPE_CHECKING:
    from evenhand.training.run import Run

Stop: TypeAlias = Callable[[int, Mapping[str, float]], bool]
"""Given the number of steps and the values of an evaluation, say whether to stop."""
WORST = "worst group"


class Callback:
    """Hooks of ``fit``: override any. They see released values and never a loss or a gradient of a training record.

    ``on_start`` may raise: nothing is spent then. A callback whose later hooks raise is switched off, with a message,
    as it must not stop a run that has spent already.
    """

    def on_start(self, plan: Plan) -> None:
        """Look at the plan, before anything is charged."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> bool | None:
        """Look at the held-out metrics after ``step`` steps: the values of loggers and every metric; True stops."""

    def on_end(self, run: Run) -> None:
        """Look at the finished run: model, statement, evaluations."""


class EarlyStopping:
    """Stop when a held-out metric has not improved for some evaluations; for ``fit(stop=...)``.

    The statement says the epsilon of the whole plan nevertheless, since the stop depends on the data. The steps that
    remain are not charged, and ``resume`` can still take them; what was waited for then begins anew.

    Args:
      metric: a name of the values that callbacks get ("accuracy", "accuracy/<group>", "log_loss" ...) or "worst group".
      patience: evaluations without an improvement after which training stops.
      least: by how much a value must be better to count.
      largest: whether large values are good.

    Examples:
      >>> stop = EarlyStopping(patience=1)
      >>> [stop(step, {"accuracy": value}) for step, value in ((1, 0.5), (2, 0.6), (3, 0.6))]
      [False, False, True]
    """

    def __init__(
        self, metric: str = "accuracy", *, patience: int = 3, least: float = 0.0, largest: bool = True
    ) -> None:
        self.metric, self.patience = metric, _validate.whole(patience, "patience")
        self.least, self.largest = least, largest
        self._best: float | None = None
        self._waited = 0

    def __call__(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether to stop after these values."""
        value = self._value(values) * (1 if self.largest else -1)
        better = self._best is None or value > self._best + self.least
        self._best, self._waited = (value, 0) if better else (self._best, self._waited + 1)
        return self._waited >= self.patience

    def _value(self, values: Mapping[str, float]) -> float:
        groups = [value for name, value in values.items() if name.startswith("accuracy/")]
        if self.metric == WORST and groups:
            return min(groups)
        if self.metric not in values:
            raise UsageError(f"there is no metric {self.metric!r}; there are {', '.join([*values, WORST])}")
        return values[self.metric]


class Callbacks:
    """Several callbacks and a stop as one; ``stopped`` is set once one of them has asked to stop."""

    def __init__(self, callbacks: Sequence[Callback], stop: Stop | None, *, evaluates: bool) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(
                    f"A callback is an object of a class made from evenhand.Callback; {type(callback).__name__} is "
                    "none. For a function of the held-out metrics use stop=."
                )
        if stop is not None and not callable(stop):
            raise UsageError("stop= takes evenhand.EarlyStopping(...), or a function stop(step, values).")
        if stop is not None and not evaluates:
            raise UsageError("A stop is decided by released values on held-out data only: pass test= as well.")
        self._callbacks, self._stop, self._evaluates = list(callbacks), stop, evaluates
        self.stopped = False

    def __bool__(self) -> bool:
        """Return whether somebody waits for evaluations; nobody is given those on training records."""
        return self._evaluates and (bool(self._callbacks) or self._stop is not None)

    def start(self, plan: Plan) -> None:
        """Call ``on_start``; what it raises ends the run before anything is spent."""
        for callback in self._callbacks:
            callback.on_start(plan)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Give the values of an evaluation to all, and note whether one asks to stop."""
        for callback in tuple(self._callbacks):
            try:
                self.stopped = callback.on_evaluation(step, dict(values)) is True or self.stopped
            except Exception as error:
                self._callbacks.remove(callback)
                _tell(callback, error)
        if self._stop is not None:
            try:
                self.stopped = bool(self._stop(step, dict(values))) or self.stopped
            except Exception as error:
                _tell(self._stop, error)
                self._stop = None

    def end(self, run: Run) -> None:
        """Call ``on_end``; the run is finished whatever it raises."""
        for callback in self._callbacks:
            try:
                callback.on_end(run)
            except Exception as error:
                _tell(callback, error)


def _tell(failed: object, error: Exception) -> None:
    name = getattr(failed, "__name__", type(failed).__name__)
    reason = f": {error}" if isinstance(error, UsageError) else ""
    say(f"{name} failed ({type(error).__name__}{reason}) and is switched off; training goes on.")
