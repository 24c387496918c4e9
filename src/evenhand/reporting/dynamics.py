"""What happens while training: the stretch in which a small group loses what the others gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Drop:
    """A group's initial drop, in epochs; ``recovered`` is False when it lasts until the last evaluation."""

    group: str
    start: float
    end: float
    depth: float
    recovered: bool

    @property
    def length(self) -> float:
        """How long the drop lasts, in epochs."""
        return self.end - self.start


def initial_drops(curves: Sequence[Mapping[str, Any]]) -> list[Drop]:
    """Groups that fall behind at the start of training, longest first.

    A group is in its initial drop from the first evaluation for as long as its accuracy stays below its own start (or
    at zero) while the overall accuracy is above its start. The drop ends at the first evaluation where that is over.
    Two evaluations in a row are needed: one alone may be chance.

    Args:
        curves: evaluations in order: {"epoch", "accuracy", "groups": {name: accuracy}}.

    Examples:
        >>> rows = [{"epoch": float(e), "accuracy": 0.1 + e / 9, "groups": {"a": e / 9, "b": b}}
        ...         for e, b in enumerate([0.2, 0.0, 0.1, 0.4, 0.6])]
        >>> [(drop.group, drop.start, drop.end, drop.recovered) for drop in initial_drops(rows)]
        [('b', 0.0, 3.0, True)]
    """
    if len(curves) < 3:
        return []
    found = [_drop(name, curves) for name in curves[0].get("groups", {})]
    return sorted((drop for drop in found if drop is not None), key=lambda drop: -drop.length)


def _drop(name: str, curves: Sequence[Mapping[str, Any]]) -> Drop | None:
    first = curves[0]
    start, overall = float(first["groups"][name]), float(first["accuracy"])
    below: list[Mapping[str, Any]] = []
    for row in curves[1:]:
        value = row.get("groups", {}).get(name)
        if value is None or not ((value < start or value == 0) and row["accuracy"] > overall):
            break
        below.append(row)
    if len(below) < 2:
        return None
    recovered = len(below) < len(curves) - 1
    end = curves[len(below) + 1] if recovered else curves[-1]
    depth = start - min(float(row["groups"][name]) for row in below)
    return Drop(name, float(first["epoch"]), float(end["epoch"]), depth, recovered)
