"""The second opinion (Renyi) and the concentrated formulas of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import comb, logsumexp

from evenhand.accounting import accountant, renyi
from evenhand.accounting.renyi import TruncatedCDP, gaussian_rho, tcdp_subsampled, tcdp_sum, zcdp_epsilon, zcdp_rho
from evenhand.errors import UsageError


@pytest.mark.parametrize("order", [2, 3, 8, 32])
@pytest.mark.parametrize(("q", "noise"), [(0.01, 1.0), (0.2, 0.4), (0.7, 3.0)])
def test_integer_orders_match_the_binomial_sum(order: int, q: float, noise: float) -> None:
    k = np.arange(order + 1)
    terms = np.log(comb(order, k)) + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * noise**2)
    got, _, _ = renyi.log_moments(q, noise, np.array([order - 1.0]), "remove")
    assert got[0] == pytest.approx(logsumexp(terms), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
def test_moments_have_the_right_derivatives(direction: str) -> None:
    orders = np.array([2.0 - 1e-4, 2.0, 2.0 + 1e-4])
    k, slope, curve = renyi.log_moments(0.1, 1.0, orders, direction)  # type: ignore[arg-type]
    assert slope[1] == pytest.approx((k[2] - k[0]) / 2e-4, rel=1e-5)
    assert curve[1] == pytest.approx((slope[2] - slope[0]) / 2e-4, rel=1e-5)


def test_known_epsilons_of_both_conversions() -> None:
    assert renyi.epsilon([(0.01, 1.0, 1000)], 1e-5) == pytest.approx(2.101, rel=1e-3)
    assert renyi.epsilon([(0.001, 1.0, 100_000)], 1e-5) == pytest.approx(1.785, rel=1e-3)
    published = ((256 / 54_649, 0.8, 60, 6.55), (256 / 36_177, 1.0, 20, 3.1), (256 / 48_336, 1.0, 20, 2.66))
    for rate, noise, epochs, spent in published:
        events = [(rate, noise, round(epochs / rate))]
        assert renyi.epsilon(events, 1e-6, conversion="old") == pytest.approx(spent, rel=8e-3)


def test_sigma_of_individual_budgets_by_rdp() -> None:
    for target, sigma in ((1, 3.436), (2, 1.925), (3, 1.427)):
        assert renyi.epsilon([(512 / 60_000, sigma, 9375)], 1e-5) == pytest.approx(target, rel=3e-3)


def test_it_is_above_the_exact_accountant() -> None:
    for events in ([(0.01, 1.0, 1000)], [(1.0, 3.0, 4)], [(0.2, 0.5, 3), (0.01, 0.3, 40)]):
        exact = accountant.epsilon(events, 1e-6)
        assert exact <= renyi.epsilon(events, 1e-6) <= renyi.epsilon(events, 1e-6, conversion="old")


def test_limits() -> None:
    assert renyi.epsilon([], 1e-5) == 0
    assert renyi.epsilon([(0.1, 0.0, 1)], 1e-5) == math.inf


def test_concentrated() -> None:
    assert gaussian_rho(0.0) == math.inf
    assert zcdp_epsilon(0.0206, 1e-5) == pytest.approx(0.0206 + 2 * math.sqrt(0.0206 * math.log(1e5)))
    assert zcdp_rho(1.0, 1e-5) == pytest.approx(0.0208, abs=1e-4)
    assert tcdp_sum([]) == TruncatedCDP(0, math.inf)
    assert TruncatedCDP(0.1, 1.0).epsilon(1e-5) == math.inf
    assert TruncatedCDP(0.1, 3.0).epsilon(1e-5) == pytest.approx(0.3 + math.log(1e5) / 2)
    for noise in (0.5, 3.0):
        assert accountant.epsilon([(1.0, noise, 1)], 1e-5) <= zcdp_epsilon(gaussian_rho(noise), 1e-5)


def test_preconditions_of_the_amplification_lemma() -> None:
    assert tcdp_subsampled(0.001, 3.0)[1] == []
    assert len(tcdp_subsampled(0.5, 1.0)[1]) == 2
    assert tcdp_subsampled(0.5, 2.3)[1][1].startswith("log(1/rate)")
    assert tcdp_subsampled(0.001, 3.0)[0].rho == pytest.approx(13e-6 / 18)


def test_unusable_input() -> None:
    for call in (zcdp_epsilon, zcdp_rho):
        with pytest.raises(UsageError):
            call(-1.0, 1e-5)
    with pytest.raises(UsageError):
        gaussian_rho(-1.0)
    with pytest.raises(UsageError):
        tcdp_subsampled(0.0, 1.0)
