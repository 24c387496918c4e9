"""Events to epsilon and back, and the frozen Plan. Nothing here imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenhand.accounting.accountant import (
        Composition,
        compose,
        curve,
        delta,
        dp_event,
        epsilon,
        merged_noise,
    )
    from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy
    from evenhand.accounting.calibration import calibrate, owner_bounds, owner_rates
    from evenhand.accounting.many_owners import owner_epsilons
    from evenhand.accounting.plan import Plan

_PUBLIC = {
    "Budgets": "budgets",
    "Composition": "accountant",
    "FixedNoise": "budgets",
    "Plan": "plan",
    "Privacy": "budgets",
    "calibrate": "calibration",
    "compose": "accountant",
    "curve": "accountant",
    "delta": "accountant",
    "dp_event": "accountant",
    "epsilon": "accountant",
    "merged_noise": "accountant",
    "owner_bounds": "calibration",
    "owner_epsilons": "many_owners",
    "owner_rates": "calibration",
}

__all__ = [
    "Budgets",
    "Composition",
    "FixedNoise",
    "Plan",
    "Privacy",
    "calibrate",
    "compose",
    "curve",
    "delta",
    "dp_event",
    "epsilon",
    "merged_noise",
    "owner_bounds",
    "owner_epsilons",
    "owner_rates",
]

if not TYPE_CHECKING:  # type checkers see the imports above

    def __getattr__(name: str) -> Any:
        """Import public names on first use: promises need neither numpy nor scipy."""
        if name in _PUBLIC:
            return getattr(importlib.import_module(f"evenhand.accounting.{_PUBLIC[name]}"), name)
        raise AttributeError(f"module 'evenhand.accounting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
