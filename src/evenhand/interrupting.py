"""Ctrl-C and SIGTERM: a block of charged steps is finished before training stops, so nothing charged is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal after a checkpoint; ``number`` is the signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that a block of charged steps is finished first; a second one stops at once."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
