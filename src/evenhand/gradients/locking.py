"""One pass at a time per module: passes replace forwards and swap parameters on the modules they run."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_condition = threading.Condition(_lock)
_held: dict[int, list[frozenset[int]]] = {}
_waiting = 0


class exclusive:  # noqa: N801 - used like a function; a class is quicker than a generator
    """Wait until no other thread is in a pass over any of these modules (by ``id``), and keep others out meanwhile.

    Stronger than a lock per model: two models may share a layer. The same thread may enter again. Plain calls of the
    model are not kept out: they are safe beside a pass by kernels, but not beside one that swaps parameters (fallback).

    >>> import torch
    >>> with exclusive(frozenset([id(torch.nn.Linear(1, 1))])): "alone"
    'alone'
    """

    def __init__(self, mine: frozenset[int]):
        self._mine, self._thread = mine, threading.get_ident()

    def _free(self) -> bool:
        others = (stack for thread, stack in _held.items() if thread != self._thread)
        return all(self._mine.isdisjoint(held) for stack in others for held in stack)

    def __enter__(self) -> None:
        global _waiting
        with _lock:
            if len(_held) > (self._thread in _held):
                _waiting += 1
                _condition.wait_for(self._free)
                _waiting -= 1
            stack = _held.get(self._thread)
            if stack is None:
                _held[self._thread] = [self._mine]
            else:
                stack.append(self._mine)

    def __exit__(self, *exc: object) -> None:
        with _lock:
            stack = _held[self._thread]
            stack.pop()
            if not stack:
                del _held[self._thread]
            if _waiting:
                _condition.notify_all()
