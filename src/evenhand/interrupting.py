"""Ctrl-C, SIGTERM, a closed terminal: a block of charged steps is finished before training stops, so none is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal after a checkpoint; ``number`` is the signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def stopping() -> list[signal.Signals]:
    """Return the signals that stop a run; SIGHUP is not one of them where it is ignored, as under ``nohup``.

    Examples:
      >>> signal.SIGTERM in stopping()
      True
    """
    hangup: list[signal.Signals] = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
    heard = [number for number in hangup if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *heard]


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect the signals that stop a run: a block of charged steps is finished first, a second one stops at once."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with _handled(note):
        yield received


@contextmanager
def stopped_at_once(advice: Callable[[], str]) -> Iterator[None]:
    """Raise `Interrupted` as soon as a signal asks to stop: for work without blocks of steps to finish.

    ``advice`` gives the words on how to go on. In other threads than the main one no signal arrives.

    Examples:
      >>> try:
      ...     with stopped_at_once(lambda: "Type it again."): signal.raise_signal(signal.SIGTERM)
      ... except Interrupted as stop: print(stop, stop.number == signal.SIGTERM)
      Type it again. True
    """

    def stop(number: int, _frame: Any) -> None:
        raise Interrupted(number, advice())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(stop):
        yield


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let ``handler`` answer the signals that stop a run."""
    before = {number: signal.signal(number, handler) for number in stopping()}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
