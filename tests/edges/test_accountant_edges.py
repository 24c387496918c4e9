"""The accountant where numbers are extreme: tiny rates are tight and never low; no command line ends in a traceback."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from scipy.special import ndtr

import evenhand as eh
from commands import evenhand
from evenhand.accounting.accountant import merged_noise


def epsilon_of_the_largest(rate: float, noise: float, count: int, delta: float) -> float:
    """Epsilon that the test "some release is larger than c" needs, at the best c: a lower bound on the exact one.

    Where single large outputs decide epsilon, as with tiny rates and little noise, it is almost exact.
    """
    t = np.linspace(0.5 / noise - 1, 1 / noise + 12, 20_001)
    out, within = ndtr(-t), (1 - rate) * ndtr(-t) + rate * ndtr(1 / noise - t)
    none, fewer = count * np.log1p(-out), count * np.log1p(-within)
    more, false_alarms = -np.exp(none) * np.expm1(fewer - none), -np.expm1(none)
    seen = (more > delta) & (false_alarms > 0)
    return float(np.log1p((more - delta)[seen] / false_alarms[seen]).max(initial=0.0))


@pytest.mark.parametrize(
    ("rate", "noise", "count", "delta", "within"),
    [
        (3e-7, 0.5, 100_000, 1e-9, 1.05),
        (1e-8, 0.5, 1_000, 1e-9, 1.05),
        pytest.param(1e-8, 0.5, 10_000_000, 1e-9, 1.10, marks=pytest.mark.slow),
        pytest.param(3e-7, 0.5, 10_000_000, 1e-9, 1.10, marks=pytest.mark.slow),
        (1e-6, 0.5, 100_000, 1e-9, 1.05),
    ],
)
def test_at_tiny_rates_epsilon_is_near_what_an_attack_needs_and_never_below(
    rate: float, noise: float, count: int, delta: float, within: float
) -> None:
    found, least = eh.epsilon([(rate, noise, count)], delta), epsilon_of_the_largest(rate, noise, count, delta)
    assert least <= found <= within * least


def test_no_noise_is_an_infinite_epsilon_and_exit_code_two() -> None:
    shown = evenhand("epsilon", "--rate", "0.01", "--noise", "0", "--steps", "1000")
    assert shown.returncode == 2
    assert "epsilon infinite" in shown.stdout
    told = evenhand("epsilon", "--rate", "0.01", "--noise", "0", "--steps", "1000", "--json")
    assert told.returncode == 2
    assert json.loads(told.stdout)["epsilon"] == "infinite"


RATES, NOISES = ("1", "0.01", "1e-9", "1e-300"), ("0", "1e-300", "1e-6", "0.01", "1e300", "inf", "nan", "-1", "-0")
STEPS = ("0", "1", "1000000000000000", "9999999999999999999999")


@pytest.mark.parametrize(("rate", "noise", "steps"), list(itertools.product(RATES, NOISES, STEPS)))
def test_extreme_numbers_end_in_an_answer_or_one_line(rate: str, noise: str, steps: str) -> None:
    shown = evenhand("epsilon", "--rate", rate, "--noise", noise, "--steps", steps)
    assert shown.returncode in (0, 2)
    assert len((shown.stdout + shown.stderr).strip().splitlines()) == 1 or "Usage:" in shown.stderr
    assert ("infinite" in shown.stdout or shown.stdout == "") == (shown.returncode == 2)


@pytest.mark.parametrize(
    "flags",
    [
        "--rate 2 --noise 1 --steps 1",
        "--rate 0 --noise 1 --steps 1",
        "--rate 0.1 --noise 1 --steps -1",
        "--rate 0.1 --noise 1 --steps 10 --delta 0",
        "--rate 0.1 --noise 1 --steps 10 --delta 1",
        "--rate 0.1 --noise 1 --steps 10 --delta 1e-300",
        "--rate 0.1 --noise 1 --steps 10 --delta nan",
        "--records 1 --batch-size 1 --epochs 1 --noise 1e-300",
        "--records 1000 --batch-size 1e-300 --epochs 1e-300 --noise 1",
        "--records 1000 --batch-size 1e-300 --epochs 1 --noise 1",
        "--records 1000 --batch-size 2000 --epochs 1 --noise 1",
        "--records 1000 --batch-size 10 --epochs 1e300 --noise 1",
        "--records 1000 --batch-size 10 --epochs 1e-300 --noise 1",
        "--records 1000 --batch-size 10 --epochs 10 --noise 1 --schedule step --decay 1e-300",
        "--records 1000 --batch-size 10 --epochs 10 --noise 1 --schedule linear --decay 1e-300",
        "--records 1000 --batch-size 10 --epochs 10 --noise 1e300 --schedule time --decay 1e300",
        "--as-published 004 --records 1000 --batch-size 10 --epochs 10 --noise 0",
        "--as-published 004 --records 1000 --batch-size 10 --epochs 10 --noise 1e-300",
        "--as-published 003 --records 1000 --batch-size 10 --epochs 10 --noise 0",
        "--as-published 003 --records 1000 --batch-size 10 --epochs 10 --noise 1e-300",
        "--as-published 000 --records 1000 --batch-size 10 --epochs 10 --epsilon 0",
        "--as-published 000 --records 1000 --batch-size 10 --epochs 10 --epsilon 1e-300",
    ],
)
def test_extreme_settings_end_in_an_answer_or_an_error_that_is_meant(flags: str) -> None:
    assert evenhand("epsilon", *flags.split()).returncode in (0, 2)


@pytest.mark.parametrize(
    ("noises", "expected"),
    [
        ((1e-300, 1e-300), 1e-300 / math.sqrt(2)),
        ((1e200, 1e200), 1e200 / math.sqrt(2)),
        ((1e-200, 1.0), 1e-200),
        ((math.inf, math.inf), math.inf),
        ((0.0, 1.0), 0.0),
    ],
)
def test_noises_of_any_size_merge(noises: tuple[float, float], expected: float) -> None:
    assert merged_noise(noises[0], [noises[1]]) == pytest.approx(expected)
