"""Calibration: never above the budget, hardly below; impossible targets are explained."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from evenhand.accounting.accountant import epsilon, merged_noise
from evenhand.accounting.calibration import calibrate, owner_bounds, owner_rates
from evenhand.accounting.many_owners import certified_deltas, pchip
from evenhand.errors import CalibrationError, UsageError

LEVELS = [(1.0, 600), (1.3, 400)]


def test_random_shapes_spend_their_budget() -> None:
    rng = random.Random(4)
    for _ in range(30):
        shape = [
            (math.exp(rng.uniform(-7, 0)) if rng.random() < 0.9 else 1.0, rng.uniform(0.5, 2), rng.randint(1, 2000))
            for _ in range(rng.choice([1, 1, 2, 4]))
        ]
        target, delta = math.exp(rng.uniform(-3, 3)), 10 ** rng.uniform(-10, -4)
        relation = rng.choice(["add_remove", "replace_one"])
        scale = calibrate(shape, target, delta, relation=relation)  # type: ignore[arg-type]
        spent = epsilon([(q, scale * s, n) for q, s, n in shape], delta, relation=relation)  # type: ignore[arg-type]
        assert target * (1 - 5e-4) <= spent <= target, (shape, target, delta)


def test_a_fixed_side_query_is_included() -> None:
    scale = calibrate([(0.01, 1.0, 1000)], 2.0, 1e-5, query_noise=4.0)
    assert scale > calibrate([(0.01, 1.0, 1000)], 2.0, 1e-5)
    assert 2 * (1 - 5e-4) <= epsilon([(0.01, merged_noise(scale, [4.0]), 1000)], 1e-5) <= 2.0


@pytest.mark.parametrize(
    ("shape", "target", "delta", "message"),
    [
        ([], 1.0, 1e-5, "nothing to calibrate"),
        ([(0.1, 0.0, 3)], 1.0, 1e-5, "relative noise 0"),
        ([(1e-6, 1.0, 2)], 1.0, 1e-5, "nearest"),
    ],
)
def test_impossible_targets_are_explained_quickly(shape: list, target: float, delta: float, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CalibrationError, match=message):
        calibrate(shape, target, delta)
    assert time.perf_counter() - start < 5


def test_queries_that_spend_too_much_are_named() -> None:
    with pytest.raises(CalibrationError, match="Alone, the side queries"):
        calibrate([(0.01, 1.0, 1000)], 1.0, 1e-5, query_noise=1.0)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan, True])
def test_unusable_targets(target: float) -> None:
    with pytest.raises(UsageError):
        calibrate([(0.1, 1.0, 3)], target, 1e-5)


@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize("query", [math.inf, 20.0])
def test_every_owner_spends_its_own_budget(count: int, query: float) -> None:
    rng = np.random.default_rng(count)
    budgets = np.exp(rng.uniform(math.log(0.8), math.log(8), count)).tolist()
    sizes = rng.integers(1, 50, count).tolist()
    batch = 0.01 * sum(sizes)
    scale, rates = owner_rates(sizes, budgets, batch, LEVELS, 1e-5, query_noise=query)
    assert np.dot(sizes, rates) == pytest.approx(batch)
    for rate, budget in list(zip(rates, budgets, strict=True))[:25]:
        spent = epsilon([(rate, merged_noise(scale * s, [query]), n) for s, n in LEVELS], 1e-5)
        assert budget * (1 - 3e-3) <= spent <= budget
    scale, bounds = owner_bounds(sizes, budgets, 0.01, LEVELS, 1e-5, query_noise=query)
    assert np.dot(sizes, bounds) == pytest.approx(sum(sizes))
    for bound, budget in list(zip(bounds, budgets, strict=True))[:25]:
        spent = epsilon([(0.01, merged_noise(scale * s / bound, [query]), n) for s, n in LEVELS], 1e-5)
        assert budget * (1 - 3e-3) <= spent <= budget


@pytest.mark.slow
def test_fifty_thousand_owners() -> None:
    rng = np.random.default_rng(0)
    budgets = np.exp(rng.uniform(0, math.log(10), 50_000))
    start = time.perf_counter()
    scale, rates = owner_rates([1] * 50_000, budgets.tolist(), 512, [(1.0, 3516)], 1e-5)
    assert time.perf_counter() - start < 15
    for k in rng.integers(0, 50_000, 60):
        assert 1 - 3e-3 <= epsilon([(rates[k], scale, 3516)], 1e-5) / budgets[k] <= 1


def test_a_batch_that_needs_a_rate_above_one_is_refused_with_the_largest_that_works() -> None:
    start = time.perf_counter()
    with pytest.raises(CalibrationError, match="largest batch that works") as caught:
        owner_rates([100, 100], [0.5, 8.0], 190, [(1.0, 50)], 1e-5)
    assert time.perf_counter() - start < 5
    largest = float(str(caught.value).split("about ")[1].split(". ")[0])
    scale, rates = owner_rates([100, 100], [0.5, 8.0], largest, [(1.0, 50)], 1e-5)
    assert max(rates) <= 1
    assert epsilon([(rates[1], scale, 50)], 1e-5) <= 8.0


@pytest.mark.parametrize(
    ("sizes", "budgets", "batch"),
    [([1], [1.0, 2.0], 1), ([], [], 1), ([-1], [1.0], 1), ([10], [0.0], 1), ([10], [1.0], 11)],
)
def test_unusable_owners(sizes: list[int], budgets: list[float], batch: float) -> None:
    with pytest.raises(UsageError):
        owner_rates(sizes, budgets, batch, LEVELS, 1e-5)


def test_certificates_are_never_below_the_exact_delta() -> None:
    rates = np.linspace(0.01, 0.0108, 9)
    budgets = np.array([epsilon([(q, 1.0, 500), (q, 1.4, 300)], 1e-6) for q in rates])
    share = ((rates - rates[0]) / (rates[-1] - rates[0]))[:, None]
    low, high = ([(float(q), s, n) for s, n in ((1.0, 500), (1.4, 300))] for q in (rates[0], rates[-1]))
    bound = certified_deltas(low, high, share, budgets, 1e-6)
    assert np.all(bound >= 1e-6 * (1 - 3e-3))
    assert np.all(bound <= 1e-6 * 1.05)
    assert np.all(certified_deltas(low, high, share, budgets * 0.99, 1e-6) > 1e-6)


def test_pchip_is_monotone_and_hits_its_knots() -> None:
    x, y = np.array([0.0, 1.0, 1.5, 4.0]), np.array([0.0, 0.1, 3.0, 3.1])
    assert pchip(x, y, x).tolist() == pytest.approx(y.tolist())
    assert np.all(np.diff(pchip(x, y, np.linspace(-1, 5, 200))) >= 0)
