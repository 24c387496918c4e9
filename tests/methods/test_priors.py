"""Priors from noisy counts: floors, shares and offsets at the edges."""

from __future__ import annotations

import math

import pytest

from evenhand.errors import UsageError
from evenhand.methods.priors import Prior


@pytest.mark.parametrize("count", [-40.0, 0.0, 1.0, 5.0])
def test_a_label_that_looks_empty_gets_a_bounded_offset(count: float) -> None:
    prior = Prior(((6000.0, count),), noise=20.0)
    assert prior.floored() == ((6000.0, 40.0),)
    assert prior.offsets()[0][1] == pytest.approx(math.log(40 / 6040))


def test_shares_of_a_thousand_labels_add_up() -> None:
    counts = tuple(float(i % 7) for i in range(1000))
    (shares,) = Prior((counts,), noise=20.0).shares()
    assert sum(shares) == pytest.approx(1.0)
    assert len(set(shares)) == 1, "all counts lie below the floor: nothing is known, so nothing is preferred"


def test_counts_and_shares_may_be_declared() -> None:
    assert Prior.declared([9, 1]).offsets()[0] == pytest.approx(Prior.declared([0.9, 0.1]).offsets()[0])
    assert Prior.declared({"no": 9, "yes": 1}).shares() == ((0.9, 0.1),)
    with pytest.raises(UsageError, match="not all of them 0"):
        Prior.declared([0, 0])


def test_each_label_has_odds_of_its_own() -> None:
    prior = Prior(((10.0, 90.0, 200.0),), noise=5.0, kind="each label", records=100)
    low, high, beyond = prior.offsets()[0]
    assert low == pytest.approx(-high)
    assert beyond == pytest.approx(-low), "a noisy count above the number of records is taken for less"


def test_groups_are_pooled_with_their_noise() -> None:
    prior = Prior(((30.0, 10.0), (5.0, 55.0)), noise=3.0, kind="labels by group")
    assert prior.pooled() == Prior(((35.0, 65.0),), noise=3.0 * math.sqrt(2))
    assert prior.shares()[0] == pytest.approx((0.75, 0.25))
