"""Spend moves the right way in every argument (up to the accuracy of the grid, 2e-4)."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.accounting.accountant import compose, epsilon

SLACK = 2e-4
LEVELS = st.lists(
    st.tuples(st.floats(-7, -0.1).map(math.exp), st.floats(-0.7, 3).map(math.exp), st.integers(1, 400)),
    min_size=1,
    max_size=4,
)
DELTAS = st.floats(-27, -5).map(math.exp)
FEW = settings(max_examples=25, deadline=None, derandomize=True)


def at_most(small: float, large: float) -> bool:
    return small <= large * (1 + SLACK) + 1e-7


@FEW
@given(LEVELS, DELTAS, st.floats(1.01, 1.5))
def test_less_noise_costs_more(events: list[tuple[float, float, int]], delta: float, factor: float) -> None:
    assert at_most(epsilon(events, delta), epsilon([(q, s / factor, n) for q, s, n in events], delta))


@FEW
@given(LEVELS, DELTAS, st.floats(1.01, 1.5))
def test_a_higher_rate_costs_more(events: list[tuple[float, float, int]], delta: float, factor: float) -> None:
    assert at_most(epsilon(events, delta), epsilon([(min(1.0, q * factor), s, n) for q, s, n in events], delta))


@FEW
@given(LEVELS, DELTAS, st.integers(1, 50))
def test_more_releases_cost_more(events: list[tuple[float, float, int]], delta: float, more: int) -> None:
    (q, s, n), *rest = events
    assert at_most(epsilon(events, delta), epsilon([(q, s, n + more), *rest], delta))


@FEW
@given(LEVELS, DELTAS, st.floats(1.05, 10))
def test_a_smaller_delta_costs_more(events: list[tuple[float, float, int]], delta: float, factor: float) -> None:
    spent = compose(events)
    assert at_most(spent.epsilon(min(0.5, delta * factor)), spent.epsilon(delta))


@FEW
@given(LEVELS, st.floats(0, 5), st.floats(0.01, 1))
def test_delta_falls_with_epsilon(events: list[tuple[float, float, int]], eps: float, more: float) -> None:
    spent = compose(events)
    low, high = spent.delta(eps + more), spent.delta(eps)
    assert low <= high * (1 + 1e-2) + 1e-15


@FEW
@given(LEVELS, DELTAS)
def test_replace_one_costs_at_least_add_remove_and_order_does_not_matter(
    events: list[tuple[float, float, int]], delta: float
) -> None:
    spent = epsilon(events, delta)
    assert at_most(spent, epsilon(events, delta, relation="replace_one"))
    assert epsilon(events[::-1], delta) == spent
