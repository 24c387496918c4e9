"""Numbers computed independently; the accountant must reproduce them to 0.3 %."""

from __future__ import annotations

import math

import pytest

from evenhand.accounting.accountant import epsilon, merged_noise
from evenhand.accounting.calibration import calibrate, owner_bounds, owner_rates
from evenhand.accounting.renyi import zcdp_rho

CLOSE = 3e-3
Q, T = 64 / 60000, 93_750


def decay(kind: str, sigma: float) -> list[tuple[float, float, int]]:
    """The noise schedules of paper 004 over 100 epochs of 937.5 steps."""
    variance = {
        "none": lambda e: 1.0,
        "step": lambda e: 0.5 ** (e // 10),
        "linear": lambda e: 0.99**e,
        "time": lambda e: 1 / (1 + 0.01 * e),
    }[kind]
    edges = [round(i * T / 100) for i in range(101)]
    return [(Q, sigma * variance(e) ** 0.5, edges[e + 1] - edges[e]) for e in range(100)]


@pytest.mark.parametrize(("target", "sigma"), [(1, 1.4005), (3, 0.7631), (8, 0.5655)])
def test_constant_noise_of_mnist(target: float, sigma: float) -> None:
    assert calibrate([(Q, 1.0, T)], target, 1e-5) == pytest.approx(sigma, rel=CLOSE)


@pytest.mark.parametrize(
    ("kind", "sigmas"),
    [
        ("step", (17.98, 13.18, 10.31)),
        pytest.param("linear", (1.855, 1.048, 0.797), marks=pytest.mark.slow),
        pytest.param("time", (1.721, 0.953, 0.716), marks=pytest.mark.slow),
    ],
)
def test_decaying_noise_of_mnist(kind: str, sigmas: tuple[float, ...]) -> None:
    for target, sigma in zip((1, 3, 8), sigmas, strict=True):
        assert calibrate(decay(kind, 1.0), target, 1e-5) == pytest.approx(sigma, rel=CLOSE)


def test_the_printed_noise_of_paper_004_costs_a_quarter_of_a_million() -> None:
    spent = epsilon(decay("step", 0.1916), 1e-5)
    assert 242_560 <= spent == pytest.approx(263_000, rel=CLOSE)


@pytest.mark.parametrize(
    ("kind", "truths"),
    [
        ("none", (1_080, 16_016, 102_096)),
        ("step", (2_166, 21_490, 133_573)),
        pytest.param("linear", (1_144, 16_284, 103_654), marks=pytest.mark.slow),
        pytest.param("time", (1_110, 16_138, 102_803), marks=pytest.mark.slow),
    ],
)
def test_what_the_schedules_of_paper_004_really_spend(kind: str, truths: tuple[float, ...]) -> None:
    """Its table 2 composes tCDP once per epoch: 13 q^2 sum_e 1/(2 sigma_e^2) = rho."""
    weight = sum(1 / s**2 for _, s, _ in decay(kind, 1.0))
    for claimed, truth in zip((1, 3, 8), truths, strict=True):
        sigma = math.sqrt(13 * Q * Q * weight / (2 * zcdp_rho(claimed, 1e-5)))
        assert epsilon(decay(kind, sigma), 1e-5) == pytest.approx(truth, rel=CLOSE)


def test_shuffling_accounted_as_poisson_would_claim() -> None:
    assert epsilon([(64 / 60_000, 1.0, 9_375)], 1e-5) == pytest.approx(0.49, abs=0.005)
    assert epsilon([(256 / 10_000, 1.0, 391)], 1e-5) == pytest.approx(3.22, abs=0.01)


@pytest.mark.parametrize(
    ("shares", "sample", "rates", "scale", "bounds"),
    [
        ((1 / 3, 1 / 3, 1 / 3), 1.2485, (0.004599, 0.008619, 0.012383), 1.2979, (0.636, 1.047, 1.318)),
        ((0.54, 0.37, 0.09), 1.4793, (0.005785, 0.010836, 0.015558), 1.5285, (0.749, 1.233, 1.552)),
    ],
)
def test_individual_budgets(
    shares: tuple[float, ...], sample: float, rates: tuple[float, ...], scale: float, bounds: tuple[float, ...]
) -> None:
    sizes = [round(60_000 * share) for share in shares]
    got = owner_rates(sizes, [1, 2, 3], 512, [(1.0, 3516)], 1e-5)
    assert got[0] == pytest.approx(sample, rel=CLOSE)
    assert got[1] == pytest.approx(rates, rel=CLOSE)
    got = owner_bounds(sizes, [1, 2, 3], 512 / 60_000, [(1.0, 3516)], 1e-5)
    assert got[0] == pytest.approx(scale, rel=CLOSE)
    assert got[1] == pytest.approx(bounds, rel=CLOSE)


@pytest.mark.parametrize(
    ("target", "sigmas"), [(3, (0.919, 1.148, 1.435)), (8, (0.607, 0.758, 0.948)), (16, (0.475, 0.593, 0.742))]
)
def test_sad_phases(target: float, sigmas: tuple[float, ...]) -> None:
    last = round(626 / (1 + 0.9 + 0.81))
    lengths = (round(0.81 * last), round(0.9 * last), 626 - round(0.81 * last) - round(0.9 * last))
    shape = [(256 / 8012, 0.8 ** (2 - i), n) for i, n in enumerate(lengths)]
    scale = calibrate(shape, target, 1e-3)
    assert [scale * s for _, s, _ in shape] == pytest.approx(sigmas, rel=CLOSE)
    if target == 3:
        assert calibrate([(256 / 8012, 1.0, 626)], 3, 1e-3) == pytest.approx(1.089, rel=CLOSE)


def test_side_query_of_dpsgd_f_costs_half_a_percent() -> None:
    assert 1.067 / merged_noise(1.067, [10.0]) == pytest.approx(1.0057, abs=2e-4)


def test_replace_one_and_tuning_runs() -> None:
    assert epsilon([(0.01, 1.0, 1000)], 1e-5, relation="replace_one") == pytest.approx(2.84, rel=CLOSE)
    for runs, spent in ((1, 1.83), (5, 4.20), (20, 9.27)):
        assert epsilon([(0.01, 1.0, 1000)] * runs, 1e-5) == pytest.approx(spent, rel=CLOSE)


@pytest.mark.parametrize(
    ("events", "truth"),
    [([(0.01, 1.0, 1000)], 1.8282), ([(0.001, 1.0, 100_000)], 1.6372)],
)
def test_agreement_with_dp_accounting(events: list[tuple[float, float, int]], truth: float) -> None:
    assert truth * (1 - 1e-4) <= epsilon(events, 1e-5) <= truth * (1 + 3e-4)


@pytest.mark.parametrize(("query", "shortfall"), [(10.0, 0.008), (2.0, 0.17), (1.0, 0.42)])
def test_side_queries_as_separate_samples_would_be_too_low(query: float, shortfall: float) -> None:
    together = epsilon([(0.01, merged_noise(1.0, [query]), 1000)], 1e-5)
    apart = epsilon([(0.01, 1.0, 1000), (0.01, query, 1000)], 1e-5)
    assert 1 - apart / together == pytest.approx(shortfall, abs=0.006)
