"""Bounds of one run against exact probabilities: enumeration, linear programs, closed forms, and Gaussian scores."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import ndtr
from scipy.stats import binom

from evenhand.auditing.one_run import (
    Family,
    Guesses,
    TradeOff,
    choose_guesses,
    contradicts,
    family_bound,
    gaussian_distance,
    largest_contradicted_epsilon,
    p_value,
)


def most_likely(curve: TradeOff, coins: int, guesses: int, correct: int, *, tails: bool) -> float:
    """The largest probability of so many correct guesses that theorem 9 allows for all events, or for tails alone."""
    numbers = np.arange(guesses + 1)
    growth = np.exp(curve.epsilons)
    lines = [*zip(growth, curve.deltas, strict=True), *zip(1 / growth, 1 - (1 - curve.deltas) / growth, strict=True)]
    rows, limits = [], []
    subsets = itertools.product((0, 1), repeat=guesses + 1)
    for chosen in [tuple(numbers >= least) for least in range(1, correct + 1)] if tails else subsets:
        inside = np.array(chosen, dtype=float)
        right = inside * numbers / coins
        wrong = np.append(inside[1:] * (guesses - numbers[1:] + 1) / coins, 0.0)
        for slope, height in lines:
            rows.append(right - slope * wrong)
            limits.append(height)
    found = linprog(
        -(numbers >= correct).astype(float), A_ub=rows, b_ub=limits, A_eq=[np.ones(guesses + 1)], b_eq=[1.0]
    )
    return -float(found.fun)


def smallest_miss(curve: TradeOff, coins: int, guesses: int, correct: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if contradicts(curve, coins, guesses, correct, middle) else (middle, high)
    return high


def gaussian(mu: float) -> TradeOff:
    return Family(((1.0, 1 / mu, 1),), 1e-5).tradeoff(1.0)


@pytest.mark.parametrize("curve", [TradeOff.of_pair(1.0, 0.0), TradeOff.of_pair(0.7, 0.05), gaussian(1.0)])
@pytest.mark.parametrize(("coins", "guesses"), [(1, 1), (3, 3), (5, 3), (8, 4)])
def test_the_recursion_is_what_a_linear_program_over_tails_allows(curve: TradeOff, coins: int, guesses: int) -> None:
    if len(curve.epsilons) > 1:
        curve = TradeOff(curve.epsilons[::20], curve.deltas[::20])
    for correct in range(guesses // 2 + 1, guesses + 1):
        bound = smallest_miss(curve, coins, guesses, correct)
        assert bound >= most_likely(curve, coins, guesses, correct, tails=False) - 1e-7, "never below what is possible"
        assert bound == pytest.approx(most_likely(curve, coins, guesses, correct, tails=True), abs=1e-6)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_one_coin_is_guessed_as_well_as_a_gaussian_lets_it(mu: float) -> None:
    assert smallest_miss(gaussian(mu), 1, 1, 1) == pytest.approx(ndtr(mu / 2), abs=2e-4)


def test_a_coin_told_with_probability_delta_is_within_the_bound_for_pairs() -> None:
    """The mechanism that meets (epsilon, delta) with equality: a coin is told for sure, or by randomised response."""
    epsilon, delta, coins = 0.8, 0.1, 3
    chance = delta + (1 - delta) / (1 + math.exp(-epsilon))
    for correct in range(coins + 1):
        exact = float(binom.sf(correct - 1, coins, chance))
        assert p_value(coins, coins, correct, epsilon, delta) >= exact - 1e-12
        assert smallest_miss(TradeOff.of_pair(epsilon, delta), coins, coins, correct) >= exact - 1e-9 or correct == 0


def test_without_delta_the_bound_for_pairs_is_the_tail_of_randomised_response_by_enumeration() -> None:
    chance = 1 / (1 + math.exp(-0.5))
    for correct in range(5):
        outcomes = itertools.product((chance, 1 - chance), repeat=4)
        exact = sum(math.prod(row) for row in outcomes if sum(part == chance for part in row) >= correct)
        assert p_value(6, 4, correct, 0.5, 0.0) == pytest.approx(exact)


def test_the_term_of_delta_is_that_of_the_paper() -> None:
    coins, guesses, correct, epsilon, delta = 40, 12, 9, 0.4, 1e-3
    chance = 1 / (1 + math.exp(-epsilon))
    total, slope = 0.0, 0.0
    for fewer in range(1, correct + 1):
        total += float(binom.pmf(correct - fewer, guesses, chance))
        slope = max(slope, total / fewer)
    expected = float(binom.sf(correct - 1, guesses, chance)) + 2 * coins * delta * slope
    assert p_value(coins, guesses, correct, epsilon, delta) == pytest.approx(expected)


def test_most_and_least_undo_each_other_on_a_gaussian_curve() -> None:
    curve = gaussian(1.0)
    for probability in (1e-3, 0.1, 0.4, 0.9):
        exact = ndtr(_quantile(probability) + 1.0)
        assert curve.most(probability) == pytest.approx(exact, abs=2e-4)
        assert curve.most(probability) >= exact - 1e-9
        assert curve.least(curve.most(probability)) == pytest.approx(probability, abs=2e-4)


def _quantile(probability: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(probability))


def lower_bounds(mu: float, claimed: float, coins: int, runs: int, seed: int = 0) -> list[float]:
    family = Family(((1.0, 1 / claimed, 1),), 1e-5)
    guesses = choose_guesses(coins, claimed, 0.05)
    draw = np.random.default_rng(seed)
    bounds = []
    for _ in range(runs):
        tossed = draw.random(coins) < 0.5
        scores = draw.normal(size=coins) + mu * tossed
        correct = Guesses.by_score(scores, guesses).correct(tossed)
        bounds.append(family_bound(family, coins, guesses, correct, 0.05))
    return bounds


def test_a_thousand_gaussian_canaries_certify_1_4_of_4_38_and_seldom_more_than_is_true() -> None:
    bounds = np.array(lower_bounds(1.0, 1.0, 1000, 25))
    assert np.quantile(bounds, 0.05) > 1.4
    assert (bounds > 4.378).sum() <= binom.ppf(0.999, 25, 0.05)


def test_a_mechanism_with_half_the_noise_is_caught() -> None:
    assert min(lower_bounds(4.0, 1.0, 1000, 5)) > 4.38


def test_scores_that_know_nothing_certify_nothing_more_often_than_allowed() -> None:
    bounds = lower_bounds(0.0, 1.0, 400, 60)
    assert sum(bound > 0 for bound in bounds) <= binom.ppf(0.999, 60, 0.05)


def test_the_bound_within_a_family_is_tighter_than_the_one_for_pairs() -> None:
    family = Family(((1.0, 1.0, 1),), 1e-5)
    for correct in (100, 120, 140):
        pair = largest_contradicted_epsilon(1000, 150, correct, 1e-5, 0.05)
        assert family_bound(family, 1000, 150, correct, 0.05) > pair


def test_more_correct_guesses_never_certify_less() -> None:
    family = Family(((0.1, 1.0, 10),), 1e-5)
    bounds = [family_bound(family, 500, 100, correct, 0.05) for correct in (75, 100)]
    assert bounds == sorted(bounds)


def test_guesses_do_not_depend_on_the_coins_and_are_as_many_as_were_fixed() -> None:
    scores = np.array([np.nan, 1.0, 1.0, 1.0, -2.0, 7.0, np.nan])
    guesses = Guesses.by_score(scores, 3)
    assert len(guesses.present) + len(guesses.absent) == 3
    assert not set(guesses.present) & set(guesses.absent)
    assert 5 in guesses.present
    assert 4 in guesses.absent


def test_the_gaussian_of_a_promise_spends_it() -> None:
    for epsilon in (0.5, 3.0, 20.0):
        mu = gaussian_distance(epsilon, 1e-5)
        assert Family(((1.0, 1 / mu, 1),), 1e-5).epsilon(1.0) == pytest.approx(epsilon, rel=5e-3)
