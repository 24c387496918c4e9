"""Plans for many owners: everyone lands just below its own budget, never above, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from evenhand.accounting.budgets import Budgets
from evenhand.accounting.plan import Plan
from evenhand.mechanism.make_plan import plan
from evenhand.methods.catalogue import Method
from evenhand.methods.rules import Clip
from evenhand.methods.schedules import Phases
from evenhand.types import Facts


def planned(method: str | Method, budgets: np.ndarray, **options: object) -> Plan:
    names = [f"owner {index}" for index in range(budgets.size)]
    facts = Facts(20 * budgets.size, tuple((name, 20) for name in names))
    arguments = {"epochs": 10, "batch_size": budgets.size} | options
    return plan(method, Budgets(dict(zip(names, budgets.tolist(), strict=True)), 1e-5), data=facts, **arguments)


def check(made: Plan, budgets: np.ndarray) -> None:
    ratio = np.array(made.epsilons) / budgets
    assert ratio.max() <= 1.0
    assert ratio.min() >= 0.997


@pytest.mark.parametrize("method", ["idp_sample", "idp_scale"])
@pytest.mark.parametrize("count", [3, 100, 3000])
def test_every_owner_lands_within_its_own_budget(method: str, count: int) -> None:
    budgets = np.exp(np.random.default_rng(count).uniform(np.log(0.5), np.log(8), count))
    made = planned(method, budgets)
    check(made, budgets)
    assert made.expected_batch == pytest.approx(20 * sum(made.rates), rel=1e-9)


def test_a_schedule_of_phases_and_equal_budgets() -> None:
    budgets = np.array([1.0] * 40 + [2.0] * 40 + [4.0] * 40)
    for method in (
        Method(Clip(), schedule=Phases(), sampling="owner"),
        Method(Clip(), schedule=Phases(), bounds="owner"),
    ):
        made = planned(method, budgets)
        check(made, budgets)
        assert len({(rate, scale) for rate, scale in zip(made.rates, made.scales, strict=True)}) == 3


@pytest.mark.parametrize("method", ["idp_sample", "idp_scale"])
def test_owners_agree_with_dp_accounting(method: str) -> None:
    budgets = np.exp(np.random.default_rng(1).uniform(np.log(0.5), np.log(8), 500))
    made = planned(method, budgets)
    for owner in (0, 99, 250, int(budgets.argmin()), int(budgets.argmax())):
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for rate, noise, count in made.events(owner):
            accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), count)
        assert accountant.get_epsilon(1e-5) <= budgets[owner] * 1.002
        assert made.epsilons[owner] == pytest.approx(made.spent(made.steps, owner), rel=3e-3)
        assert made.epsilons[owner] >= made.spent(made.steps, owner) * (1 - 1e-6)


def test_what_is_spent_half_way_is_an_upper_bound_for_many_owners() -> None:
    budgets = np.exp(np.random.default_rng(2).uniform(np.log(0.5), np.log(8), 400))
    made = planned("idp_scale", budgets)
    half = made.spent_by_owner(made.steps // 2)
    for owner in range(0, 400, 57):
        exact = made.spent(made.steps // 2, owner)
        assert exact * (1 - 1e-6) <= half[owner] <= exact * 1.005
    assert made.spent_by_owner(0) == (0.0,) * 400


@pytest.mark.slow
@pytest.mark.parametrize("method", ["idp_sample", "idp_scale"])
def test_fifty_thousand_owners(method: str) -> None:
    budgets = np.round(np.exp(np.random.default_rng(0).uniform(np.log(0.5), np.log(8), 50_000)), 6)
    check(planned(method, budgets, batch_size=20_000), budgets)
