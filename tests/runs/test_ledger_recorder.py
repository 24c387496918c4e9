"""How many steps are charged at once."""

from __future__ import annotations

import pytest

from evenhand.runs.recorder import Recorder
from evenhand.types import Commit


class Reserved(list[int]):
    """A ledger that only notes how many steps it was asked to charge."""

    steps = 10**6

    def reserve(self, count: int) -> None:
        self.append(count)


def charged(times: list[float], remaining: int = 10**6) -> int:
    ledger = Reserved()
    recorder = Recorder(ledger)  # type: ignore[arg-type]
    for seconds in times:
        recorder.charge(remaining)
        recorder.add(Commit(len(ledger), 1, (1.0,), 1.0, ()), seconds)
    assert ledger == [1] * len(times), "one at a time until the pace is known"
    recorder.charge(remaining)
    return ledger[-1]


def test_blocks_follow_a_usual_step() -> None:
    """Steps 1, 2 and 4 hold comparisons with autograd: blocks by their pace would be many, each put on disk."""
    assert charged([0.4, 0.05, 0.0096, 0.05, 0.0096, 0.0096, 0.0096]) == 32
    assert charged([0.4, 0.05, 0.0096, 0.05, 0.0001, 0.0096, 0.0096]) == 32, "one quick batch does not show"
    assert charged([9.0, 3.0, 0.5, 2.0, 0.5, 0.5, 0.5]) == 1
    assert charged([0.4, 0.05, 0.0096, 0.05, 0.0096, 0.0096, 0.0096], remaining=7) == 7


def test_a_block_is_at_most_a_twentieth_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a crash loses, a block and the steps since a checkpoint, is at most a tenth."""
    for steps, block in ((101, 4), (640, 32), (19, 1)):
        monkeypatch.setattr(Reserved, "steps", steps)
        assert charged([0.001] * 7) == block
