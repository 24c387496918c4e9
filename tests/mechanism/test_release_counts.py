"""Counts of labels: their sensitivity by brute force, their noise, and an epsilon that dp-accounting confirms."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

import evenhand as eh
from evenhand.accounting import accountant
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.mechanism.make_plan import default_prior_noise
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.release_counts import CountTable, release_counts
from evenhand.types import Facts, PriorKind

METHODS = ["dpsgd", "idp_sample", "idp_scale", "sad", "dpsgd_f"]
OWNERS = Facts(6000, (("strict", 2000), ("open", 4000)), ("a", "b"), ("0", "1", "2"))


def planned(method: str, prior: PriorKind | None) -> Plan:
    owned = method.startswith("idp")
    facts = OWNERS if owned else Facts(6000, (("all", 6000),), ("a", "b"), ("0", "1", "2"))
    promise = eh.Budgets({"strict": 1, "open": 3}, 1e-5) if owned else eh.Privacy(2, 1e-5)
    return eh.plan(method, promise, data=facts, epochs=4, batch_size=200, prior=prior)


@pytest.mark.parametrize("method", METHODS)
def test_dp_accounting_confirms_the_epsilon_of_steps_and_counts(method: str) -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    plan = planned(method, "labels by group")
    assert plan.prior is not None
    for owner, epsilon in enumerate(plan.epsilons):
        events = [dp_accounting.GaussianDpEvent(plan.prior.noise)]
        for level in plan.levels:
            step = dp_accounting.GaussianDpEvent(plan.noise_seen(level, owner))
            sampled = dp_accounting.PoissonSampledDpEvent(plan.rates[owner], step)
            events.append(dp_accounting.SelfComposedDpEvent(sampled, level.count))
        other = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
        other.compose(dp_accounting.ComposedDpEvent(events))
        assert epsilon is not None
        assert other.get_epsilon(plan.delta) == pytest.approx(epsilon, rel=0.02)
        assert epsilon <= (plan.budgets[owner] or math.inf)


@pytest.mark.parametrize("method", METHODS)
def test_counts_take_at_most_a_hundredth_of_the_promise(method: str) -> None:
    with_counts, without = planned(method, "labels"), planned(method, None)
    for owner in range(len(with_counts.rates)):
        alone = accountant.epsilon(with_counts.events(owner)[1:], with_counts.delta)
        assert 0.99 * (without.epsilons[owner] or 0.0) < alone < (with_counts.epsilons[owner] or 0.0)


def test_a_plan_with_counts_is_written_and_read_again() -> None:
    plan = planned("idp_sample", "labels")
    assert Plan.from_json(plan.to_json()) == plan
    assert "prior" not in planned("idp_sample", None).to_json()
    for damage in ({"kind": "all", "noise": 1.0}, {"kind": "labels", "noise": -1.0}, {"kind": "labels"}, [1]):
        with pytest.raises(UsageError, match="damaged or edited"):
            Plan.from_json({**plan.to_json(), "prior": damage})


def test_the_spending_curve_begins_with_the_first_step_and_ends_with_the_plan() -> None:
    plan = planned("dpsgd", "labels")
    steps, epsilons = zip(*plan.spending(points=8), strict=True)
    assert steps[0] >= 1
    assert steps[-1] == plan.steps
    assert epsilons[-1] == plan.epsilons[0]
    assert plan.spent(0) == accountant.epsilon([(1.0, plan.prior.noise, 1)], plan.delta)  # type: ignore[union-attr]


def records(kind: PriorKind, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 3, (count,), generator=generator)
    if kind == "each label":
        values = torch.rand(count, 4, generator=generator)
        return torch.where(values > 0.8, values * 3, values.round()), group  # some beyond the range of a label
    return torch.randint(-1, 6, (count,), generator=generator), group  # some outside of the labels


@pytest.mark.parametrize("kind", ["labels", "labels by group", "each label"])
def test_no_record_moves_the_counts_by_more_than_declared(kind: PriorKind) -> None:
    facts = Facts(40, (("all", 40),), ("a", "b", "c"), ("w", "x", "y", "z"))
    table = CountTable.of(kind, facts)
    worst = 0.0
    for seed in range(30):
        targets, group = records(kind, 40, seed)
        whole = table._part(targets, group)
        for row in range(40):
            rest = torch.arange(40) != row
            worst = max(worst, float(np.linalg.norm(whole - table._part(targets[rest], group[rest]))))
    assert 0.5 < worst / table.sensitivity <= 1.0


def test_counts_are_read_in_any_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = eh.data.wrap(torch.zeros(50, 1), [i % 3 for i in range(50)], groups=["ab"[i % 2] for i in range(50)])
    table = CountTable.of("labels by group", data.facts)
    whole = table.count(data)
    monkeypatch.setattr("evenhand.mechanism.release_counts._ROWS", 7)
    assert np.array_equal(whole, table.count(data))
    assert whole.sum() == 50
    assert whole.shape == (2, 3)


def test_the_noise_of_the_counts_is_the_planned_gaussian() -> None:
    data = eh.data.wrap(torch.zeros(300, 1), [i % 3 for i in range(300)])
    plan = eh.plan("dpsgd", eh.Privacy(2, 1e-5), data=data.facts, epochs=2, prior="labels", prior_noise=7.0)
    rows = [release_counts(plan, Stream.fresh(), data) for _ in range(200)]
    assert all(row.std == 7.0 * row.sensitivity and row.sensitivity >= 1 for row in rows)
    noise = (np.array([row.counts[0] for row in rows]) - 100).ravel()
    assert stats.kstest(noise / rows[0].std, "norm").pvalue > 1e-4


@pytest.mark.parametrize(("records_", "labels"), list(product((200, 6000, 10**6), (2, 10, 1000))))
def test_the_default_noise_is_within_five_percent_of_the_best_split(records_: int, labels: int) -> None:
    """The error it minimises, by a sweep: half of what the counts take of the noise, and their own relative error."""
    least = eh.calibrate([(1.0, 1.0, 1)], 3.0, 1e-6)
    small = records_ / (10 * labels)

    def error(noise: float) -> float:
        return 0.5 * (least / noise) ** 2 + 0.5 * (noise / small) ** 2

    sweep = np.geomspace(10 * least, 1e6 * least, 4000)  # counts never take more than a hundredth
    chosen = default_prior_noise(3.0, 1e-6, records_, labels)
    assert error(chosen) <= 1.05 * min(map(error, sweep))


def test_data_without_labels_have_no_counts() -> None:
    with pytest.raises(UsageError, match="the data declare none"):
        eh.plan("dpsgd", eh.Privacy(2), data=Facts(100, (("all", 100),)), prior="labels")
