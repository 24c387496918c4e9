"""Events to epsilon and back, and the frozen Plan. Nothing here imports torch."""

from __future__ import annotations

import importlib
from typing import Any

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

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import public names on first use: promises need neither numpy nor scipy."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"evenhand.accounting.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'evenhand.accounting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
