"""Differentially private training that leaves no group behind."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenhand import accounting, data, density, errors, gradients, methods, models, reporting, sklearn, testing
    from evenhand import accounting as privacy
    from evenhand.accounting.accountant import epsilon
    from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy
    from evenhand.accounting.calibration import calibrate
    from evenhand.auditing.audit import audit
    from evenhand.comparison.in_python import compare
    from evenhand.mechanism.make_plan import Plan, plan
    from evenhand.methods import queries, rules, schedules
    from evenhand.methods.catalogue import Method, method
    from evenhand.methods.priors import Prior
    from evenhand.models import features
    from evenhand.runs.verify import verify
    from evenhand.training import augment as augmenting
    from evenhand.training import losses
    from evenhand.training import weight_average as averaging
    from evenhand.training.attach import attach
    from evenhand.training.fit import fit, resume
    from evenhand.training.goals.adjust import adjust, adjusted
    from evenhand.training.guards.model_guards import Compute
    from evenhand.training.rebudget import rebudget
    from evenhand.training.run import load
    from evenhand.training.steps.callbacks import Callback, EarlyStopping
    from evenhand.types import State, Stats

_PUBLIC = {
    "fit": "evenhand.training.fit",
    "resume": "evenhand.training.fit",
    "rebudget": "evenhand.training.rebudget",
    "attach": "evenhand.training.attach",
    "Callback": "evenhand.training.steps.callbacks",
    "EarlyStopping": "evenhand.training.steps.callbacks",
    "Compute": "evenhand.training.guards.model_guards",
    "load": "evenhand.training.run",
    "adjust": "evenhand.training.goals.adjust",
    "adjusted": "evenhand.training.goals.adjust",
    "Prior": "evenhand.methods.priors",
    "audit": "evenhand.auditing.audit",
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
    "sklearn": "evenhand.sklearn",
    "testing": "evenhand.testing",
}

__version__ = "0.1.0"
__all__ = [
    "Budgets",
    "Callback",
    "Compute",
    "EarlyStopping",
    "FixedNoise",
    "Method",
    "Plan",
    "Prior",
    "Privacy",
    "State",
    "Stats",
    "accounting",
    "adjust",
    "adjusted",
    "attach",
    "audit",
    "augmenting",
    "averaging",
    "calibrate",
    "compare",
    "data",
    "density",
    "epsilon",
    "errors",
    "features",
    "fit",
    "gradients",
    "load",
    "losses",
    "method",
    "methods",
    "models",
    "plan",
    "privacy",
    "queries",
    "rebudget",
    "reporting",
    "resume",
    "rules",
    "schedules",
    "sklearn",
    "testing",
    "verify",
]

if not TYPE_CHECKING:  # type checkers see the imports above, so that a wrong argument or name is an error

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
