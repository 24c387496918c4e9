"""Variants, claims and paired differences: what they accept, refuse and compute."""

from __future__ import annotations

import pytest

from evenhand.comparison import declared_claims, sweep
from evenhand.comparison.declared_claims import FAILS, HOLDS, OPEN, Claim
from evenhand.errors import UsageError


def rows(*shares: float) -> dict[int, dict]:
    return {
        seed: {"accuracy": share, "groups": {"a": share, "b": share / 2}, "owners": {"x": share / 4}}
        for seed, share in enumerate(shares)
    }


def test_variants_are_lines_with_settings_of_their_own() -> None:
    made = sweep.sweep(
        {
            "variants": {
                "reversed": {"method": "sad", "settings": {"noise": 1.25}},
                "slow": {"method": "dpsgd", "lr": 0.01},
            },
            "methods": ["sad"],
            "settings": {"bound": 0.5},
            "seeds": 1,
            "epochs": 2,
        }
    )
    found = {cell.method: cell.config for cell in made.cells()}
    assert list(found) == ["sad", "reversed", "slow"]
    assert dict(found["reversed"].settings) == {"bound": 0.5, "noise": 1.25}
    assert (found["reversed"].method, found["slow"].method, found["slow"].lr) == ("sad", "dpsgd", 0.01)
    assert found["sad"].lr != 0.01


def test_a_variant_may_promise_more_privacy_never_less() -> None:
    values = {"owners": "label", "budgets": {"a": 1.0, "b": 4.0}, "methods": ["idp_sample"], "seeds": 1}
    lower = {**values, "variants": {"low": {"method": "idp_sample", "budgets": {"b": 2.0}}}}
    assert [dict(cell.config.budgets) for cell in sweep.sweep(lower).cells()] == [
        {"a": 1.0, "b": 4.0},
        {"a": 1.0, "b": 2.0},
    ]
    for budgets, words in (({"b": 8.0}, "more of 'b' than was promised"), ({"c": 1.0}, "no owner with a budget")):
        higher = {**values, "variants": {"high": {"method": "idp_sample", "budgets": budgets}}}
        with pytest.raises(UsageError, match=words):
            sweep.sweep(higher).cells()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"variants": {"x": {"lr": 1.0}}}, "must say whose it is"),
        ({"variants": {"x": {"method": "dpsgd", "epsilon": 9.0}}}, "no key of the variant"),
        ({"variants": {"x": {"method": "dpsgd", "settings": {"bond": 1}}}}, "Did you mean 'bound'"),
        ({"baseline": "psac"}, "no method to compare with as baseline"),
        ({"tune": [1]}, "takes a table"),
        ({"claim": [{"text": "t", "left": "dpsgd"}]}, "takes text, left, right"),
        ({"claim": [{"text": "t", "left": "dpsgd", "right": "psac"}]}, "no method of a claim"),
        ({"claim": [{"text": "t", "left": "dpsgd", "right": 1, "measure": "luck"}]}, "no measure called 'luck'"),
        ({"claim": [{"text": "t", "left": "dpsgd", "right": 1, "direction": "up"}]}, "no direction"),
        ({"claim": [{"text": "t", "left": "dpsgd", "right": 1, "margin": "5"}]}, "factor and margin are numbers"),
    ],
)
def test_mistakes_are_named(values: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sweep.sweep(values).cells()


def test_measures_in_points() -> None:
    one = rows(0.8)
    assert declared_claims.series("gap", one) == {0: pytest.approx(40.0)}
    assert declared_claims.series("worst", one) == {0: pytest.approx(40.0)}
    assert (
        declared_claims.series("owner:x", one) == declared_claims.series("worst_owner", one) == {0: pytest.approx(20.0)}
    )
    assert declared_claims.series("auc", one) == {}
    assert declared_claims.series("cost:b", one, rows(1.0)) == {0: pytest.approx(10.0)}
    assert declared_claims.series("cost_gap", one, rows(1.0)) == {0: pytest.approx(10.0)}
    assert declared_claims.payers(one, rows(1.0)) == ("b", "a")
    assert declared_claims.series("cost", one, {}) == {}


def test_a_claim_holds_fails_or_stays_open() -> None:
    table = {"good": rows(0.80, 0.81, 0.82), "bad": rows(0.50, 0.51, 0.52), "wild": rows(0.1, 0.9, 0.7)}

    def verdict(*arguments: object, **more: object) -> str:
        return Claim("t", *arguments, **more).judged(table, {})[0]

    assert verdict("good", "bad") == HOLDS
    assert verdict("bad", "good") == FAILS
    assert verdict("good", "wild") == OPEN
    assert verdict("bad", "good", direction="lower") == HOLDS
    assert verdict("good", "bad", margin=40.0) == FAILS
    assert verdict("good", "good", margin=-1.0) == HOLDS
    assert verdict("bad", "good", factor=0.5) == HOLDS
    assert verdict("good", 75) == HOLDS
    assert Claim("t", "good", "bad").judged({"good": rows(0.8), "bad": rows(0.5)}, {})[0] == OPEN
    assert Claim("t", "good", "none").judged(table, {})[0] == OPEN


def test_pairs_use_the_seeds_that_both_have() -> None:
    left, right = {0: 5.0, 1: 6.0, 2: 100.0}, {0: 4.0, 1: 4.0}
    found = declared_claims.difference(left, right)
    assert (found.value, found.count) == (1.5, 2)
    assert declared_claims.claims([], ["a"]) == ()
