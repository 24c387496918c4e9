"""Named datasets, one file each; ``load`` finds them by name."""

from __future__ import annotations

from collections.abc import Callable

from evenhand import _validate
from evenhand.data import files
from evenhand.data.digits import digits
from evenhand.data.wrapping import Data

_SOURCES: dict[str, Callable[[], tuple[Data, Data | None]]] = {"digits": digits}


def is_source(name: str) -> bool:
    """Whether ``name`` is a built-in source; a file of your own has a suffix, a path, or exists.

    Examples:
      >>> is_source("digits"), is_source("digit"), is_source("people.csv")
      (True, True, False)
    """
    return name in _SOURCES or not files.is_path(name)


def load(name: str) -> tuple[Data, Data | None]:
    """Training and held-out data of the source called ``name``."""
    return _SOURCES[_validate.known(name, _SOURCES, "data source")]()
