"""The versions that a run and its statement name."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

PACKAGES = ("evenhand", "torch", "numpy", "scipy", "cryptography")


def software() -> dict[str, str]:
    """Return the versions of Python and of the packages that figures depend on.

    >>> list(software())[:3]
    ['python', 'evenhand', 'torch']
    """
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


@cache
def _version(name: str) -> str:
    """Return a package's version, read once: that takes half a megabyte and some milliseconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
