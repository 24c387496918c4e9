"""Build training methods: rules, side queries, schedules, and the catalogue of published combinations."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "BatchRule": "rules",
    "Count": "queries",
    "Method": "composition",
    "Query": "queries",
    "Rule": "rules",
    "SampleRule": "rules",
    "Schedule": "schedules",
    "method": "catalogue",
    "register": "registry",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a name on first use: schedules serve commands that must not import torch, which rules need."""
    if name not in _HOMES:
        raise AttributeError(f"module 'evenhand.methods' has no attribute {name!r}")
    return getattr(importlib.import_module(f"evenhand.methods.{_HOMES[name]}"), name)
