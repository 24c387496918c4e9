"""Experiments that write one line of JSON per run, so that several commands can share the work and none is repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seed_intervals import over_seeds

Row = dict[str, Any]


def read(lines: Path) -> list[Row]:
    """The runs that are written down."""
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def once(lines: Path, key: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]) -> None:
    """Run what has no line with this key yet, and write its line down."""
    if any(key.items() <= row.items() for row in read(lines)):
        return
    line = json.dumps({**key, **run()})
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def said(values: Sequence[float]) -> str:
    """Mean with a 95 % t-interval over seeds.

    >>> said([1.0]), said([1.0, 1.0])
    ('1.00 (one seed)', '1.00 (1.00 to 1.00)')
    """
    found = over_seeds(values)
    return f"{found.value:.2f} ({'one seed' if found.count < 2 else f'{found.low:.2f} to {found.high:.2f}'})"
