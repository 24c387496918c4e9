"""Norms and sums in full precision, also where the user's forward runs under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

_TYPES = ("cpu", "cuda")


def lowered() -> bool:
    """Whether autocast is on, so that products come out in fewer digits.

    >>> with torch.autocast("cpu", torch.bfloat16): lowered()
    True
    """
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def full() -> AbstractContextManager[None]:
    """Inside, autocast is off: a sum rounded to bf16 could change by far more than the bound for one record.

    >>> with torch.autocast("cpu", torch.bfloat16), full(): (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    return _off() if lowered() else nullcontext()


class plain:  # noqa: N801 - used like a function; a class is quicker than a generator
    """Inside, there is neither autograd nor autocast.

    >>> with torch.autocast("cpu", torch.bfloat16), plain(): torch.is_grad_enabled(), lowered()
    (False, False)
    """

    def __enter__(self) -> None:
        self._grad, self._autocast = torch.is_grad_enabled(), full() if lowered() else None
        torch._C._set_grad_enabled(False)
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._autocast is not None:
            self._autocast.__exit__(*exc)


def highest() -> AbstractContextManager[None]:
    """Inside, products of float32 matrices keep all digits, whatever ``set_float32_matmul_precision`` was told.

    >>> torch.set_float32_matmul_precision("medium")
    >>> with highest(): torch.get_float32_matmul_precision()
    'highest'
    >>> torch.get_float32_matmul_precision(); torch.set_float32_matmul_precision("highest")
    'medium'
    """
    return nullcontext() if torch.get_float32_matmul_precision() == "highest" else _highest()


@contextmanager
def _highest() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
