"""How many files a reader passes through, by use: what is reached stays reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CEILINGS = {
    "private.step of nn.Linear": 38,
    "private.step of a CNN": 39,
    "private.step of an LSTM": 42,
    "evenhand train on a CSV": 131,
    "evenhand verify": 26,
    "evenhand epsilon": 14,
}
"""Measured; a walk that becomes shorter lowers its ceiling."""


def test_no_walk_becomes_longer() -> None:
    command = [sys.executable, str(Path(__file__).with_name("walks.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lengths = {name: int(rest.split()[0]) for name, rest in (line.split(": ") for line in done.stdout.splitlines())}
    assert lengths.keys() == CEILINGS.keys()
    assert {name: length for name, length in lengths.items() if length > CEILINGS[name]} == {}
