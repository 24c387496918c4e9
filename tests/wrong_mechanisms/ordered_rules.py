"""Ordered down-weighting (INO) got wrong: the tail anchored, scaled, rounded or ordered by something that moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenhand.methods.rules import BatchRule
from evenhand.types import State, Stats
from wrong_mechanisms.base import Wrong, wrong_rule


@dataclass(frozen=True)
class Tail(BatchRule):
    """A linear tail over the lowest losses, counted from the lowest: right, and the start of the wrong ones."""

    name = "tail"
    share: float = 0.5

    def weights(self, stats: Stats, state: State) -> Tensor:
        """Clip times the mean importance over the record's stretch of clip mass."""
        length = self.share * float((torch.as_tensor(state.public.expected) * state.bound).sum())
        places = sorted(range(stats.norm.numel()), key=lambda i: self.key(stats, i))
        mass = state.bound[stats.owner]
        total, at, found = float(mass.sum()), 0.0, torch.zeros_like(stats.norm)
        for i in places:
            end = at + float(mass[i])
            found[i] = (self.integral(end, length, total) - self.integral(at, length, total)) / (end - at)
            at = end
        return found * (mass / stats.norm).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """The bound of each class."""
        return state.bound

    def key(self, stats: Stats, i: int) -> tuple[float, float]:
        """By loss, ties by record id."""
        return float(stats.loss[i]), float(stats.record[i])

    def integral(self, y: float, length: float, total: float) -> float:
        """Of the importance min(1, y / length) up to mass y."""
        return y * y / (2 * length) if y < length else y - length / 2


class Reanchored(Tail):
    """A batch with less mass than the tail starts the tail at its highest loss."""

    name = "reanchored"

    def integral(self, y: float, length: float, total: float) -> float:
        """Of 1 - (total - y) / length when the batch is short."""
        if total >= length:
            return super().integral(y, length, total)
        return y - total * y / length + y * y / (2 * length)


class Squeezed(Tail):
    """A batch with less mass than the tail squeezes the tail into what there is."""

    name = "squeezed"

    def integral(self, y: float, length: float, total: float) -> float:
        """With the shorter of tail and batch."""
        return super().integral(y, min(length, total), total)


class RealisedLength(Tail):
    """The tail is a share of the realised mass instead of a public length."""

    name = "realised_length"

    def integral(self, y: float, length: float, total: float) -> float:
        """With half of what was drawn."""
        return super().integral(y, self.share * total, total)


class OnGrid(Tail):
    """Rounds masses to a grid before it integrates, as published code does."""

    name = "on_grid"

    def integral(self, y: float, length: float, total: float) -> float:
        """At the nearest multiple of a quarter of the tail."""
        return super().integral(round(4 * y / length) * length / 4, length, total)


class FromTheTop(Tail):
    """Counts the tail from the highest loss down to a fixed number of records: keep the top, drop the rest."""

    name = "from_the_top"

    def integral(self, y: float, length: float, total: float) -> float:
        """All importance on the last stretch of mass."""
        return max(0.0, y - max(0.0, total - length))


class ByDeviation(Tail):
    """Orders by the distance from the batch's mean loss, so that one record reorders the others."""

    name = "by_deviation"

    def key(self, stats: Stats, i: int) -> tuple[float, float]:
        """|loss - mean|."""
        return abs(float(stats.loss[i] - stats.loss.mean())), float(stats.record[i])


class TiesByPlace(Tail):
    """Breaks ties by the place in the batch."""

    name = "ties_by_place"

    def key(self, stats: Stats, i: int) -> tuple[float, float]:
        """Loss, then place."""
        return float(stats.loss[i]), float(i)


class ByPlace(Tail):
    """Orders by the place in the batch, which is no property of a record."""

    name = "by_place"

    def key(self, stats: Stats, i: int) -> tuple[float, float]:
        """Place."""
        return float(i), 0.0


class ByNumber(Tail):
    """Orders by a digest of the record's number, which changes for all others when one record goes."""

    name = "by_number"

    def key(self, stats: Stats, i: int) -> tuple[float, float]:
        """A digest of the number."""
        return float(int(stats.record[i]) * 2654435761 % 2**32), float(stats.record[i])


MEMBERS: tuple[Wrong, ...] = (
    *(
        wrong_rule(rule, "sensitivity")
        for rule in (Reanchored(), Squeezed(), RealisedLength(), OnGrid(), FromTheTop(), ByDeviation())
    ),
    wrong_rule(TiesByPlace(), "order"),
    wrong_rule(ByPlace(), "order"),
    wrong_rule(ByNumber(), "order"),
)
"""Wrong ordered rules."""
