"""Named datasets, one file each; ``load`` finds them by name."""

from __future__ import annotations

from collections.abc import Callable

from evenhand import _validate
from evenhand.data.digits import digits
from evenhand.data.wrapping import Data

_SOURCES: dict[str, Callable[[], tuple[Data, Data | None]]] = {"digits": digits}


def load(name: str) -> tuple[Data, Data | None]:
    """Training and held-out data of the source called ``name``."""
    return _SOURCES[_validate.known(name, _SOURCES, "data source")]()
