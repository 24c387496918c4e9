"""Released values in MLflow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from evenhand.errors import UsageError


class MlflowLogger:
    """Logs released values as metrics of the active MLflow run, or of a new one.

    Where that run is kept is MLflow's own setting (``MLFLOW_TRACKING_URI``); a tracking server on another machine means
    that these values, and nothing else, leave this one. ``pip install evenhand[mlflow]``.
    """

    def __init__(self) -> None:
        try:
            self._mlflow: Any = importlib.import_module("mlflow")
        except ImportError:
            raise UsageError("MLflow is not installed: pip install 'evenhand[mlflow]'. Nothing was spent.") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One metric per value."""
        self._mlflow.log_metrics(dict(values), step=step)
