"""Side queries: each record's vector, its norm, and the count it adds up to."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.mechanism.weights import total_of
from evenhand.methods import queries as package
from evenhand.methods.queries import Count, Exceedance, GroupCounts, GroupLosses, GroupSizes, Query, Unclipped
from evenhand.types import Facts, Public, State, Stats

FACTS = Facts(100, (("x", 60), ("y", 40)), groups=("a", "b", "c"))


def batch(count: int, seed: int = 0) -> Stats:
    generator = torch.Generator().manual_seed(seed)
    return Stats(
        norm=torch.rand(count, generator=generator, dtype=torch.float64) * 4,
        loss=torch.rand(count, generator=generator, dtype=torch.float64),
        group=torch.randint(0, 3, (count,), generator=generator),
        owner=torch.randint(0, 2, (count,), generator=generator),
        record=torch.arange(count),
    )


STATE = State(
    0,
    torch.tensor([1.0, 3.0], dtype=torch.float64),
    memory={"threshold": 2.0, "factor": 0.5},
    public=Public(50.0, groups=3),
)
QUERIES: list[Query] = [GroupSizes(share=0.01), GroupCounts(noise=10.0), Exceedance(share=0.01, factor=0.7)]


def by_row(query: Query, stats: Stats) -> torch.Tensor:
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    return vmap(lambda *row: query.value(Stats(*row), STATE))(*columns)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_a_record_changes_one_count_by_at_most_one(query: Query) -> None:
    stats = batch(200)
    values = by_row(query, stats)
    assert values.shape == (200, query.width(FACTS))
    assert set(values.unique().tolist()) <= {0.0, 1.0}
    assert (values.norm(dim=1) <= query.sensitivity).all()
    assert torch.equal(values, query.value(stats, STATE)), "a column gives what rows alone give"


def test_counts() -> None:
    stats = batch(300)
    norm, group, owner = stats.norm.tolist(), stats.group.tolist(), stats.owner.tolist()
    over = [sum(g == k and n > (1.0, 3.0)[o] for n, g, o in zip(norm, group, owner, strict=True)) for k in range(3)]
    size = [group.count(k) for k in range(3)]
    counts = by_row(GroupCounts(share=0.1), stats).sum(0).tolist()
    assert counts == [*over, *(b - m for b, m in zip(size, over, strict=True))]
    assert by_row(GroupSizes(share=0.1), stats).sum(0).tolist() == size
    assert by_row(Exceedance(share=0.1), stats).sum(0).tolist() == [sum(n > 0.7 * 2.0 for n in norm)]


VECTORS: list[Query] = [Unclipped(noise=10.0), GroupLosses(share=0.01)]


@pytest.mark.parametrize("query", VECTORS, ids=lambda query: query.name)
def test_vectors_stay_within_their_sensitivity_and_rows_are_independent(query: Query) -> None:
    stats = batch(200)
    values = by_row(query, stats)
    assert values.shape == (200, query.width(FACTS))
    assert (values.norm(dim=1) <= query.sensitivity * (1 + 1e-12)).all()
    torch.testing.assert_close(values, query.value(stats, STATE))


def test_every_query_of_ours_is_looked_at_here() -> None:
    assert all(query.sensitivity == 1.0 for query in QUERIES)
    parts = [part for _, part in inspect.getmembers(package, inspect.isclass) if issubclass(part, Query)]
    names = {part.name for part in parts if part not in (Count, Query)}
    assert names == {each.name for each in [*QUERIES, *VECTORS]}


def test_a_norm_at_the_bound_is_not_above_it() -> None:
    zero = torch.zeros(1, dtype=torch.long)
    at = Stats(torch.ones(1, dtype=torch.float64), torch.ones(1), zero, zero, zero)
    assert GroupCounts(share=0.1).value(at, STATE).tolist() == [[0, 0, 0, 1, 0, 0]]
    assert Exceedance(share=0.1, factor=0.5).value(at, STATE).tolist() == [[0]], "at half of the threshold of 2"
    assert Exceedance(share=0.1, factor=0.49).value(at, STATE).tolist() == [[1]]


def test_exceedance_needs_a_rule_with_a_threshold() -> None:
    with pytest.raises(UsageError, match="this rule keeps none"):
        Exceedance(share=0.1).value(batch(3), State(0, torch.ones(2)))
    with pytest.raises(UsageError, match="greater than 0"):
        Exceedance(share=0.1, factor=0.0)
    with pytest.raises(UsageError, match="either share="):
        Exceedance(share=0.1, noise=3.0)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_counting_places_gives_what_vectors_add_up_to(query: Query, count: int) -> None:
    stats, width = batch(count), query.width(FACTS)
    expected = query.value(stats, STATE).sum(0).tolist()
    assert total_of(query, width, 1.0, stats, STATE).tolist() == expected


@dataclass(frozen=True)
class ByGroup(Count):
    """A count of a user's own: named by group, of which most are outside."""

    name = "by_group"
    sensitivity: ClassVar[float] = 1.0

    def places(self, groups: int) -> int:
        return 3

    def place(self, rows: Stats, state: State) -> Tensor:
        return rows.group - 2


class Quiet(ByGroup):
    sensitivity: ClassVar[float] = 0.25


class Louder(ByGroup):
    def value(self, rows: Stats, state: State) -> Tensor:
        return 7.0 * super().value(rows, state)


class Softer(ByGroup):
    """Its vectors are not what its places say, and count."""

    def value(self, rows: Stats, state: State) -> Tensor:
        return 0.5 * super().value(rows, state)


class Between(ByGroup):
    def place(self, rows: Stats, state: State) -> Tensor:
        return rows.loss


class Elsewhere(ByGroup):
    def place(self, rows: Stats, state: State) -> Tensor:
        return rows.group * 2**60 - 2**62


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ByGroup, [1, 1, 1]), (Quiet, [0.25] * 3), (Louder, [1, 1, 1]), (Softer, [0.5] * 3), (Elsewhere, [1, 0, 0])],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_record_adds_one_at_one_place_and_nothing_outside(kind: type[Count], expected: list[float]) -> None:
    """Also where the sensitivity is below 1, or the vectors were made longer: each is held to what was declared."""
    each_its_own = replace(batch(9), group=torch.arange(9))
    assert total_of(kind(noise=1.0), 3, kind.sensitivity, each_its_own, STATE).tolist() == expected


def test_a_place_is_a_whole_number() -> None:
    with pytest.raises(UnsupportedModelError, match="one whole number per record"):
        total_of(Between(noise=1.0), 3, 1.0, batch(9), STATE)


@dataclass(frozen=True)
class Tiny(Query):
    """Vectors whose squares are below what float64 can hold, and far above the sensitivity."""

    name = "tiny"
    sensitivity: ClassVar[float] = 1e-200

    def width(self, facts: Facts) -> int:
        return 2

    def value(self, rows: Stats, state: State) -> Tensor:
        return torch.stack([rows.norm, rows.loss]) * 1e-190


def test_vectors_too_small_to_be_squared_are_held_to_their_sensitivity() -> None:
    total = total_of(Tiny(noise=1.0), 2, 1e-200, batch(1), STATE) * 1e200
    assert (total**2).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_query_needs_a_sensitivity(wrong: float) -> None:
    with pytest.raises(UsageError, match="sensitivity"):
        type("Wrong", (ByGroup,), {"sensitivity": wrong})(noise=1.0)


def test_groups_of_few_bits_are_counted_where_they_belong() -> None:
    stats = replace(batch(1), group=torch.tensor([150], dtype=torch.uint8), norm=torch.zeros(1).double())
    many = State(0, STATE.bound, public=Public(50.0, groups=200))
    assert int(GroupCounts(share=0.1).place(stats, many)) == 350
