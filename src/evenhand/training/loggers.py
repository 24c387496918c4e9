"""Loggers, which are given released values only: held-out accuracy and epsilon."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenhand.errors import UsageError
from evenhand.terminal import say

_OTHER = re.compile(r"[^A-Za-z0-9_ -]")


@runtime_checkable
class Logger(Protocol):
    """Anything with ``log``. It is called at each evaluation on held-out data, and never with a training value.

    Examples:
      >>> class Printer:
      ...     def log(self, step, values):
      ...         print(step, values["accuracy"])
      >>> isinstance(Printer(), Logger)
      True
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record these values after ``step`` steps."""


def collect_released(evaluation: Mapping[str, Any], epsilon: float | None, charged: float | None) -> dict[str, float]:
    """Collect the values of one evaluation: accuracy, accuracy per group, and epsilon if one is established.

    Names are ``accuracy``, ``accuracy/<group>``, ``epsilon`` (of the whole plan: the promise, whichever step is chosen
    by looking at these values) and ``epsilon_charged`` (so far: no promise). All else in ``evaluation`` is left out.

    Examples:
      >>> collect_released({"accuracy": 0.75, "groups": {"a": 1.0, "b": 0.5}, "loss": 3.0}, 3.0, 1.5)
      {'accuracy': 0.75, 'accuracy/a': 1.0, 'accuracy/b': 0.5, 'epsilon': 3.0, 'epsilon_charged': 1.5}
    """
    values = {"accuracy": evaluation["accuracy"]}
    values |= {f"accuracy/{plain(name)}": value for name, value in evaluation["groups"].items()}
    values |= {"epsilon": epsilon, "epsilon_charged": charged}
    return {name: float(value) for name, value in values.items() if value is not None}


def plain(name: str, limit: int = 80) -> str:
    """Return a name that every logger accepts; a changed name ends in a hash, so that no two become equal.

    Examples:
      >>> plain("class 8"), plain("../a"), plain("<a>") != plain("[a]")
      ('class 8', '___a-61b4c98b', True)
    """
    changed = _OTHER.sub("_", name)[:limit]
    if changed == name and name.strip():
        return name
    return f"{changed}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


class Broadcast:
    """Several loggers as one. A logger that fails is switched off: it must not stop a run that has spent already."""

    def __init__(self, loggers: Sequence[Logger], *, evaluates: bool) -> None:
        for logger in loggers:
            if not isinstance(logger, Logger):
                raise UsageError(f"A logger needs a method log(step, values); {type(logger).__name__} has none.")
        if loggers and not evaluates:
            raise UsageError("Loggers are given released values on held-out data only: pass test= as well.")
        self._loggers = list(loggers)

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give the values to every logger that still works."""
        for logger in tuple(self._loggers):
            try:
                logger.log(step, dict(values))
            except Exception as error:
                self._loggers.remove(logger)
                say(f"{type(logger).__name__} failed ({type(error).__name__}) and is switched off; training goes on.")


class MlflowLogger:
    """A logger of released values as metrics of the active MLflow run, or of a new one.

    Where that run is stored is MLflow's own setting (``MLFLOW_TRACKING_URI``). To a tracking server on another machine
    these values are sent, and nothing else. ``pip install evenhand[mlflow]``.
    """

    def __init__(self) -> None:
        try:
            self._mlflow: Any = importlib.import_module("mlflow")
        except ImportError:
            raise UsageError("MLflow is not installed: pip install 'evenhand[mlflow]'. Nothing was spent.") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one metric per value."""
        self._mlflow.log_metrics(dict(values), step=step)


class TensorBoardLogger:
    """A logger of released values as scalars; look at them with ``tensorboard --logdir FOLDER``.

    The names of its files contain the name of this computer. ``pip install evenhand[tensorboard]``.

    Args:
      folder: where to write; made with the first values.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed: pip install 'evenhand[tensorboard]'. Nothing was spent."
            ) from None
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point per value; all are on disk when this returns."""
        if self._writer is None:
            self._writer = self._make(log_dir=str(self._folder))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
