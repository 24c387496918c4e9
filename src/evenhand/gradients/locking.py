"""One pass at a time per module: passes replace forwards and swap parameters on the modules they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from evenhand.gradients.structure import Modules

_condition = threading.Condition()
_held: dict[int, list[set[int]]] = {}


@contextmanager
def exclusive(modules: Modules) -> Iterator[None]:
    """Wait until no other thread is in a pass over any of these modules, and keep others out meanwhile.

    Stronger than a lock per model: two models may share a layer. The same thread may enter again. Plain calls of the
    model are not kept out: they are safe beside a pass by kernels, but not beside one that swaps parameters (fallback).

    >>> import torch
    >>> with exclusive([("", torch.nn.Linear(1, 1))]): "alone"
    'alone'
    """
    mine, thread = {id(module) for _, module in modules}, threading.get_ident()

    def free() -> bool:
        return all(mine.isdisjoint(held) for other, stack in _held.items() if other != thread for held in stack)

    with _condition:
        _condition.wait_for(free)
        _held.setdefault(thread, []).append(mine)
    try:
        yield
    finally:
        with _condition:
            _held[thread].pop()
            if not _held[thread]:
                del _held[thread]
            _condition.notify_all()
