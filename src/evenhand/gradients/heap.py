"""The C library's heap while a model trains: what a step frees serves the next one instead of going back to the system.

A step frees everything at its end. glibc then shrinks its heap, and gives back blocks above 32 MB in any case, so the
next step pays for every page again: a quarter of a gigabyte, and a tenth of the time, for a ResNet. Elsewhere than in
glibc nothing is done, nor where the environment says how memory is to be handled.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

_TRIM, _LARGE, _APART = -1, -3, -4
"""M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX of <malloc.h>: when the heap shrinks, which blocks are large, and
how many large blocks may be asked of the system apart from the heap."""
_USUAL = {_TRIM: 64 << 20, _LARGE: 32 << 20, _APART: 1 << 16}
"""What glibc comes to by itself in a process with large blocks."""
_KEEPING = {_TRIM: (1 << 31) - 1, _APART: 0}
_CHOSEN = tuple(f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD"))
_CHOSEN += ("GLIBC_TUNABLES",)
_lock = threading.RLock()
_holders = 0


@functools.cache
def _library() -> Any:
    """glibc, or None if this is none of ours to change."""
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _CHOSEN):
        return None
    library = ctypes.CDLL(None)
    wanted = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return library if all(hasattr(library, name) for name in wanted) else None


class Held:
    """Keeps freed memory in the process until `give_back`, or until ``owner`` is gone; the last one out gives it back.

    >>> class Training: pass
    >>> training = Training()
    >>> held = Held(training); held.give_back(); held.give_back()
    """

    def __init__(self, owner: object):
        _count(1)
        self._finish = weakref.finalize(owner, _count, -1)

    def give_back(self) -> None:
        """Let the memory go, if nobody else holds it. Safe to call twice."""
        self._finish()


def _forked() -> None:
    """Another thread may have held the lock when this process was made of its parent."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _count(change: int) -> None:
    global _holders
    library = _library()
    with _lock:
        before, _holders = _holders, _holders + change
        if library is None:
            return
        if not before:
            _set(library, _KEEPING)
        elif not _holders:
            _set(library, _USUAL)
            library.malloc_trim(0)


def _set(library: Any, values: Mapping[int, int]) -> None:
    for name, value in values.items():
        library.mallopt(name, value)
