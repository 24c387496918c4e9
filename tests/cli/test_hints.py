"""Hints come from facts and only after a run that could be better."""

from __future__ import annotations

import pytest

from evenhand.accounting.budgets import Privacy
from evenhand.cli import hints
from evenhand.mechanism.make_plan import Plan, plan
from evenhand.types import Facts


@pytest.fixture(scope="module")
def made() -> Plan:
    facts = Facts(2000, (("all", 2000),), labels=("no", "yes"))
    return plan("dpsgd", Privacy(3, 1e-4), data=facts, epochs=5, batch_size=200)


def line(accuracy: float, **groups: tuple[float, int]) -> dict:
    return {
        "accuracy": accuracy,
        "groups": {name: value for name, (value, _) in groups.items()},
        "group_records": {name: count for name, (_, count) in groups.items()},
    }


def test_a_good_run_gets_none(made: Plan) -> None:
    assert hints.after(made, 1000, [line(value) for value in (0.7, 0.89, 0.9, 0.9, 0.9)]) == []
    assert hints.after(made, 1000, []) == []


@pytest.mark.parametrize(
    ("parameters", "curve", "words"),
    [
        (10**8, [0.5, 0.5], "--batch-size"),
        (100, [0.5, 0.7, 0.6], "fell by 10 points"),
        (100, [0.5, 0.6, 0.7, 0.8], "still rising"),
        (100, [0.55, 0.55, 0.55, 0.55], "not far above guessing (50%)"),
    ],
)
def test_a_poor_run_gets_the_hint_that_fits(made: Plan, parameters: int, curve: list[float], words: str) -> None:
    found = hints.after(made, parameters, [line(value) for value in curve])
    assert words in found[0]


def test_a_group_that_pays_is_named_if_its_records_can_tell(made: Plan) -> None:
    assert hints.after(made, 100, [line(0.9, large=(0.95, 900), small=(0.6, 12))]) == []
    found = hints.after(made, 100, [line(0.9, large=(0.95, 900), small=(0.6, 80))])
    assert "'small' is served 35 points worse" in found[0]


def test_moving_the_answers_is_offered_where_it_lifts_the_worst_class(made: Plan) -> None:
    plain, moved = {"tau": 0.0, "accuracy": 0.9, "worst": 0.6}, {"tau": 2.5, "accuracy": 0.88, "worst": 0.9}
    last = line(0.9, large=(0.95, 900), small=(0.6, 80)) | {"frontier": [plain, moved]}
    assert "from 60% to 90%, all records from 90% to 88%" in hints.for_nothing(last, "run")[0]
    assert hints.after(made, 100, [last]) == [], "methods are not what such a run needs"
    for other in ({"frontier": [plain, moved | {"worst": 0.63}]}, {"frontier": [plain, moved | {"worst": None}]}, {}):
        assert hints.for_nothing(last | {"frontier": []} | other, "run") == []
    assert hints.for_nothing(last | {"goal": "balanced", "tau": 2.0}, "run") == []


def test_a_good_run_has_nothing_to_mind(made: Plan) -> None:
    assert hints.cautions(made, made.steps, [line(value, a=(0.9, 30)) for value in (0.7, 0.9, 0.9)]) == []
    assert hints.cautions(made, made.steps, []) == []


def test_stopping_by_held_out_curves_is_cautioned_against(made: Plan) -> None:
    (early,) = hints.cautions(made, made.steps - 1, [line(0.7), line(0.9)])
    assert f"{made.steps - 1} of {made.steps} planned steps" in early
    assert "held-out records, which no epsilon covers" in early
    (fallen,) = hints.cautions(made, made.steps, [line(0.9), line(0.7)])
    assert "earlier evaluation was better" in fallen
    assert hints.cautions(made, made.steps - 1, []) == []


def test_tiny_groups_are_named_even_a_single_one(made: Plan) -> None:
    (found,) = hints.cautions(made, made.steps, [line(0.9, **{f"g{i}": (0.9, 29 + (i > 4)) for i in range(9)})])
    assert "5 group(s) have fewer than 30" in found
    assert found.endswith("'g0', 'g1', 'g2' and 2 more")
    assert "1 group(s)" in hints.cautions(made, made.steps, [line(0.9, all=(0.9, 3))])[0]


def test_hidden_groups_are_counted_and_where_to_see_them_is_said(made: Plan) -> None:
    left_out = {"least": 10, "groups": ["rare", "usual"], "owners": []}
    (found,) = hints.cautions(made, made.steps, [{**line(0.9, a=(0.9, 300)), "left_out": left_out}])
    assert found.startswith("2 group(s) are not shown: one has fewer than 10 held-out records")
    assert "evenhand report RUN --full" in found
    assert "rare" not in found
