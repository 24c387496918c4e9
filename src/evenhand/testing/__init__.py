"""The conformance kit: what every rule and query must pass, ours or a user's, and a zoo of wrong ones it must reject.

Falsification is not proof: a mechanism that passes was not caught, and a batch rule still needs its proof.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "check": "evenhand.testing.kit",
    "assert_conforms": "evenhand.testing.kit",
    "CHECKS": "evenhand.testing.kit",
    "Finding": "evenhand.testing.findings",
    "Findings": "evenhand.testing.findings",
    "Subject": "evenhand.testing.subjects",
    "registered": "evenhand.testing.subjects",
    "ReferenceStep": "evenhand.testing.reference",
    "Wrong": "evenhand.testing.wrongs",
    "ZOO": "evenhand.testing.zoo",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import on first use: pytest loads the plugin beside this file in every session, and that must cost nothing."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'evenhand.testing' has no attribute {name!r}")
