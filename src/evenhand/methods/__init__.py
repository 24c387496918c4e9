"""Build training methods: rules, side queries, schedules, and the catalogue of published combinations."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenhand.methods.catalogue import method
    from evenhand.methods.composition import Method
    from evenhand.methods.queries import Count, Query
    from evenhand.methods.registry import register
    from evenhand.methods.rules import BatchRule, Rule, SampleRule
    from evenhand.methods.schedules import Schedule

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
__all__ = [
    "BatchRule",
    "Count",
    "Method",
    "Query",
    "Rule",
    "SampleRule",
    "Schedule",
    "method",
    "register",
]

if not TYPE_CHECKING:  # type checkers see the imports above

    def __getattr__(name: str) -> Any:
        """Import a name on first use: schedules serve commands that must not import torch, which rules need."""
        if name not in _HOMES:
            raise AttributeError(f"module 'evenhand.methods' has no attribute {name!r}")
        return getattr(importlib.import_module(f"evenhand.methods.{_HOMES[name]}"), name)
