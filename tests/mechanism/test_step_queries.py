"""Side queries within a step: each with noise of its own, for the sensitivity that is charged and no other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from steps import FACTS, rows, vectors
from torch import Tensor

from evenhand.accounting.budgets import FixedNoise
from evenhand.errors import UnsupportedModelError
from evenhand.mechanism import noise_grid
from evenhand.mechanism.add_noise import Ahead, release_few
from evenhand.mechanism.make_plan import Plan, plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, Released, private_gradient, rehearse
from evenhand.methods.catalogue import Method
from evenhand.methods.queries import Count, GroupSizes, Query
from evenhand.methods.rules import Clip
from evenhand.types import Facts, State, Stats


@dataclass(frozen=True)
class Remember(Clip):
    name = "remember"

    def advance(self, state: State) -> dict[str, Tensor]:
        return dict(state.answers)


@dataclass(frozen=True)
class Far(Query):
    """Far more than the declared sensitivity, for every record."""

    name = "far"
    sensitivity: ClassVar[float] = 1.0

    def width(self, facts: Facts) -> int:
        return 2

    def value(self, rows: Stats, state: State) -> Tensor:
        return torch.stack([1e6 * torch.ones_like(rows.norm), 0 * rows.norm], -1)


class Further(Far):
    name = "further"
    sensitivity: ClassVar[float] = 50.0


class Furthest(Far):
    name = "furthest"
    sensitivity: ClassVar[float] = 1.0


def planned(*queries: Query) -> Plan:
    return plan(Method(Remember(), queries=queries), FixedNoise(1.0, 1e-3), data=FACTS, epochs=10, batch_size=10)


def step(mechanism: Mechanism, count: int, position: int = 0) -> Released:
    return private_gradient(mechanism, vectors(torch.zeros(count, 2)), rows(count, position), {})


def mechanism(*queries: Query) -> Mechanism:
    return Mechanism(planned(*queries), Remember(), queries, Stream.insecure(0, 0))


def quiet(*queries: Query) -> Mechanism:
    """With next to no noise, so that one sees what it is added to."""
    made = planned(*queries)
    none = (1e-9,) * len(queries)
    made = replace(made, levels=tuple(replace(level, queries=none) for level in made.levels))
    return Mechanism(made, Remember(), queries, Stream.insecure(0, 0))


def test_queries_of_one_step_have_noise_of_their_own() -> None:
    """The same noise twice would cancel in the difference of two answers."""
    asked = mechanism(Far(noise=5.0), Further(noise=5.0), GroupSizes(noise=5.0))
    answers = step(asked, 0).memory  # nothing but noise
    per_sensitivity = [answers["far"], answers["further"] / 50.0, answers["group_sizes"]]
    every = torch.cat(per_sensitivity)
    assert every.unique().numel() == every.numel() == 6
    gaps = (every[:, None] - every[None, :]).abs() + torch.eye(6)
    assert gaps.min() > 1e-3


def test_a_query_is_held_to_and_charged_for_its_own_sensitivity() -> None:
    queries = (Far(noise=5.0), Further(noise=5.0))
    released = step(quiet(*queries), 3)
    assert released.memory["far"].tolist() == pytest.approx([3.0, 0.0], abs=1e-6)
    assert released.memory["further"].tolist() == pytest.approx([150.0, 0.0], abs=1e-4)
    for (covered, std), query in zip(released.commit.queries, queries, strict=True):
        least = query.sensitivity * (1 + noise_grid.rounding(10))
        assert least <= covered <= least * (1 + 1e-6)
        assert std == pytest.approx(1e-9 * covered)


def test_a_sensitivity_that_changes_later_is_neither_granted_nor_charged() -> None:
    """Values and noise follow one number, whatever the class says by then."""
    query = Furthest(noise=1.0)
    asked = mechanism(query)
    first = step(asked, 1)
    try:
        Furthest.sensitivity = 1000.0
        later = step(asked, 1, position=1)
    finally:
        Furthest.sensitivity = 1.0
    assert later.commit.queries == first.commit.queries
    assert abs(float(later.memory["furthest"][0])) < 10.0


@pytest.mark.parametrize("spacing", [0.25, 2.0**-20])
def test_answers_are_rounded_before_noise_is_added_and_afterwards(spacing: float) -> None:
    """Numbers that lie nearer to each other than the grid, and to the same place of it, give the same answer."""
    source = Ahead(Stream.insecure(0, 0))
    total = np.array([3.0, -7.0, 0.5])
    shifts = np.array([0.49, -0.3, 0.1]) * spacing
    first = release_few(total, 2.0, spacing, source, "queries", 3, 1)
    assert np.array_equal(first, release_few(total + shifts, 2.0, spacing, source, "queries", 3, 1))
    assert np.array_equal(first, np.rint(first / spacing) * spacing)
    assert not np.array_equal(first, release_few(total, 2.0, spacing, source, "queries", 3, 2))


@dataclass(frozen=True)
class Halves(Count):
    """Two places per group, counted with numpy."""

    name = "halves"

    def places(self, groups: int) -> Any:
        return np.prod([2, groups])

    def place(self, rows: Stats, state: State) -> Tensor:
        return rows.group * 2 + (rows.norm > 1).long()


class Wider(GroupSizes):
    def width(self, facts: Facts) -> int:
        return 5


def test_a_length_from_numpy_is_a_length() -> None:
    asked = quiet(Halves(noise=5.0))
    rehearse(asked)
    long = torch.tensor([[0.5, 0.0], [2.0, 0.0], [0.0, 0.1], [3.0, 0.0], [0.0, 0.0]])
    answer = private_gradient(asked, vectors(long), rows(5), {}).memory["halves"]
    assert answer.tolist() == pytest.approx([3.0, 2.0, 0.0, 0.0], abs=1e-6)


def test_a_count_has_as_many_numbers_as_places() -> None:
    with pytest.raises(UnsupportedModelError, match="one count per place"):
        rehearse(mechanism(Wider(noise=1.0)))


@dataclass(frozen=True)
class Branching(Count):
    """Fails for the last group only."""

    name = "branching"

    def places(self, groups: int) -> int:
        return groups

    def place(self, rows: Stats, state: State) -> Tensor:
        return torch.zeros(1, dtype=torch.long)[rows.group]


def test_a_rehearsal_shows_the_last_group_too() -> None:
    with pytest.raises(IndexError):
        rehearse(mechanism(Branching(noise=1.0)))
