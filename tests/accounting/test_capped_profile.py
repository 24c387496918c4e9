"""Persons whose records are each sampled by themselves: the accountant against others, and its own claims."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate, stats

from evenhand.accounting import accountant
from evenhand.accounting.calibration import calibrate
from evenhand.accounting.capped_profile import Mixture, capped_excess
from evenhand.accounting.gaussian_profile import Direction
from evenhand.errors import UsageError

CASES = [(0.01, 2.0, 300, 8, 1e-5), (0.1, 5.0, 50, 4, 1e-5), (0.5, 4.0, 1, 3, 1e-5), (0.02, 0.8, 40, 2, 1e-4)]


def exact(eps: float, rate: float, noise: float, cap: int, direction: Direction) -> mp.mpf:
    """Excess of the pair in 50 digits, its threshold found by bisection."""
    with mp.workdps(50):
        q, m, e = mp.mpf(rate), 1 / mp.mpf(noise), mp.mpf(eps) if direction == "remove" else -mp.mpf(eps)
        share = [mp.binomial(cap, k) * q**k * (1 - q) ** (cap - k) for k in range(cap + 1)]
        if e <= mp.log(share[0]):
            return mp.mpf(0)
        low, high = mp.mpf(-200), mp.mpf(500)
        for _ in range(200):
            t = (low + high) / 2
            loss = mp.log(sum(b * mp.exp(k * m * t - k * k * m * m / 2) for k, b in enumerate(share)))
            low, high = (t, high) if loss < e else (low, t)
        if e >= 0:
            g = sum(b * mp.ncdf(k * m - t) for k, b in enumerate(share)) - mp.exp(e) * mp.ncdf(-t)
        else:
            g = mp.exp(e) * mp.ncdf(t) - sum(b * mp.ncdf(t - k * m) for k, b in enumerate(share))
        return g if direction == "remove" else mp.exp(mp.mpf(eps)) * g


def agree(seed: int, trials: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(trials):
        rate, noise = 10 ** draw.uniform(-5, -0.05), 10 ** draw.uniform(-0.5, 1.5)
        cap, direction = int(draw.choice([1, 2, 3, 5, 10, 40])), draw.choice(["remove", "add"])
        loss = Mixture.of(rate, noise, cap).loss(np.array([draw.uniform(-9, 9)]))[0][0] * draw.choice([1.0, 1e-3, 0.3])
        eps = float(loss if direction == "remove" else -loss)
        value, error = (float(part[0]) for part in capped_excess(np.array([eps]), rate, noise, cap, direction))
        truth = exact(eps, rate, noise, cap, direction)
        assert abs(mp.mpf(value) - truth) <= mp.mpf(error), (rate, noise, cap, direction, eps)
        assert truth < 1e-13 or error <= 1e-6 * truth, "the error is small enough to be of use"


def test_the_excess_lies_within_its_error_of_fifty_digits() -> None:
    agree(0, 12)


@pytest.mark.slow
def test_the_excess_lies_within_its_error_at_many_points() -> None:
    agree(1, 2_000)


def theirs(rate: float, noise: float, count: int, cap: int, delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    share = stats.binom.pmf(np.arange(cap + 1), cap, rate)
    kept = share > 1e-15
    pld = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        standard_deviation=noise,
        sensitivities=[float(k) for k in np.flatnonzero(kept)],
        sampling_probs=list(share[kept] / share[kept].sum()),
        value_discretization_interval=1e-3,
    )
    return float(pld.self_compose(count).get_epsilon_for_delta(delta))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, (0.005, 3.0, 2000, 20, 1e-6), (0.3, 10.0, 100, 10, 1e-5)])
def test_epsilon_is_that_of_dp_accounting(case: tuple[float, float, int, int, float]) -> None:
    rate, noise, count, cap, delta = case
    ours = accountant.epsilon([(rate, noise, count)], delta, cap=cap)
    assert ours == pytest.approx(theirs(*case), rel=5e-4)


@pytest.mark.parametrize("case", CASES[:1])
def test_epsilon_of_one_case_is_that_of_dp_accounting(case: tuple[float, float, int, int, float]) -> None:
    rate, noise, count, cap, delta = case
    assert accountant.epsilon([(rate, noise, count)], delta, cap=cap) == pytest.approx(theirs(*case), rel=5e-4)


def composed_twice(rate: float, noise: float, cap: int, eps: float, direction: Direction) -> float:
    """Delta of two releases by integration over the outputs of the first: no loss distribution, no FFT."""
    pair = Mixture.of(rate, noise, cap)

    def inner(t: float) -> float:
        loss = float(pair.loss(np.array([t]))[0][0])
        left = eps - (loss if direction == "remove" else -loss)
        g = float(capped_excess(np.array([left]), rate, noise, cap, direction)[0][0])
        density = (pair.share * stats.norm.pdf(t - pair.shift)).sum() if direction == "remove" else stats.norm.pdf(t)
        return float(density) * (g + max(0.0, -math.expm1(left)))

    return float(integrate.quad(inner, -12, float(pair.shift[-1]) + 12, limit=100, epsabs=1e-9)[0])


@pytest.mark.parametrize(("rate", "noise", "cap"), [(0.2, 2.0, 3)])
def test_two_releases_have_the_delta_of_integration(rate: float, noise: float, cap: int) -> None:
    eps = 0.7
    truth = max(composed_twice(rate, noise, cap, eps, direction) for direction in ("remove", "add"))  # type: ignore[arg-type]
    bound = accountant.compose([(rate, noise, 2)], cap=cap).delta(eps)
    assert truth * (1 - 1e-7) <= bound <= truth * 1.01


def test_a_cap_of_one_is_the_accountant_of_records_and_it_grows_with_everything() -> None:
    one = accountant.epsilon([(0.05, 2.0, 100)], 1e-5)
    spent = [accountant.epsilon([(0.05, 2.0, 100)], 1e-5, cap=cap) for cap in (1, 2, 4, 8)]
    assert spent[0] == one
    assert spent == sorted(spent)
    assert len(set(spent)) == 4
    assert (
        accountant.epsilon([(0.06, 2.0, 100)], 1e-5, cap=4)
        > spent[2]
        > accountant.epsilon([(0.05, 2.1, 100)], 1e-5, cap=4)
    )
    in_all = accountant.epsilon([(1 - 0.95**4, 2.0 / 4, 100)], 1e-5)
    assert spent[2] < in_all, "drawn together they would cost more"


def test_releases_without_sampling_hold_all_records_of_the_person() -> None:
    assert accountant.epsilon([(1.0, 8.0, 1)], 1e-5, cap=4) == pytest.approx(accountant.epsilon([(1.0, 2.0, 1)], 1e-5))
    mixed = accountant.epsilon([(1.0, 40.0, 1), (0.05, 2.0, 100)], 1e-5, cap=4)
    assert mixed > accountant.epsilon([(0.05, 2.0, 100)], 1e-5, cap=4)


@pytest.mark.parametrize(("rate", "cap"), [(1 - 1e-6, 100), (0.9999, 400)])
def test_shares_too_small_for_a_float_are_no_nan(rate: float, cap: int) -> None:
    """That none of the person's records is sampled has a chance below 1e-324: nearly all are, in every release."""
    everything = accountant.epsilon([(1.0, 1.0, 5)], 1e-5)
    ours = accountant.epsilon([(rate, float(cap), 5)], 1e-5, cap=cap)
    assert everything * (1 - 1e-3) < ours < everything * (1 + 2e-4)


def test_many_levels_are_rounded_towards_more_loss() -> None:
    noises = np.linspace(2.0, 3.0, 120)
    many = accountant.epsilon([(0.05, float(noise), 2) for noise in noises], 1e-5, cap=4)
    least = accountant.epsilon([(0.05, 2.5, 240)], 1e-5, cap=4)
    most = accountant.epsilon([(0.05, 2.0, 240)], 1e-5, cap=4)
    few = accountant.epsilon([(0.05, float(noise), 8) for noise in noises[1::4]], 1e-5, cap=4)
    assert least < many < most
    assert many == pytest.approx(few, rel=0.03)


@pytest.mark.parametrize(("levels", "rates", "caps"), [(96, 3, [5]), (200, 3, [2, 5]), (120, 6, [5])])
def test_many_runs_of_unlike_rates_have_a_total(levels: int, rates: int, caps: list[int]) -> None:
    """A grid that is chosen for less than is composed has no room for epsilon: the total was infinite."""
    draw = np.random.default_rng(3)
    rate = 10 ** draw.uniform(-2.5, -0.7, rates)
    events = [(float(rate[i % rates]), float(draw.uniform(4, 14)), int(draw.integers(1, 4))) for i in range(levels)]
    cap = [int(draw.choice(caps)) for _ in events]
    count = sum(n for *_, n in events)
    most = [(float(rate.max()), 4.0, count), (1.0, 90.0, 1)]
    together = accountant.epsilon([*events, (1.0, 90.0, 1)], 1e-5, cap=[*cap, 5])
    assert together <= accountant.epsilon(most, 1e-5, cap=5)


def test_other_directions_and_fewer_records_stay_below_the_worst_pair() -> None:
    """Brute force over the plane: records of one person whose gradients point where they like."""
    draw = np.random.default_rng(0)
    rate, noise, cap = 0.3, 1.0, 3
    axis = np.arange(-9.0, 9.0, 0.06)
    x, y = np.meshgrid(axis, axis)
    q = np.exp(-0.5 * (x * x + y * y)) / (2 * np.pi) * 0.06**2
    for _ in range(12):
        count = int(draw.integers(1, cap + 1))
        vectors = draw.normal(size=(count, 2))
        vectors *= (draw.random(count) ** 0.3 / np.linalg.norm(vectors, axis=1) / noise)[:, None]
        p = np.zeros_like(q)
        for subset in range(2**count):
            chosen = [i for i in range(count) if subset >> i & 1]
            a, b = vectors[chosen].sum(axis=0) if chosen else (0.0, 0.0)
            mass = rate ** len(chosen) * (1 - rate) ** (count - len(chosen))
            p += mass * np.exp(-0.5 * ((x - a) ** 2 + (y - b) ** 2)) / (2 * np.pi) * 0.06**2
        for eps in (0.0, 0.4, 1.0):
            delta = max(np.maximum(p - math.exp(eps) * q, 0).sum(), np.maximum(q - math.exp(eps) * p, 0).sum())
            assert delta <= accountant.compose([(rate, noise, 1)], cap=cap).delta(eps) * (1 + 1e-6)


def test_calibration_meets_the_promise() -> None:
    scale = calibrate([(0.05, 1.0, 100)], 2.0, 1e-5, cap=6, fixed=[(1.0, 200.0, 1)])
    spent = accountant.epsilon([(0.05, scale, 100), (1.0, 200.0, 1)], 1e-5, cap=6)
    assert 1.99 < spent <= 2.0


def test_what_has_no_proof_is_refused() -> None:
    with pytest.raises(UsageError, match="no proof"):
        accountant.epsilon([(0.05, 2.0, 100)], 1e-5, cap=2, relation="replace_one")
    for wrong in (0, 1.5, 10_001):
        with pytest.raises(UsageError, match="cap"):
            accountant.epsilon([(0.05, 2.0, 100)], 1e-5, cap=wrong)  # type: ignore[arg-type]


def test_every_event_may_have_its_own_cap() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    share = stats.binom.pmf(np.arange(7), 6, 0.05)
    mixed = pld.from_mixture_gaussian_mechanism(
        4.0, [float(k) for k in range(7)], share.tolist(), value_discretization_interval=1e-3
    ).self_compose(60)
    single = pld.from_gaussian_mechanism(1.5, sampling_prob=0.1, value_discretization_interval=1e-3).self_compose(40)
    plain = pld.from_gaussian_mechanism(40.0 / 6, value_discretization_interval=1e-3)
    events = [(0.05, 4.0, 60), (0.1, 1.5, 40), (1.0, 40.0, 1)]
    ours = accountant.epsilon(events, 1e-5, cap=[6, 1, 6])
    assert ours == pytest.approx(mixed.compose(single).compose(plain).get_epsilon_for_delta(1e-5), rel=1e-3)
    assert accountant.epsilon(events, 1e-5) < ours < accountant.epsilon(events, 1e-5, cap=6)
    assert accountant.epsilon(events, 1e-5, cap=[6] * 3) == accountant.epsilon(events, 1e-5, cap=6)
    assert accountant.epsilon(events[1:2], 1e-5, cap=[1]) == accountant.epsilon(events[1:2], 1e-5)


@pytest.mark.parametrize("case", [(0.05, 2.5, 80, 2), (0.05, 2.5, 80, 5), (0.3, 6.0, 12, 3)])
def test_each_direction_is_that_of_dp_accounting(case: tuple[float, float, int, int]) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    rate, noise, count, cap = case
    share = stats.binom.pmf(np.arange(cap + 1), cap, rate).tolist()
    whole = pld.from_mixture_gaussian_mechanism(
        noise, list(map(float, range(cap + 1))), share, value_discretization_interval=1e-3
    ).self_compose(count)
    composed = accountant.compose([(rate, noise, count)], cap=cap)
    for direction, theirs_ in (("remove", whole._pmf_remove), ("add", whole._pmf_add)):
        ours = composed._direction_epsilon(direction, 1e-5, None, 1e-4)  # type: ignore[arg-type]
        assert ours == pytest.approx(theirs_.get_epsilon_for_delta(1e-5), rel=5e-4), direction
