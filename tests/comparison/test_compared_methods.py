"""Variants, claims and paired differences: what they accept, refuse and compute."""

from __future__ import annotations

import pytest

from evenhand.comparison import compared_methods, declared_claims, measures, sweep
from evenhand.comparison.declared_claims import FAILS, HOLDS, OPEN, SMALL, Claim
from evenhand.comparison.measures import payers, series
from evenhand.errors import UsageError
from evenhand.reporting.uncertainty import Split


def rows(*shares: float, records: int = 20_000) -> dict[int, dict]:
    half = {"a": records // 2, "b": records // 2}
    return {
        seed: {
            "accuracy": share,
            "records": records,
            "groups": {"a": share, "b": share / 2},
            "group_records": half,
            "owners": {"x": share / 4},
            "owner_records": {"x": records},
        }
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
        ({"claim": [{"text": "t", "left": "dpsgd", "right": 1, "matters": -1}]}, "matters=-1 cannot be used"),
    ],
)
def test_mistakes_are_named(values: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sweep.sweep(values).cells()


def test_measures_in_points() -> None:
    one = rows(0.8)
    assert series("gap", one) == {0: pytest.approx(40.0)}
    assert series("worst", one) == {0: pytest.approx(40.0)}
    assert series("owner:x", one) == series("worst_owner", one) == {0: pytest.approx(20.0)}
    assert series("auc", one) == {}
    assert series("cost:b", one, rows(1.0)) == {0: pytest.approx(10.0)}
    assert series("cost_gap", one, rows(1.0)) == {0: pytest.approx(10.0)}
    assert payers(one, rows(1.0)) == ("b", "a")
    assert series("cost", one, {}) == {}


def test_a_claim_holds_fails_or_stays_open() -> None:
    table = {"good": rows(0.80, 0.81, 0.82), "bad": rows(0.50, 0.51, 0.52), "wild": rows(0.1, 0.9, 0.7)}

    def verdict(*arguments: object, **more: object) -> str:
        return Claim("t", *arguments, **more).judged(table, {}).verdict

    assert verdict("good", "bad") == HOLDS
    assert verdict("bad", "good") == FAILS
    assert verdict("good", "wild") == OPEN
    assert verdict("bad", "good", direction="lower") == HOLDS
    assert verdict("good", "bad", margin=40.0) == FAILS
    assert verdict("good", "good", margin=-1.0) == HOLDS
    assert verdict("bad", "good", factor=0.5) == HOLDS
    assert verdict("good", 75) == HOLDS
    assert Claim("t", "good", "bad").judged({"good": rows(0.8), "bad": rows(0.5)}, {}).verdict == OPEN
    assert Claim("t", "good", "none").judged(table, {}).verdict == OPEN


def test_what_is_too_small_to_matter_is_said_so() -> None:
    shares = [0.8 + seed / 1000 for seed in range(10)]
    table = {"one": rows(*shares, records=10**6), "two": rows(*(share + 0.002 for share in shares), records=10**6)}
    assert Claim("t", "two", "one").judged(table, {}).verdict == SMALL
    assert Claim("t", "one", "two").judged(table, {}).verdict == SMALL
    assert Claim("t", "two", "one", matters=0.1).judged(table, {}).verdict == HOLDS
    assert Claim("t", "one", "two", matters=0.1).judged(table, {}).verdict == FAILS
    assert Claim("t", "one", "two", margin=-1.0).judged(table, {}).verdict == HOLDS, "costs less than a point"


def test_the_chance_of_few_records_leaves_a_claim_open() -> None:
    """The claim of +8.4 points on 41 held-out records that was chance: ten seeds on one split do not decide it."""
    gain = {
        name: rows(*(share + seed * slope for seed in range(10)), records=41)
        for name, share, slope in (("new", 0.575, 0.004), ("old", 0.5, 0.002))
    }
    judged = Claim("t", "new", "old").judged(gain, {})
    assert judged.verdict == OPEN
    assert judged.difference.value == pytest.approx(8.4)
    assert "more data would" in judged.power
    many = {name: rows(*(row["accuracy"] for row in table.values()), records=10**6) for name, table in gain.items()}
    assert Claim("t", "new", "old").judged(many, {}).verdict == HOLDS


def test_intervals_of_several_claims_hold_all_at_once() -> None:
    table = {"a": rows(0.6, 0.62, 0.64, 0.66), "b": rows(0.6, 0.6, 0.6, 0.6)}
    alone, among = (Claim("t", "a", "b").judged(table, {}, claims=number).difference for number in (1, 20))
    assert among.high - among.low > alone.high - alone.low
    resampled = Claim("t", "a", "b").judged(table, {}, Split(0.25)).difference
    fixed = {name: rows(*(row["accuracy"] for row in side.values()), records=10**9) for name, side in table.items()}
    plain = Claim("t", "a", "b").judged(fixed, {}).difference
    assert resampled.high - resampled.low > plain.high - plain.low


def test_pairs_use_the_seeds_that_both_have() -> None:
    left, right = {0: 5.0, 1: 6.0, 2: 100.0}, {0: 4.0, 1: 4.0}
    found = declared_claims.difference(left, right)
    assert (found.value, found.count) == (1.5, 2)
    assert declared_claims.claims([], ["a"]) == ()


def test_settings_in_a_name_leave_the_others_to_be_tuned() -> None:
    chosen = compared_methods.line("idp_sample:over=auto_s", {}, {"bound": 0.5, "most": 3.0}, {})
    assert chosen.settings == {"bound": 0.5}
    assert "over" not in chosen.known


def test_objectives_over_owners_sorted_from_the_worst() -> None:
    owners = {"a": 0.9, "b": 0.5, "c": 0.7, "d": 0.6}
    rows = {0: {"accuracy": 0.7, "owners": owners, "owner_records": dict.fromkeys(owners, 100)}}
    for measure, value in (
        ("worst_owners:1", 50.0),
        ("worst_owners:2", 55.0),
        ("worst_owners:9", 67.5),
        ("cvar_owners:0.375", (50 + 0.5 * 60) / 1.5),
        ("owa_owners:4,3,2,1", (4 * 50 + 3 * 60 + 2 * 70 + 90) / 10),
    ):
        assert measures.series(measure, rows) == {0: pytest.approx(value)}
    alone, three = (measures.chance(f"worst_owners:{k}", rows, Split()) for k in (1, 3))
    assert alone == pytest.approx(measures.chance("owner:b", rows, Split()))
    assert 0 < three < alone
    for wrong in ("worst_owners:0", "worst_owners:x", "cvar_owners:2", "owa_owners:-1,2", "worst_owners:1,2"):
        with pytest.raises(UsageError, match="from the worst served owner on"):
            measures.series(wrong, rows)
