"""Differentially private training that leaves no group behind."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "fit": "evenhand.training.fit",
    "resume": "evenhand.training.fit",
    "rebudget": "evenhand.training.rebudget",
    "attach": "evenhand.training.attach",
    "Compute": "evenhand.training.guards.model_guards",
    "load": "evenhand.training.run",
    "adjust": "evenhand.training.goals.adjust",
    "adjusted": "evenhand.training.goals.adjust",
    "Prior": "evenhand.methods.priors",
    "compare": "evenhand.comparison.in_python",
    "plan": "evenhand.mechanism.make_plan",
    "Plan": "evenhand.mechanism.make_plan",
    "Method": "evenhand.methods.catalogue",
    "method": "evenhand.methods.catalogue",
    "Privacy": "evenhand.accounting.budgets",
    "Budgets": "evenhand.accounting.budgets",
    "FixedNoise": "evenhand.accounting.budgets",
    "epsilon": "evenhand.accounting.accountant",
    "calibrate": "evenhand.accounting.calibration",
    "verify": "evenhand.runs.verify",
    "Stats": "evenhand.types",
    "State": "evenhand.types",
}
_MODULES = {
    "accounting": "evenhand.accounting",
    "augmenting": "evenhand.training.augment",
    "averaging": "evenhand.training.weight_average",
    "data": "evenhand.data",
    "density": "evenhand.density",
    "errors": "evenhand.errors",
    "features": "evenhand.models.features",
    "gradients": "evenhand.gradients",
    "losses": "evenhand.training.losses",
    "methods": "evenhand.methods",
    "models": "evenhand.models",
    "privacy": "evenhand.accounting",
    "queries": "evenhand.methods.queries",
    "reporting": "evenhand.reporting",
    "rules": "evenhand.methods.rules",
    "schedules": "evenhand.methods.schedules",
    "testing": "evenhand.testing",
}

__version__ = "0.1.0"
__all__ = [*_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import evenhand`` costs nothing."""
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'evenhand' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
