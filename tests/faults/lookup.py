"""Find parts of evenhand by their own names, wherever they live: the campaign outlasts moves between modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def modules() -> Iterator[ModuleType]:
    """Yield the modules of evenhand that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "evenhand":
            yield module


def home(*names: str) -> ModuleType:
    """Return the one module in which the first of these names is defined and all of them are known.

    >>> import evenhand.errors
    >>> home("UsageError", "DataError").__name__
    'evenhand.errors'
    """
    found = [
        module for module in modules() if all(name in vars(module) for name in names) and _defines(module, names[0])
    ]
    if len(found) != 1:
        places = [module.__name__ for module in found]
        raise RuntimeError(f"{names} must be in one module of evenhand, and are in {places}: tell the campaign where.")
    return found[0]


def _defines(module: ModuleType, name: str) -> bool:
    return bool(getattr(vars(module)[name], "__module__", module.__name__) == module.__name__)


def defined(name: str) -> Any:
    """Return the one function or class of this name."""
    return vars(home(name))[name]
