"""Estimators of scikit-learn that train privately, preprocessing that learns nothing, and a search that is paid for.

``PrivateClassifier`` and ``PrivateRegressor`` stand at the end of a pipeline; ``make_private_pipeline`` refuses steps
before them that learn from private records; ``PrivateGridSearch`` shares one promise among all of its trainings.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "DeclaredEncoder": "declared",
    "DeclaredScaler": "declared",
    "PrivateClassifier": "classifier",
    "PrivateGridSearch": "search",
    "PrivatePipeline": "pipeline",
    "PrivateRegressor": "regressor",
    "TotalPrivacy": "total_privacy",
    "make_private_pipeline": "pipeline",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import public names on first use: torch and scikit-learn take seconds."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"evenhand.sklearn.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'evenhand.sklearn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
