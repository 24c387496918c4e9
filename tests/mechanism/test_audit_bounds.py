"""Lower bounds hold as often as they say, and those of Gaussians and of perfect attacks are the known ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from evenhand.accounting.accountant import compose, epsilon
from evenhand.accounting.trade_off import largest_power
from evenhand.mechanism.audit.bounds import (
    LARGEST,
    Counts,
    Rates,
    ceiling,
    certify,
    direct_epsilon,
    family_epsilon,
    scale_noise,
    share_at_least,
    share_at_most,
)
from evenhand.types import Event

EVENTS: list[list[Event]] = [
    [(1.0, 1.0, 1)],
    [(0.1, 1.0, 10)],
    [(0.01, 0.8, 300), (0.02, 1.1, 200)],
    [(1.0, 30.0, 1), (0.05, 2.0, 100)],
]


def gaussian_scores(mu: float, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    return source.normal(mu, 1, trials), source.normal(0, 1, trials)


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (517, 1000)])
def test_shares_are_those_of_clopper_and_pearson(hits: int, trials: int) -> None:
    interval = stats.binomtest(hits, trials).proportion_ci(0.98, method="exact")
    assert share_at_least(hits, trials, 0.01) == pytest.approx(interval.low, abs=1e-12)
    assert share_at_most(hits, trials, 0.01) == pytest.approx(interval.high, abs=1e-12)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("alarms", [1e-4, 0.02, 0.3, 0.8])
def test_no_test_of_a_gaussian_has_more_power_than_its_trade_off_curve(mu: float, alarms: float) -> None:
    exact = float(ndtr(ndtri(alarms) + mu))
    assert exact <= largest_power([(1.0, 1 / mu, 1)], alarms) <= exact + 1e-4
    assert exact <= largest_power([(1.0, 2 / mu, 4)], alarms, near=exact) <= exact + 1e-4


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("alarms", [1e-3, 0.1, 0.4])
def test_the_power_is_near_the_whole_profiles_and_never_above_it(events: list[Event], alarms: float) -> None:
    """The whole profile takes the larger of both directions; each by itself may say a little less."""
    whole = compose(events).guess_rate(alarms)
    bound = largest_power(events, alarms, near=whole)
    assert 0.95 * whole <= bound <= whole + 2e-3


def test_without_noise_every_power_is_possible_and_without_a_release_none() -> None:
    assert largest_power([(0.1, 0.0, 3)], 0.1) == 1.0
    assert largest_power([], 0.1) == 0.1


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("factor", [0.4, 1.0, 1.7])
def test_the_family_gives_back_the_factor_whose_power_it_is_shown(events: list[Event], factor: float) -> None:
    scaled = scale_noise(events, factor)
    power = largest_power(scaled, 0.05, near=largest_power(scaled, 0.05, near=0.2))
    shown = family_epsilon(events, Rates(power, 0.05), 1e-5)
    assert 0.98 * epsilon(scaled, 1e-5) <= shown <= epsilon(scaled, 1e-5) * (1 + 1e-4)


def test_an_attack_that_is_no_better_than_guessing_shows_nothing() -> None:
    assert family_epsilon([(1.0, 1.0, 1)], Rates(0.1, 0.1), 1e-5) == direct_epsilon(Rates(0.1, 0.1), 1e-5) == 0.0


def test_what_no_member_of_the_family_explains_is_reported_as_the_largest_epsilon() -> None:
    assert family_epsilon([(0.01, 1.0, 1)], Rates(0.9, 0.01), 1e-5) == LARGEST


@pytest.mark.parametrize("events", EVENTS)
def test_no_outcome_of_the_trials_shows_more_than_the_ceiling(events: list[Event]) -> None:
    most = ceiling(events, 4000, 1e-5, 0.01)
    never = float(np.prod([(1 - rate) ** count for rate, _, count in events]))
    members = np.where(np.arange(4000) % 1000 < 1000 * never, 0.0, 1.0)
    best = certify(members, np.zeros(4000), events, 1e-5, 0.01)
    assert best.family <= most.family * 1.01
    assert best.direct <= most.direct * 1.01


def test_thresholds_never_come_from_the_trials_that_give_the_bound() -> None:
    """The first quarter is a clear attack and the rest is pure chance: nothing is certified."""
    source = np.random.default_rng(0)
    members, others = source.normal(size=4000), source.normal(size=4000)
    members[:1000] += 10
    shown = certify(members, others, [(1.0, 1.0, 1)], 1e-5, 0.01)
    assert shown.family < 0.6
    assert shown.direct == 0.0


def test_bounds_of_a_gaussian_exceed_its_epsilon_no_more_often_than_they_may() -> None:
    """At 80 % confidence, so that a bound that is no bound would show: at most 20 % of 100, at the 99.9 % quantile."""
    truth, over, near = epsilon([(1.0, 1.0, 1)], 1e-5), 0, 0
    for seed in range(100):
        shown = certify(*gaussian_scores(1.0, 1000, seed), [(1.0, 1.0, 1)], 1e-5, 0.2)
        over += max(shown.family, shown.direct) > truth
        near += shown.family > 0.6 * truth
    assert over <= stats.binom.ppf(0.999, 100, 0.2)
    assert near > 50


def test_counts_say_in_above_the_threshold_only() -> None:
    assert Counts.of(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 3.0]), 1.0) == Counts(1, 1, 3, 3)
