"""How many files a reader passes through, by use: what is reached stays reached."""

from __future__ import annotations

import pytest
from walks import WALKS

CEILINGS = {
    "private.step of nn.Linear": 29,
    "private.step of a CNN": 32,
    "private.step of an LSTM": 35,
    "the last step of a block of nn.Linear": 34,
    "evenhand train on a CSV": 134,
    "evenhand verify": 28,
    "evenhand epsilon": 13,
}
"""Measured; a walk that becomes shorter lowers its ceiling."""


def test_every_walk_has_a_ceiling() -> None:
    assert WALKS.keys() == CEILINGS.keys()


@pytest.mark.parametrize("name", CEILINGS)
def test_no_walk_becomes_longer(name: str) -> None:
    files = WALKS[name]()
    assert len(files) <= CEILINGS[name], sorted(files)
