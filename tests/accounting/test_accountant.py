"""The facade: exact cases, two-sided bounds, many levels, curves, and refusals."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
from scipy.integrate import dblquad
from scipy.special import ndtr

from evenhand.accounting.accountant import compose, curve, delta, dp_event, epsilon, merged_noise
from evenhand.errors import UsageError
from evenhand.testing import attack_check

Events = list[tuple[float, float, int]]


def gaussian_delta(eps: float, mu: float) -> float:
    return float(ndtr(mu / 2 - eps / mu) - math.exp(eps) * ndtr(-mu / 2 - eps / mu))


@pytest.mark.parametrize("eps", [0.0, 0.5, 2.0, 6.0])
def test_plain_releases_are_exact(eps: float) -> None:
    events: Events = [(1.0, 2.0, 3), (1.0, 5.0, 10)]
    mu = math.sqrt(3 / 4 + 10 / 25)
    assert delta(events, eps) == pytest.approx(gaussian_delta(eps, mu), rel=1e-10)
    assert delta(events, eps, relation="replace_one") == pytest.approx(gaussian_delta(eps, 2 * mu), rel=1e-10)
    assert epsilon(events, gaussian_delta(eps, mu)) == pytest.approx(eps, abs=1e-9)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_upper_and_lower_bounds_enclose_each_other_tightly(relation: str) -> None:
    rng = random.Random(5)
    for _ in range(25):
        steps = round(math.exp(rng.uniform(math.log(2), math.log(3000))))
        parts = sorted(rng.sample(range(1, steps), min(steps - 1, rng.choice([0, 1, 3]))))
        counts = [b - a for a, b in zip([0, *parts], [*parts, steps], strict=True)]
        rate = math.exp(rng.uniform(math.log(1e-3), math.log(0.9)))
        effort = rate * math.sqrt(steps)
        events = [(rate, max(0.4, effort * rng.uniform(0.5, 8)), n) for n in counts]
        level = 10 ** rng.uniform(-12, -3)
        low = attack_check.epsilon(events, level, relation=relation, rel=1e-6)  # type: ignore[arg-type]
        high = epsilon(events, level, relation=relation)  # type: ignore[arg-type]
        assert low <= high <= low * 1.004 + 2e-4, (events, level)


def test_a_plain_release_mixed_with_sampled_ones() -> None:
    events: Events = [(0.5, 2.0, 10), (1.0, 8.0, 7)]
    assert attack_check.epsilon(events, 1e-7) <= epsilon(events, 1e-7) <= attack_check.epsilon(events, 1e-7) * 1.0005


@pytest.mark.parametrize("level", [1e-3, 1e-6, 1e-9, 1e-12])
def test_delta_inverts_epsilon_down_to_1e_12(level: float) -> None:
    spent = compose([(0.01, 1.0, 1000)])
    assert spent.delta(spent.epsilon(level)) == pytest.approx(level, rel=2e-3)
    assert spent.profile([spent.epsilon(level)])[0] == pytest.approx(level, rel=5e-3)


@pytest.mark.parametrize("span", [1.2, 3.0, 20.0])
def test_many_levels_cost_at_least_the_exact_and_hardly_more(span: float, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [(0.02, 0.7 * span ** (i / 80), 5) for i in range(80)]
    mixed = epsilon(events, 1e-6)
    monkeypatch.setattr("evenhand.accounting.noise_levels._EXACT", 100)
    one_by_one = epsilon(events, 1e-6)
    assert one_by_one * (1 - 5e-5) <= mixed <= one_by_one * 1.0008


def test_many_rates_and_levels_stay_above_the_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    events = [(rng.uniform(0.01, 0.02), rng.uniform(0.9, 1.4), 4) for _ in range(70)]
    mixed = epsilon(events, 1e-5)
    monkeypatch.setattr("evenhand.accounting.noise_levels._EXACT", 100)
    one_by_one = epsilon(events, 1e-5)
    assert one_by_one * (1 - 5e-5) <= mixed <= one_by_one * 1.002


def test_merged_side_queries_are_one_gaussian() -> None:
    """Brute force: a gradient and a query on one sample, integrated in two dimensions."""
    q, grad, query, eps = 0.2, 1.0, 2.0, 0.3

    def gap(x: float, y: float) -> float:
        base = math.exp(-(x * x + y * y) / 2) / (2 * math.pi)
        ratio = 1 - q + q * math.exp(x / grad + y / query - 0.5 / grad**2 - 0.5 / query**2)
        return base * max(0.0, ratio - math.exp(eps))

    brute, _ = dblquad(gap, -8, 9, -8, 9, epsabs=1e-7, epsrel=1e-6)
    assert delta([(q, merged_noise(grad, [query]), 1)], eps) == pytest.approx(brute, rel=1e-4)


def test_merged_edge_cases() -> None:
    assert merged_noise(1.0, []) == 1.0
    assert merged_noise(math.inf, []) == math.inf
    assert merged_noise(1.0, [0.0]) == 0.0
    assert merged_noise(1.0, [math.inf]) == 1.0


def test_mu_covers_the_profile_and_is_exact_for_a_gaussian() -> None:
    assert compose([(1.0, 2.0, 4)]).mu(1e-6) == pytest.approx(1.0, rel=2e-3)
    spent = compose([(0.01, 1.0, 1000)])
    mu = spent.mu(1e-5)
    eps = np.linspace(0, spent.epsilon(1e-5), 77)
    assert np.all([gaussian_delta(e, mu) for e in eps] >= spent.profile(eps))
    assert any(gaussian_delta(e, mu * 0.99) < d for e, d in zip(eps, spent.profile(eps), strict=True))


def test_guess_rate() -> None:
    assert compose([]).guess_rate(0.01) == pytest.approx(0.01)
    assert compose([(0.5, 0.0, 1)]).guess_rate() == 1.0
    exact = float(ndtr(1 - 2.3263478740408408))
    assert exact <= compose([(1.0, 1.0, 1)]).guess_rate(0.01) <= exact * 1.01


def test_curve_is_monotone_safe_and_ends_at_the_whole() -> None:
    events: Events = [(0.01, 2.0, 500), (0.02, 1.5, 0), (0.01, 1.0, 500)]
    knots = curve(events, 1e-5, points=12)
    steps, spent = zip(*knots, strict=True)
    assert list(steps) == sorted(set(steps))
    assert steps[-1] == 1000
    assert list(spent) == sorted(spent)
    assert spent[-1] == epsilon(events, 1e-5)
    for count, value in knots:
        prefix = [(0.01, 2.0, min(count, 500)), (0.01, 1.0, max(0, count - 500))]
        assert attack_check.epsilon(prefix, 1e-5) <= value
    assert curve([], 1e-5) == []


def test_limits() -> None:
    assert epsilon([], 1e-5) == 0
    assert epsilon([(0.1, 1.0, 0)], 1e-5) == 0
    assert epsilon([(0.1, math.inf, 9)], 1e-5) == 0
    assert epsilon([(0.1, 0.0, 1)], 1e-5) == math.inf
    assert epsilon([(0.1, 0.0, 0)], 1e-5) == 0
    assert delta([(0.1, 0.0, 1)], 3.0) == 1
    assert delta([], 3.0) == 0
    assert epsilon([(1e-7, 1.0, 1)], 1e-5) == 0
    assert 0 <= delta([(0.01, 1.0, 1000)], 500.0) < 1e-15


@pytest.mark.parametrize(
    ("events", "level"),
    [
        ([(0.0, 1.0, 1)], 1e-5),
        ([(1.1, 1.0, 1)], 1e-5),
        ([(math.nan, 1.0, 1)], 1e-5),
        ([(0.1, -1.0, 1)], 1e-5),
        ([(0.1, math.nan, 1)], 1e-5),
        ([(0.1, True, 1)], 1e-5),
        ([(0.1, 1.0, -1)], 1e-5),
        ([(0.1, 1.0, 1.5)], 1e-5),
        ([(0.1, 1.0, True)], 1e-5),
        ([(0.1, 1.0)], 1e-5),
        ([(0.1, "1", 1)], 1e-5),
        ([(0.1, 1.0, 1)], 0.0),
        ([(0.1, 1.0, 1)], 1.0),
        ([(0.1, 1.0, 1)], math.nan),
        ([(0.1, 1.0, 1)], True),
    ],
)
def test_unusable_input_is_refused(events: Events, level: float) -> None:
    with pytest.raises(UsageError):
        epsilon(events, level)


def test_other_refusals() -> None:
    with pytest.raises(UsageError, match="relation"):
        epsilon([(0.1, 1.0, 1)], 1e-5, relation="swap")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="epsilon"):
        delta([(0.1, 1.0, 1)], -1.0)
    with pytest.raises(UsageError, match="epsilons"):
        compose([(0.1, 1.0, 1)]).profile([-1.0])
    with pytest.raises(UsageError, match="false_alarms"):
        compose([(0.1, 1.0, 1)]).guess_rate(2.0)
    with pytest.raises(UsageError, match="points"):
        curve([(0.1, 1.0, 1)], 1e-5, points=0)
    with pytest.raises(UsageError, match="noise"):
        merged_noise(-1.0, [])


def test_export_without_dp_accounting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UsageError, match=r"pip install 'evenhand\[dp-accounting\]'"):
        dp_event([(0.01, 1.0, 10)])


def test_public_names_are_the_same_in_accounting_and_in_privacy() -> None:
    import evenhand
    from evenhand import accounting, privacy

    for name in accounting.__all__:
        assert getattr(privacy, name) is getattr(accounting, name)
        assert getattr(evenhand, name, getattr(accounting, name)) is getattr(accounting, name)


def test_export_to_dp_accounting_means_the_same() -> None:
    from dp_accounting.pld import PLDAccountant

    events: Events = [(0.05, 1.5, 40), (1.0, 9.0, 2)]
    theirs = PLDAccountant(value_discretization_interval=1e-3).compose(dp_event(events)).get_epsilon(1e-5)
    assert epsilon(events, 1e-5) == pytest.approx(theirs, rel=1e-3)


def test_the_accountant_is_light() -> None:
    code = (
        "import sys; from evenhand.accounting.accountant import epsilon; epsilon([(0.01, 1.0, 1000)], 1e-5);"
        "heavy = ('torch', 'scipy.stats', 'dp_accounting', 'sklearn', 'scipy.interpolate');"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("noise", [1e-9, 1e-155, 1e-310])
def test_noise_that_protects_nothing_is_infinite_and_answered_at_once(noise: float, relation: str) -> None:
    for events in ([(0.5, noise, 1)], [(0.01, noise, 10)]):
        assert math.isinf(epsilon(events, 1e-5, relation=relation))  # type: ignore[arg-type]


def test_levels_of_very_different_loss_share_a_grid_that_fits() -> None:
    assert epsilon([(8.65e-6, 0.04693, 150), (8.65e-6, 0.067, 300)], 1e-9) > 100


def test_mu_and_guess_rate_at_the_ends() -> None:
    assert compose([(1.0, 1.0, 300)]).mu(1e-5) == pytest.approx(math.sqrt(300), rel=0.01)
    assert compose([(1.0, 0.05, 1)]).mu(1e-5) >= 20
    assert compose([(1.0, 1.0, 1)]).guess_rate(0.0) < 1e-6
    assert compose([]).guess_rate(0.0) == 0.0


def test_many_plain_releases_round_towards_more_loss() -> None:
    exact = epsilon([(1.0, 300.0 / math.sqrt(100_000), 1)], 1e-5)
    assert epsilon([(1.0, 300.0, 1)] * 100_000, 1e-5) >= exact * (1 - 1e-15)
