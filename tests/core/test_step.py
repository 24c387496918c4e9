from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as tests
from torch import Tensor, nn

from evenhand.data import wrap
from evenhand.errors import UnsupportedModelError
from evenhand.gradients import per_sample
from evenhand.methods import Method
from evenhand.planning import Plan, plan
from evenhand.privacy import noise as noises
from evenhand.privacy.budgets import FixedNoise, Privacy
from evenhand.queries import Query
from evenhand.rules import Clip, Identity, Rule, SampleRule
from evenhand.schedules import Constant
from evenhand.step import Mechanism, Released, bounded, private_gradient, rehearse
from evenhand.streams import Stream
from evenhand.types import Batch, Facts, Pass, State, Stats

LOSS = nn.CrossEntropyLoss(reduction="none")
FACTS = Facts(100, (("x", 50), ("y", 50)), groups=("a", "b"))


def made(method: Method | str = "dpsgd", noise: float = 1.0, **changes: object) -> Plan:
    return replace(plan(method, FixedNoise(noise, 1e-3), data=FACTS, epochs=10, batch_size=10), **changes)  # type: ignore[arg-type]


def rows(count: int, position: int = 0) -> Batch:
    zero = torch.zeros(count, dtype=torch.long)
    return Batch(None, None, group=zero, owner=zero, record=torch.arange(count), position=position, token=0)


def vectors(gradients: Tensor) -> Pass:
    """A pass over given per-record gradients: what the engine would return for them."""
    return Pass(
        loss=torch.zeros(gradients.shape[0]),
        norm=gradients.norm(dim=1),
        weighted_sum=lambda w: {"p": torch.nan_to_num(gradients * w[:, None]).sum(0)},
    )


def run(
    gradients: Tensor,
    made_plan: Plan,
    rule: Rule | None = None,
    batch: Batch | None = None,
    seed: int = 0,
    queries: tuple[Query, ...] = (),
) -> Released:
    mechanism = Mechanism(made_plan, rule or Clip(), queries, Stream.insecure(seed, 0))
    return private_gradient(mechanism, vectors(gradients), batch or rows(gradients.shape[0]), {})


def almost_noiseless() -> Plan:
    found = made()
    return replace(found, levels=(replace(found.levels[0], noise=1e-12),))


def test_without_noise_the_step_is_the_clipped_sum_over_the_expected_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = 3 * torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
    mechanism = Mechanism(almost_noiseless(), Clip(), (), Stream.insecure(0, 0))
    found = private_gradient(mechanism, per_sample(model, LOSS, inputs, targets), rows(7), {})
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(7):
        grads = torch.autograd.grad(LOSS(model(inputs[i : i + 1]), targets[i : i + 1]).sum(), list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        for name, grad in zip(expected, grads, strict=True):
            expected[name] += grad * min(1.0, 1.0 / norm) / 10
    for name, value in expected.items():
        assert torch.allclose(found.gradient[name], value, atol=1e-8)


def test_the_ledger_entry_is_made_of_the_number_that_made_the_noise() -> None:
    found = made(noise=1.7)
    values = np.concatenate(
        [
            run(torch.zeros(0, 16_000), found, batch=rows(0, position)).gradient["p"].numpy() * 10
            for position in range(8)
        ]
    )
    commit = run(torch.zeros(0, 16_000), found).commit
    assert values.size == 128_000
    assert commit.std == pytest.approx(1.7 * commit.sensitivity[0], rel=1e-12)
    assert tests.kstest(values / commit.std, "norm").pvalue > 1e-6
    chi = float((values**2).sum() / commit.std**2)
    assert 1e-6 < tests.chi2.cdf(chi, values.size) < 1 - 1e-6
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(values.size)


def test_noise_scales_with_the_bound_and_covers_rounding() -> None:
    method = Method(Clip(), schedule=Constant(bound=7.0))
    commit = run(torch.zeros(0, 100), made(method)).commit
    assert commit.sensitivity[0] > 7.0 * (1 + noises.rounding(10))
    assert commit.sensitivity[0] < 7.0 * (1 + 2 * noises.rounding(10))


def test_every_class_sees_at_least_its_planned_noise() -> None:
    found = made(scales=(0.5, 1.0))
    batch = replace(rows(2), owner=torch.tensor([0, 1]))
    commit = run(torch.eye(2) * 100, found, batch=batch).commit
    for value, scale in zip(commit.sensitivity, (0.5, 1.0), strict=True):
        assert commit.std / value >= 1.0 / scale * (1 - 1e-12)
    gradient = run(torch.eye(2) * 100, replace(almost_noiseless(), scales=(0.5, 1.0)), batch=batch).gradient["p"]
    assert (gradient * 10).tolist() == pytest.approx([0.5, 1.0], rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_contributes_zero_and_noise_and_charge_stay(poison: float) -> None:
    good = torch.tensor([[0.3, 0.4], [0.0, 0.5]])
    bad = torch.cat([good, torch.tensor([[poison, 1.0]])])
    with_it, without = run(bad, made()), run(good, made())
    assert torch.equal(with_it.gradient["p"], without.gradient["p"])
    assert with_it.commit == without.commit
    assert (with_it.left_out, without.left_out) == (1, 0)


def test_a_huge_finite_row_is_clipped_exactly() -> None:
    model = nn.Linear(3, 2)
    inputs = torch.tensor([[1e30, -1e30, 1e30], [0.1, 0.2, 0.3]])
    result = per_sample(model, LOSS, inputs, torch.tensor([0, 1]))
    mechanism = Mechanism(almost_noiseless(), Clip(), (), Stream.insecure(0, 0))
    flat = torch.cat([v.reshape(-1) for v in private_gradient(mechanism, result, rows(2), {}).gradient.values()])
    only_small = per_sample(model, LOSS, inputs[1:], torch.tensor([1]))
    rest = torch.cat([v.reshape(-1) for v in private_gradient(mechanism, only_small, rows(1), {}).gradient.values()])
    assert torch.isfinite(flat).all()
    assert (flat - rest).norm() * 10 <= 1 + 1e-5


def test_an_empty_batch_is_an_ordinary_step() -> None:
    empty, full = run(torch.zeros(0, 50), made()), run(torch.zeros(3, 50), made())
    assert torch.equal(empty.gradient["p"], full.gradient["p"])
    assert empty.gradient["p"].abs().sum() > 0
    assert empty.commit == full.commit


def test_the_divisor_is_the_expected_batch_not_the_realised_one() -> None:
    one = torch.tensor([[0.5, 0.0]])
    for copies in (1, 4):
        gradient = run(one.repeat(copies, 1), almost_noiseless()).gradient["p"]
        assert gradient[0].item() == pytest.approx(0.5 * copies / 10, rel=1e-6)


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
    found = bounded(torch.tensor(weights, dtype=torch.float64), stats, torch.tensor([bound], dtype=torch.float64))
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
        value = torch.where(rows.record == 1, float("nan"), 100.0).double()
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
    released = run(torch.zeros(3, 2), found, Remember(), queries=method.queries)
    answer = released.memory["loud"]
    assert answer.norm() == pytest.approx(2.0, rel=1e-6), "three rows, one of them not finite, each of norm at most 1"
    ((covered, std),) = released.commit.queries
    assert std == pytest.approx(1e-9 * covered)
    empty = run(torch.zeros(0, 2), found, Remember(), queries=method.queries).memory["loud"]
    assert empty.shape == (2,)


def test_released_values_lie_on_the_grid() -> None:
    found = run(torch.randn(5, 200), made())
    spacing = noises.grid(1.0)
    units = found.gradient["p"].numpy() * 10 / spacing
    assert np.abs(units - np.rint(units)).max() < 1e-3


def test_rounding_to_the_grid_costs_at_most_the_charged_slack() -> None:
    source = np.random.default_rng(0)
    spacing = noises.grid(1.0)
    for _ in range(50):
        total = source.normal(size=1000)
        record = source.normal(size=1000)
        record /= np.linalg.norm(record)
        moved = (np.rint((total + record) / spacing) - np.rint(total / spacing)) * spacing
        assert np.linalg.norm(moved) <= 1 + noises.slack(spacing, 1000)


def test_sgd_releases_the_plain_mean() -> None:
    found = plan("sgd", None, data=FACTS, epochs=1, batch_size=10)
    rule = Identity()
    released = run(torch.tensor([[30.0, 40.0], [1.0, 1.0]]), found, rule)
    assert torch.allclose(released.gradient["p"], torch.tensor([3.1, 4.1], dtype=torch.float64))
    assert released.commit.std == 0.0


def test_a_calibrated_plan_and_its_commits_give_the_promised_epsilon() -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    data = wrap(torch.ones(100, 2), [0, 1] * 50)
    found = plan("dpsgd", Privacy(2.0, 1e-3), data=data.facts, epochs=5, batch_size=10)
    accountant = PLDAccountant()
    for position in range(found.steps):
        commit = run(torch.randn(3, 2), found, batch=rows(3, position)).commit
        accountant.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(commit.std / commit.sensitivity[0])))
    assert accountant.get_epsilon(1e-3) <= 2.0 * (1 + 1e-3)
