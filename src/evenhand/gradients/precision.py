"""Norms and sums in full precision, also where the user's forward runs under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

_TYPES = ("cpu", "cuda")


def lowered() -> bool:
    """Whether autocast is on, so that products come out in fewer digits.

    >>> with torch.autocast("cpu", torch.bfloat16): lowered()
    True
    """
    return any(torch.is_autocast_enabled(kind) for kind in _TYPES)


def full() -> AbstractContextManager[None]:
    """Inside, autocast is off: a sum rounded to bf16 could change by far more than the bound for one record.

    >>> with torch.autocast("cpu", torch.bfloat16), full(): (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    return _off() if lowered() else nullcontext()


@contextmanager
def _off() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in _TYPES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def now() -> Callable[[], AbstractContextManager[None]]:
    """The precision of this moment, to be entered again when something is computed a second time.

    >>> with torch.autocast("cpu", torch.bfloat16): then = now()
    >>> with then(): lowered()
    True
    """
    on = {kind: torch.get_autocast_dtype(kind) for kind in _TYPES if torch.is_autocast_enabled(kind)}

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in on.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield

    return again
