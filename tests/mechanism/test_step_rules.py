"""Whatever a rule or query returns, one record moves the release by no more than was declared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import FACTS, almost_noiseless, made, rows, run, vectors
from torch import Tensor

from evenhand.accounting.budgets import FixedNoise
from evenhand.errors import UnsupportedModelError
from evenhand.mechanism.make_plan import plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, clamp_weights, private_gradient, rehearse
from evenhand.mechanism.weights import total_of
from evenhand.methods import registry
from evenhand.methods.catalogue import Method
from evenhand.methods.queries import Query
from evenhand.methods.rules import BatchRule, Clip, Ordered, SampleRule
from evenhand.types import Facts, State, Stats


@dataclass(frozen=True)
class Rogue(SampleRule):
    """Returns whatever it was given: a rule that ignores its bound."""

    value: float = 0.0
    name = "rogue"

    def weight(self, row: Stats, state: State) -> Tensor:
        return torch.full_like(row.norm, self.value)

    def sensitivity(self, state: State) -> Tensor:
        return state.bound


FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(FLOATS, min_size=4, max_size=4),
    norms=st.lists(st.floats(0, 1e200), min_size=4, max_size=4),
    bound=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_the_projection_holds_whatever_a_rule_returns(weights: list[float], norms: list[float], bound: float) -> None:
    zero = torch.zeros(4, dtype=torch.long)
    stats = Stats(torch.tensor(norms, dtype=torch.float64), zero.double(), zero, zero, zero)
    found = clamp_weights(torch.tensor(weights, dtype=torch.float64), stats, torch.tensor([bound], dtype=torch.float64))
    moved = found * stats.norm
    assert (found >= 0).all()
    assert (moved <= bound * (1 + 1e-12)).all()


def test_a_rogue_rule_cannot_move_the_sum_by_more_than_its_bound() -> None:
    gradients = torch.tensor([[30.0, 40.0]], dtype=torch.float64)
    for value in (1.0, 1e9, -3.0, float("nan"), float("inf")):
        found = run(gradients, almost_noiseless(), Rogue(value)).gradient["p"] * 10
        assert found.norm() <= 1 + 1e-6
    tiny = torch.tensor([[0.0, 0.0], [1e-42, 0.0], [0.3, 0.4]])
    assert torch.isfinite(run(tiny, almost_noiseless(), Rogue(float("inf"))).gradient["p"]).all()


class Writing(BatchRule):
    """Writes into the bound behind torch's back once it was asked for its sensitivity."""

    name = "writing"

    def sensitivity(self, state: State) -> Tensor:
        return state.bound

    def weights(self, stats: Stats, state: State) -> Tensor:
        state.bound.numpy()[:] *= 100.0
        return torch.full_like(stats.norm, 50.0)


def test_a_rule_cannot_raise_the_bound_behind_the_ledger() -> None:
    mechanism = Mechanism(almost_noiseless(), Writing(), (), Stream.insecure(0, 0))
    one = vectors(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    for step in range(3):
        found = private_gradient(mechanism, one, rows(1, step), {})
        assert found.gradient["p"].norm() * 10 <= 1 + 1e-6
        assert 1 <= found.commit.sensitivity[0] <= 1.01


@dataclass(frozen=True)
class Coupled(SampleRule):
    """Looks at the loss of the whole batch, or would if it could."""

    name = "coupled"

    def weight(self, row: Stats, state: State) -> Tensor:
        return (row.loss.max() < 50) * state.bound[row.owner] / row.norm

    def sensitivity(self, state: State) -> Tensor:
        return state.bound


def test_a_sample_rule_cannot_see_other_rows() -> None:
    gradients = torch.eye(3, dtype=torch.float64)
    with_outlier = replace(vectors(gradients), loss=torch.tensor([1.0, 1.0, 99.0]))
    mechanism = Mechanism(almost_noiseless(), Coupled(), (), Stream.insecure(0, 0))
    found = private_gradient(mechanism, with_outlier, rows(3), {}).gradient["p"] * 10
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.0], abs=1e-6)


@dataclass(frozen=True)
class EvenNumbers(SampleRule):
    """Weighs records of even number only: when the first goes, all others would change sides."""

    name = "even_numbers"

    def weight(self, row: Stats, state: State) -> Tensor:
        return (row.record % 2 == 0) * state.bound[row.owner] / row.norm

    def sensitivity(self, state: State) -> Tensor:
        return state.bound


@pytest.mark.parametrize("ordered", [False, True])
def test_a_rule_cannot_tell_by_its_number_that_another_record_is_gone(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {name: registry.part("rule", name) for name in registry.names("rule")}
    monkeypatch.setitem(registry._parts, "rule", {**parts, EvenNumbers.name: EvenNumbers})
    rule = Ordered(length=0.5, over=EvenNumbers()) if ordered else EvenNumbers()
    gradients = torch.eye(21, dtype=torch.float64)
    everybody, others = (run(part, almost_noiseless(), rule).gradient["p"] * 10 for part in (gradients, gradients[1:]))
    assert (everybody - others).norm() <= 1 + 1e-6
    assert others.norm() > 1, "else the test shows nothing"


@dataclass(frozen=True)
class NumberSum(Query):
    """Adds up the losses of even numbers, and of odd ones."""

    name = "number_sum"

    def width(self, facts: Facts) -> int:
        return 2

    def value(self, rows: Stats, state: State) -> Tensor:
        even = (rows.record % 2 == 0).to(rows.norm.dtype)
        return torch.stack([even * rows.loss, (1 - even) * rows.loss], dim=-1)


def test_a_query_cannot_tell_by_numbers_that_a_record_is_gone() -> None:
    state = State(0, torch.ones(1))
    zero = torch.zeros(21, dtype=torch.long)
    losses = (torch.arange(21) % 2 == 0).float()
    stats = Stats(torch.ones(21), losses, zero, zero, torch.arange(21))
    one_less = Stats(*(column[1:] for column in (stats.norm, losses, zero, zero)), torch.arange(20))
    before, after = (total_of(NumberSum(noise=1.0), 2, 1.0, part, state) for part in (stats, one_less))
    assert abs(before - after).max() <= 1


@dataclass(frozen=True)
class Branching(Clip):
    name = "branching"

    def weight(self, row: Stats, state: State) -> Tensor:
        return row.norm if bool(row.norm > 1) else row.norm * 2


@dataclass(frozen=True)
class Unbounded(Clip):
    name = "unbounded"
    declared: float = float("nan")

    def sensitivity(self, state: State) -> Tensor:
        return torch.full_like(state.bound, self.declared)


def test_a_rule_that_cannot_run_fails_the_rehearsal() -> None:
    for rule in (Branching(), Unbounded(), Unbounded(float("inf")), Unbounded(-1.0), Unbounded(0.0)):
        with pytest.raises((UnsupportedModelError, RuntimeError)):
            rehearse(Mechanism(made(), rule, (), Stream.insecure(0, 0)))
    rehearse(Mechanism(made(), Clip(), (), Stream.insecure(0, 0)))


@dataclass(frozen=True)
class Any1(Query):
    """One answer for the whole batch instead of one per record."""

    name = "any"

    def width(self, facts: Facts) -> int:
        return 1

    def value(self, rows: Stats, state: State) -> Tensor:
        return (rows.loss > 50).any().double()


def test_a_query_must_answer_per_record() -> None:
    with pytest.raises(UnsupportedModelError, match="one vector of length 1 per record"):
        run(torch.zeros(3, 2), made(Method(Clip(), queries=(Any1(noise=5.0),))), queries=(Any1(noise=5.0),))


@dataclass(frozen=True)
class Loud(Query):
    """Values far beyond the declared sensitivity, and one that is not finite."""

    name = "loud"
    sensitivity: ClassVar[float] = 1.0

    def width(self, facts: Facts) -> int:
        return 2

    def value(self, rows: Stats, state: State) -> Tensor:
        value = torch.where(rows.norm > 0, float("nan"), 100.0).double()
        return torch.stack([value, value])


@dataclass(frozen=True)
class Remember(Clip):
    name = "remember"

    def advance(self, state: State) -> dict[str, Tensor]:
        return dict(state.answers)


def test_queries_are_held_to_their_sensitivity_and_recorded() -> None:
    method = Method(Remember(), queries=(Loud(noise=5.0),))
    found = plan(method, FixedNoise(1.0, 1e-3), data=FACTS, epochs=1, batch_size=10)
    found = replace(found, levels=(replace(found.levels[0], queries=(1e-9,)),))
    gradients = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.0]])
    released = run(gradients, found, Remember(), queries=method.queries)
    answer = released.memory["loud"]
    assert answer.norm() == pytest.approx(2.0, rel=1e-6), "three rows, one of them not finite, each of norm at most 1"
    ((covered, std),) = released.commit.queries
    assert std == pytest.approx(1e-9 * covered)
    empty = run(torch.zeros(0, 2), found, Remember(), queries=method.queries).memory["loud"]
    assert empty.shape == (2,)
