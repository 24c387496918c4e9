"""The conformance kit: checks that every rule and query must pass, ours or a user's.

Falsification is not proof: a mechanism that passes was not caught, and a batch rule still needs its proof.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "check": "evenhand.testing.conformance",
    "assert_conforms": "evenhand.testing.conformance",
    "CHECKS": "evenhand.testing.conformance",
    "Finding": "evenhand.testing.conformance",
    "Findings": "evenhand.testing.conformance",
    "Subject": "evenhand.testing.subjects",
    "registered": "evenhand.testing.subjects",
    "ReferenceStep": "evenhand.testing.reference_step",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import on first use: pytest loads the plugin beside this file in every session, and that must cost nothing."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'evenhand.testing' has no attribute {name!r}")
