"""Noise, the ledger and the statement; also the public names of ``evenhand.accounting``, as ``eh.privacy``."""

from __future__ import annotations

from typing import Any

from evenhand import accounting


def __getattr__(name: str) -> Any:
    """Give the public names of the accountant, which are imported on first use."""
    if name in accounting.__all__:
        return getattr(accounting, name)
    raise AttributeError(f"module 'evenhand.privacy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *accounting.__all__])
