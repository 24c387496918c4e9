"""Compiled libraries of the package, if the installation could build them (``hatch_build.py``).

Everything works without them, more slowly. Each is compared with Python when it is loaded: a compiler or a processor
that computes something else must cost time, never privacy.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_ADDRESS = 8
"""Bytes of an address, as the libraries are told them."""
_FOLDER = Path(__file__).parent
Functions = TypeVar("Functions")


class NativeLibrary(Generic[Functions]):
    """A compiled library of this package. Whoever uses one decides once: ``functools.cache(NativeLibrary(...).load)``.

    Args:
      file: name of the library in the package's folder.
      functions: gives the library's functions their types; `AttributeError` if one is missing.
      agrees: whether these functions compute what Python computes.

    Examples:
      >>> NativeLibrary("_none.so", lambda library: library, lambda library: True).load() is None
      True
    """

    def __init__(
        self, file: str, functions: Callable[[ctypes.CDLL], Functions], agrees: Callable[[Functions], bool]
    ) -> None:
        self._file, self._functions, self._agrees = file, functions, agrees

    def load(self, folder: Path = _FOLDER) -> Functions | None:
        """Load and compare; return the functions, or None if they are missing or compute something else."""
        if ctypes.sizeof(ctypes.c_void_p) != _ADDRESS:
            return None
        try:
            functions = self._functions(ctypes.CDLL(str(folder / self._file)))
        except (OSError, AttributeError):
            return None
        return functions if self._agrees(functions) else None


@functools.cache
def team() -> int | None:
    """Return the address of GOMP_parallel in torch's own libgomp, or None if torch was not built with libgomp.

    It runs a function in the threads that torch has anyway. Threads of our own would wait for theirs, which do not
    sleep between two operations.
    """
    torch = importlib.util.find_spec("torch")
    inside = Path(torch.origin).parent if torch is not None and torch.origin else _FOLDER
    name = next((inside / "lib").glob("libgomp*"), None)
    try:
        return None if name is None else ctypes.cast(ctypes.CDLL(str(name)).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
