"""What a rule or a query writes into the columns it was shown does not change how it is bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evenhand.mechanism import step
from evenhand.mechanism.weights import by_row, weights_of
from evenhand.methods.rules import BatchRule, SampleRule
from evenhand.types import Public, State, Stats

ONE = torch.ones(1, dtype=torch.float64)


def columns() -> Stats:
    norm = torch.tensor([200.0, 3.0, 80.0], dtype=torch.float64)
    index = torch.zeros(3, dtype=torch.long)
    return Stats(norm, norm.clone(), index.clone(), index.clone(), torch.arange(3))


class Shrinking(SampleRule):
    name = "shrinking"

    def sensitivity(self, state: State) -> Tensor:
        return state.bound

    def weight(self, row: Stats, state: State) -> Tensor:
        row.norm.mul_(0.001)
        row.owner.fill_(1)
        return torch.ones_like(row.norm)


class ShrinkingAll(BatchRule):
    name = "shrinking_all"
    guarantee = "not established"

    def sensitivity(self, state: State) -> Tensor:
        return state.bound

    def weights(self, rows: Stats, state: State) -> Tensor:
        rows.norm.mul_(0.001)
        rows.owner.fill_(1)
        return torch.ones_like(rows.norm)


@pytest.mark.parametrize("rule", [Shrinking(), ShrinkingAll()], ids=lambda rule: rule.name)
def test_a_rule_that_writes_into_its_rows_is_bounded_all_the_same(rule: SampleRule | BatchRule) -> None:
    stats, state = columns(), State(step=0, bound=ONE.clone(), public=Public(batch=3.0, groups=1))
    sensitivity = torch.tensor([1.0, 50.0], dtype=torch.float64)
    weights = step.clamp_weights(weights_of(rule, stats, state), stats, sensitivity)
    assert bool((weights * columns().norm <= 1.0 + 1e-12).all())
    assert torch.equal(stats.norm, columns().norm)
    assert torch.equal(stats.owner, columns().owner)


def test_a_query_that_writes_into_its_rows_changes_nothing() -> None:
    def value(row: Stats, state: State) -> Tensor:
        row.norm.zero_()
        return row.loss.unsqueeze(-1)

    stats = columns()
    by_row(value, stats, State(step=0, bound=ONE, public=Public(batch=3.0, groups=1)))
    assert torch.equal(stats.norm, columns().norm)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_owners_of_any_kind_of_number_are_themselves(dtype: torch.dtype) -> None:
    owner = torch.tensor([1, 0, 1, 0, 0, 1], dtype=dtype)
    ones = torch.ones(6, dtype=torch.float64)
    sensitivity = torch.tensor([1.0, 1e6], dtype=torch.float64)
    found = step.clamp_weights(1e9 * ones, Stats(ones, ones, owner, owner, owner), sensitivity)
    assert found.tolist() == [1e6, 1.0, 1e6, 1.0, 1.0, 1e6]


def test_columns_of_different_lengths_are_refused() -> None:
    ones, owner = torch.ones(4, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        step.clamp_weights(ones, Stats(ones, ones, owner, owner, owner), ONE)
