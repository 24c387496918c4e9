"""The profile of one release: against 50-digit arithmetic, direct integration, and the convexity it relies on."""

from __future__ import annotations

import math
import random

import mpmath as mp
import numpy as np
import pytest
from scipy.integrate import quad

from evenhand.accounting.gaussian_profile import excess, loss_at, total_variation_gap

mp.mp.dps = 400
CDF = mp.ncdf


def exact(eps: float, q: float, noise: float, direction: str) -> mp.mpf:
    """Excess of the profile from its definition, in 400 digits, so that differences keep 100."""
    e, q, m = mp.mpf(eps), mp.mpf(q), 1 / mp.mpf(noise)
    if direction == "add":
        return mp.exp(e) * exact(-eps, q, noise, "remove")
    if direction == "replace":
        c = mp.exp(-m * m / 2)
        a = (1 - q) * (mp.exp(e) - 1) / (2 * q * c)
        t = mp.log(a + mp.sqrt(a * a + mp.exp(e))) / m
        value = (1 - q) * (1 - mp.exp(e)) * CDF(-t) + q * CDF(m - t) - mp.exp(e) * q * CDF(-m - t)
        return value - max(0, 1 - mp.exp(e))
    ratio = 1 + (mp.exp(e) - 1) / q
    if ratio <= 0:
        return mp.mpf(0)
    t = mp.log(ratio) / m + m / 2
    value = (1 - q) * CDF(-t) + q * CDF(m - t) - mp.exp(e) * CDF(-t)
    return value - max(0, 1 - mp.exp(e))


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
def test_excess_stays_within_its_declared_error(direction: str) -> None:
    rng = random.Random(1)
    for _ in range(400):
        q = rng.choice([1.0, math.exp(rng.uniform(math.log(1e-5), 0)), 1 - math.exp(rng.uniform(-12, -1))])
        noise = math.exp(rng.uniform(math.log(0.02), math.log(3e4)))
        t = rng.uniform(-9, 9 + (0 if direction == "add" else 1 / noise))
        eps = loss_at(t, q, noise, direction)  # type: ignore[arg-type]
        if abs(eps) > 400:
            continue
        g, error = excess(np.array([eps]), q, noise, direction)  # type: ignore[arg-type]
        truth = exact(eps, q, noise, direction)
        if truth < mp.mpf("1e-290"):
            continue
        assert abs(mp.mpf(float(g[0])) - truth) <= mp.mpf(float(error[0])) + mp.mpf("1e-300"), (eps, q, noise)
        assert error[0] <= 1e-6 * truth + 1e-9


@pytest.mark.parametrize(("q", "noise"), [(0.01, 1.0), (0.3, 0.5), (1.0, 2.0), (0.9, 5.0)])
@pytest.mark.parametrize("eps", [-1.5, -0.05, 0.0, 0.02, 0.7, 3.0])
@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
def test_excess_matches_direct_integration(q: float, noise: float, eps: float, direction: str) -> None:
    m = 1 / noise

    def phi(t: float, centre: float) -> float:
        return math.exp(-((t - centre) ** 2) / 2) / math.sqrt(2 * math.pi)

    def p(t: float) -> float:
        return (1 - q) * phi(t, 0) + q * phi(t, m)

    def r(t: float) -> float:
        return phi(t, 0) if direction != "replace" else (1 - q) * phi(t, 0) + q * phi(t, -m)

    first, second = (r, p) if direction == "add" else (p, r)
    ends = -12 - m, 12 + m
    points = np.linspace(*ends, 60).tolist()
    value, _ = quad(lambda t: max(0.0, first(t) - math.exp(eps) * second(t)), *ends, points=points, limit=800)
    g, _ = excess(np.array([eps]), q, noise, direction)  # type: ignore[arg-type]
    assert g[0] + max(0.0, 1 - math.exp(eps)) == pytest.approx(value, abs=2e-8)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_every_profile_is_convex_in_total_variation(relation: str) -> None:
    rng = random.Random(2)
    for _ in range(400):
        low, middle, high = sorted(math.exp(rng.uniform(math.log(0.02), math.log(8))) for _ in range(3))
        q = math.exp(rng.uniform(math.log(1e-4), 0))
        eps = np.array([rng.gauss(0, 1) * 3 for _ in range(8)])
        gap = total_variation_gap(low, high, relation)  # type: ignore[arg-type]
        share = total_variation_gap(low, middle, relation) / gap  # type: ignore[arg-type]
        for direction in ("remove", "add") if relation == "add_remove" else ("replace",):
            a, b, c = (excess(eps, q, 1 / m, direction)[0] for m in (low, middle, high))  # type: ignore[arg-type]
            assert np.all(b <= (a + share * (c - a)) * (1 + 1e-9) + 1e-300)


def test_every_profile_is_convex_in_the_rate() -> None:
    rng = random.Random(3)
    for _ in range(200):
        low, middle, high = sorted(math.exp(rng.uniform(math.log(1e-4), 0)) for _ in range(3))
        noise = math.exp(rng.uniform(math.log(0.1), math.log(30)))
        eps = np.array([rng.gauss(0, 1) for _ in range(8)])
        share = (middle - low) / (high - low)
        for direction in ("remove", "add", "replace"):
            a, b, c = (excess(eps, q, noise, direction)[0] for q in (low, middle, high))  # type: ignore[arg-type]
            assert np.all(b <= (a + share * (c - a)) * (1 + 1e-9) + 1e-300)
