"""Hands released values to TrainerCallbacks, and collects them in the state that a Trainer's user reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.integrations.transformers.library import library


class Relay:
    """Calls TrainerCallbacks: at the start, after every evaluation, and at the end.

    They are given arguments, state, control and released values, never a model in training, a batch, a loss or a
    gradient of training records. Events of single steps are not sent.
    """

    def __init__(self, args: Any, callbacks: Sequence[Any]) -> None:
        transformers = library()
        self.args = args
        self.state, self.control = transformers.TrainerState(), transformers.TrainerControl()
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self._records = self._batch = 0.0

    def announce(self, records: int, batch: float, steps: int) -> None:
        """Note how long the training will be, and say that it begins."""
        self._records, self._batch = records, batch
        self.state.max_steps = steps
        self.send("on_train_begin")

    def asks_to_stop(self, step: int, values: Mapping[str, float]) -> bool:
        """Pass on the values of one evaluation, and return whether a callback asks to stop after it.

        The arguments are those of ``fit(stop=...)``; the plan's epsilon holds wherever training stops.
        """
        self.state.global_step, self.state.epoch = step, self.epoch(step)
        metrics = {name if name.startswith("epsilon") else _named(name): value for name, value in values.items()}
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": step})
        self.send("on_log", logs=dict(metrics))
        self.send("on_evaluate", metrics=dict(metrics))
        self._note_best(step, metrics)
        return bool(getattr(self.control, "should_training_stop", False))

    def _note_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the best value so far of ``metric_for_best_model``, once callbacks have compared with the one before."""
        name = getattr(self.args, "metric_for_best_model", None)
        value = None if name is None else metrics.get(_named(name.removeprefix("eval_")))
        if value is None:
            return
        sign = 1 if getattr(self.args, "greater_is_better", None) else -1
        best = self.state.best_metric
        if best is None or sign * value > sign * best:
            self.state.best_metric, self.state.best_global_step = value, step

    def conclude(self, evaluations: Sequence[Mapping[str, Any]], values: Mapping[str, Any], steps: int) -> None:
        """Fill the history with what the run recorded, add its last values, and say that training has ended."""
        self.state.global_step, self.state.epoch = steps, self.epoch(steps)
        told = {row["step"]: row for row in self.state.log_history}
        self.state.log_history = [
            {**told.get(row["step"], {}), **as_metrics(row), "epoch": row["epoch"], "step": row["step"]}
            for row in evaluations
        ]
        self.state.log_history.append({**values, "epoch": self.state.epoch, "step": steps})
        self.send("on_train_end")

    def epoch(self, step: int) -> float:
        """Return the expected passes over the data after so many steps."""
        return round(step * self._batch / self._records, 4) if self._records else 0.0

    def send(self, event: str, **values: Any) -> None:
        """Call one method of every callback that has it."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if callable(method):
                self.control = method(self.args, self.state, self.control, **values) or self.control


def _named(name: str) -> str:
    """Return a Trainer's name of a figure.

    Examples:
      >>> _named("log_loss"), _named("accuracy/a")
      ('eval_loss', 'eval_accuracy/a')
    """
    return "eval_loss" if name in ("log_loss", "loss") else f"eval_{name}"


def as_metrics(row: Mapping[str, Any], prefix: str = "eval") -> dict[str, float]:
    """Return the figures of an evaluation under a Trainer's names; what was not measured is left out.

    Examples:
      >>> as_metrics({"accuracy": 0.5, "log_loss": 0.7, "groups": {"a": 1.0, "b": None}})
      {'eval_loss': 0.7, 'eval_accuracy': 0.5, 'eval_accuracy/a': 1.0}
    """
    values = {"loss": row.get("log_loss"), "accuracy": row.get("accuracy")}
    values |= {f"accuracy/{name}": value for name, value in row.get("groups", {}).items()}
    values |= {name: value for name, value in row.get("metrics", {}).items() if name not in ("accuracy", "log_loss")}
    return {f"{prefix}_{name}": float(value) for name, value in values.items() if value is not None}
