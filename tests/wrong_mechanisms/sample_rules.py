"""Wrong sample rules and queries: they look at one record, and still claim too much, or look at more than they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evenhand.methods.queries import GroupCounts, Query
from evenhand.methods.rules import Clip, SampleRule
from evenhand.testing.subjects import Subject
from evenhand.types import Facts, State, Stats
from wrong_mechanisms.base import Wrong, wrong_rule


@dataclass(frozen=True)
class Unclipped(Clip):
    """Every gradient counts as it is, and the bound is declared all the same."""

    name = "never_clipped"

    def weight(self, row: Stats, state: State) -> Tensor:
        """1."""
        return torch.ones_like(row.norm)


@dataclass(frozen=True)
class SquaredNorm(Clip):
    """Divides by the squared norm, so that gradients between 1 and C grow."""

    name = "squared_norm"

    def weight(self, row: Stats, state: State) -> Tensor:
        """C / n^2, at most 1."""
        return (state.bound[row.owner] / row.norm.clamp(min=1e-6) ** 2).clamp(max=1e6)


@dataclass(frozen=True)
class Negative(Clip):
    """Lets large gradients count negatively."""

    name = "negative"

    def weight(self, row: Stats, state: State) -> Tensor:
        """1 - n / C, down to -C / n."""
        bound = state.bound[row.owner]
        return torch.maximum(1 - row.norm / bound, -bound / row.norm)


@dataclass(frozen=True)
class WithoutBound(Clip):
    """Clips to C and declares 1: the noise does not know C."""

    name = "without_bound"

    def sensitivity(self, state: State) -> Tensor:
        """1 for every class."""
        return torch.ones_like(state.bound)


@dataclass(frozen=True)
class StrictestClass(Clip):
    """Clips every owner to its own bound and declares the smallest for all."""

    name = "strictest_class"

    def sensitivity(self, state: State) -> Tensor:
        """The smallest bound."""
        return state.bound.min().expand_as(state.bound)


@dataclass(frozen=True)
class Normalised(Clip):
    """Normalises without a safeguard: a zero gradient gets an infinite weight."""

    name = "normalised"

    def weight(self, row: Stats, state: State) -> Tensor:
        """C / n."""
        return state.bound[row.owner] / row.norm


@dataclass(frozen=True)
class Endless(Clip):
    """Claims to be private with an infinite sensitivity."""

    name = "endless"

    def sensitivity(self, state: State) -> Tensor:
        """Infinite."""
        return torch.full_like(state.bound, float("inf"))


@dataclass(frozen=True)
class Coupled(Clip):
    """Drops everybody when one loss of the batch is large; alone it looks harmless."""

    name = "coupled"

    def weight(self, row: Stats, state: State) -> Tensor:
        """0 if the largest loss exceeds 1."""
        return (row.loss.max() <= 1) * super().weight(row, state) if row.loss.numel() else row.norm


@dataclass(frozen=True)
class Branching(Clip):
    """Decides with an if, so that it cannot be asked for each row alone."""

    name = "branching"

    def weight(self, row: Stats, state: State) -> Tensor:
        """Clip above 1."""
        return super().weight(row, state) if bool((row.norm > 1).any()) else torch.ones_like(row.norm)


@dataclass(frozen=True)
class Lists(Clip):
    """Has a setting that JSON turns into another one, so that a resumed run is another method."""

    name = "lists"
    powers: tuple[float, ...] = (1.0, 2.0)


@dataclass(frozen=True)
class WithoutClamps(SampleRule):
    """DPSGD-F as published: noisy counts make bounds negative, and weights with them."""

    name = "without_clamps"

    @property
    def needs(self) -> tuple[str, ...]:
        """The noisy counts of the groups."""
        return ("group_counts",)

    def weight(self, row: Stats, state: State) -> Tensor:
        """min(1, C_k / n) with whatever C_k comes out."""
        return (state.bound[row.owner] * self._factors(state)[row.group] / row.norm.clamp(min=1e-9)).clamp(max=1.0)

    def sensitivity(self, state: State) -> Tensor:
        """The largest bound, when it is one."""
        return state.bound * self._factors(state).max().clamp(min=1.0, max=1e6)

    def _factors(self, state: State) -> Tensor:
        over, under = state.answers["group_counts"].reshape(2, state.public.groups)
        factors: Tensor = 1 + (over / (over + under + 1e-3)) / (over.sum() / state.public.batch + 1e-3)
        return factors


@dataclass(frozen=True)
class Unbounded(Query):
    """Sums raw gradient norms and declares a sensitivity of 1."""

    name = "unbounded"

    def width(self, facts: Facts) -> int:
        """One sum."""
        return 1

    def value(self, rows: Stats, state: State) -> Tensor:
        """The norm."""
        return rows.norm.unsqueeze(-1)


@dataclass(frozen=True)
class TwoCounts(Unbounded):
    """One record changes two counts by 1 each, and a sensitivity of 1 is declared."""

    name = "two_counts"

    def width(self, facts: Facts) -> int:
        """Its group, and everybody."""
        return 2

    def value(self, rows: Stats, state: State) -> Tensor:
        """1 and 1."""
        return torch.stack([torch.ones_like(rows.norm), torch.ones_like(rows.norm)], dim=-1)


@dataclass(frozen=True)
class Comparing(Unbounded):
    """Counts records above the mean loss of the batch: every record moves every other one's value."""

    name = "comparing"

    def value(self, rows: Stats, state: State) -> Tensor:
        """1 above the mean."""
        mean = rows.loss.mean() if rows.loss.numel() else rows.loss.sum()
        return (rows.loss >= mean).double().unsqueeze(-1)


@dataclass(frozen=True)
class Narrow(Unbounded):
    """Gives fewer values than it says."""

    name = "narrow"
    sensitivity: ClassVar[float] = 1.0

    def width(self, facts: Facts) -> int:
        """One count per group."""
        return len(facts.groups)

    def value(self, rows: Stats, state: State) -> Tensor:
        """One count."""
        return torch.ones_like(rows.norm).unsqueeze(-1)


@dataclass(frozen=True)
class EverySecond(Clip):
    """Leaves out records of odd number: without the first record it leaves out all others."""

    name = "every_second"

    def weight(self, row: Stats, state: State) -> Tensor:
        """Nothing for odd numbers."""
        return super().weight(row, state) * (row.record % 2 == 0)


MEMBERS: tuple[Wrong, ...] = (
    wrong_rule(EverySecond(), "order"),
    wrong_rule(Unclipped(), "sensitivity"),
    wrong_rule(SquaredNorm(), "sensitivity"),
    wrong_rule(Negative(), "form"),
    wrong_rule(WithoutBound(), "sensitivity"),
    wrong_rule(StrictestClass(), "sensitivity"),
    wrong_rule(Normalised(), "form"),
    wrong_rule(Endless(), "form"),
    wrong_rule(Coupled(), "isolation"),
    wrong_rule(Branching(), "isolation"),
    wrong_rule(Lists(), "round_trip"),
    wrong_rule(WithoutClamps(), "form", GroupCounts(noise=10.0)),
    *(
        Wrong(query.name, (query.__doc__ or "").strip().splitlines()[0], Subject(Clip(), (query,)), caught_by)
        for query, caught_by in (
            (Unbounded(noise=2.0), "form"),
            (TwoCounts(noise=2.0), "form"),
            (Comparing(noise=2.0), "isolation"),
            (Narrow(noise=2.0), "form"),
        )
    ),
)
"""Wrong sample rules and queries."""
