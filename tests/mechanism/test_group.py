"""Exchanges between processes: once one is over, no thread of gloo holds what was exchanged."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from evenhand.mechanism.processes import group as processes
from evenhand.mechanism.processes.group import Group
from training import ranks

EXCHANGES = 200


def test_an_exchange_that_is_over_is_held_by_nobody_else(tmp_path: Path) -> None:
    """Without the wait about one exchange in five is still held, and may abort a process that ends."""
    started = ranks.launched(2, tmp_path, exchange)
    for code, said in ranks.ended(started):
        assert code == 0, said


def exchange(rank: int) -> None:
    """Exchange numbers in every way and look who holds them afterwards."""
    exchanged: list[Tensor] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(first: Any, *further: Any, **options: Any) -> Any:
            exchanged.extend([first] if isinstance(first, Tensor) else first)
            exchanged.extend(part for part in further if isinstance(part, Tensor))
            for tensors in (part for part in further if isinstance(part, list)):
                exchanged.extend(tensors)
            return call(first, *further, **options)

        return inner

    for name in ("all_gather", "broadcast", "gather"):
        setattr(distributed, name, watched(getattr(distributed, name)))
    group = Group.of_this_process()
    for number in range(EXCHANGES):
        assert group.all_of(number, rank) == [[number, 0], [number, 1]]
        group.broadcast(torch.full((3,), float(number)), number % 2)
        group.gather(torch.ones(5))
        assert [tensor._use_count() for tensor in exchanged] == [1] * len(exchanged)  # type: ignore[attr-defined]
        exchanged.clear()


def test_a_tensor_that_is_not_let_go_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_RELEASE", timedelta(seconds=0.05))
    free, held = torch.ones(3), torch.ones(3, requires_grad=True)
    graph = held * held  # whose node saves what it multiplied
    before, began = (sys.getrefcount(free), sys.getrefcount(held)), time.monotonic()
    processes.await_release(free, held)
    assert 0.04 < time.monotonic() - began < 5
    assert (sys.getrefcount(free), sys.getrefcount(held)) == (before[0], before[1] + 1)
    del graph
