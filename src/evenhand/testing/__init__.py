"""The conformance kit: checks that every rule and query must pass, ours or a user's.

Falsification is not proof: a mechanism that passes was not caught, and a batch rule still needs its proof.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenhand.testing.conformance import CHECKS, Finding, Findings, assert_conforms, check
    from evenhand.testing.reference_step import ReferenceStep
    from evenhand.testing.subjects import Subject, registered

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
__all__ = [
    "CHECKS",
    "Finding",
    "Findings",
    "ReferenceStep",
    "Subject",
    "assert_conforms",
    "check",
    "registered",
]

if not TYPE_CHECKING:  # type checkers see the imports above

    def __getattr__(name: str) -> Any:
        """Import on first use: pytest loads the plugin beside this file in every session, which must cost nothing."""
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module 'evenhand.testing' has no attribute {name!r}")
