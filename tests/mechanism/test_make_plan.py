from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from evenhand.accounting import accountant
from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy
from evenhand.errors import UsageError
from evenhand.mechanism.make_plan import Plan, default_delta, plan
from evenhand.methods.catalogue import Method, catalogue, method
from evenhand.methods.queries import Query
from evenhand.methods.rules import BatchRule, Clip
from evenhand.methods.schedules import Schedule
from evenhand.types import Facts, Level, State, Stats

FACTS = Facts(1000, (("strict", 400), ("open", 600)), groups=("a", "b"), labels=("0", "1"), inputs="(3,) float32")


@dataclass(frozen=True)
class Counts(Query):
    name = "counts"

    def width(self, facts: Facts) -> int:
        return len(facts.groups)

    def value(self, rows: Stats, state: State) -> Tensor:
        return (torch.arange(2) == rows.group).double()


def made(privacy: object = Privacy(3, 1e-5), **changes: object) -> Plan:
    arguments = {"data": FACTS, "epochs": 10, "batch_size": 100} | changes
    return plan(arguments.pop("method", "dpsgd"), privacy, **arguments)  # type: ignore[arg-type]


def test_steps_rate_and_epsilon_follow_from_the_promise() -> None:
    found = made(epochs=10.05)
    assert found.steps == math.ceil(10.05 * 1000 / 100)
    assert found.rates == (0.1, 0.1)
    assert found.epsilons[0] is not None
    assert 3 * (1 - 1e-3) <= found.epsilons[0] <= 3


def test_the_digest_covers_what_decides_privacy_and_survives_json() -> None:
    found = made()
    again = Plan.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert again.digest == found.digest
    changed = [
        dataclasses.replace(found, delta=1e-6),
        dataclasses.replace(found, expected_batch=101.0),
        dataclasses.replace(found, rates=(0.1, 0.2)),
        dataclasses.replace(found, steps=99),
        dataclasses.replace(found, levels=(dataclasses.replace(found.levels[0], noise=1.0),)),
        dataclasses.replace(found, facts=dataclasses.replace(FACTS, records=1001)),
        dataclasses.replace(found, rule={"name": "clip", "settings": {"x": 1}}),
        dataclasses.replace(found, epsilons=(1.0, 1.0)),
    ]
    assert len({found.digest, *(other.digest for other in changed)}) == len(changed) + 1


def test_an_edited_plan_file_is_refused() -> None:
    data = made().to_json()
    for edited in ({**data, "extra": 1}, {k: v for k, v in data.items() if k != "delta"}, {**data, "schema": 2}):
        with pytest.raises(UsageError, match="edited"):
            Plan.from_json(edited)


def test_shares_of_side_queries_merge_back_to_the_calibrated_noise() -> None:
    alone = made()
    shared = made(method=Method(Clip(), queries=(Counts(share=0.2),)))
    level = shared.levels[0]
    assert shared.noise_seen(level, 0) == pytest.approx(alone.levels[0].noise, rel=1e-9)
    assert level.noise > alone.levels[0].noise
    assert level.queries[0] ** -2 / shared.noise_seen(level, 0) ** -2 == pytest.approx(0.2)


def test_a_query_of_fixed_noise_is_paid_by_the_gradient() -> None:
    fixed = made(method=Method(Clip(), queries=(Counts(noise=5.0),)))
    level = fixed.levels[0]
    assert level.queries == (5.0,)
    assert level.noise > made().levels[0].noise
    assert fixed.epsilons[0] is not None
    assert 3 * (1 - 1e-3) <= fixed.epsilons[0] <= 3
    as_separate = accountant.epsilon([(0.1, level.noise, 100), (0.1, 5.0, 100)], 1e-5)
    assert as_separate < fixed.epsilons[0], "merged accounting must cost more than two separate samples would claim"


def test_budgets_without_a_per_owner_method_give_everyone_the_strictest() -> None:
    found = made(Budgets({"strict": 1, "open": 8}, delta=1e-5))
    assert found.budgets == (1.0, 8.0)
    assert all(epsilon is not None and epsilon <= 1 for epsilon in found.epsilons)


def test_fixed_noise_reports_its_cost() -> None:
    found = made(FixedNoise(1.3, 1e-5))
    assert found.levels[0].noise == 1.3
    assert found.budgets == (None, None)
    assert found.epsilons[0] == pytest.approx(accountant.epsilon([(0.1, 1.3, 100)], 1e-5), rel=1e-9)


def test_sgd_has_no_epsilon_and_says_so() -> None:
    found = made(None, method="sgd")
    assert found.epsilons == (None, None)
    assert found.spending() == []
    assert "not private" in str(found)
    assert "no epsilon is established" in str(found)


def test_the_running_spend_rises_to_the_whole() -> None:
    found = made()
    curve = found.spending()
    values = [epsilon for _, epsilon in curve]
    assert values == sorted(values)
    assert curve[-1][0] == found.steps
    assert curve[-1][1] == pytest.approx(found.epsilons[0], rel=1e-3)


def test_the_words_name_promise_facts_and_no_bare_epsilon() -> None:
    text = str(made())
    for word in ("delta 1e-05", "add/remove one record", "'strict'", "1000 records", "groups a, b", "noise multiplier"):
        assert word in text


def test_warnings_are_given_not_hidden() -> None:
    assert any("1/N" in text for text in made(Privacy(3, 1e-3)).warnings())
    assert any("above 20" in text for text in made(Privacy(50, 1e-5)).warnings())
    assert any("below 0.3" in text for text in made(FixedNoise(0.2, 1e-5)).warnings())
    assert made().warnings() == []


@pytest.mark.parametrize(("records", "expected"), [(1, 0.1), (9, 0.01), (10, 0.01), (1265, 1e-5), (60_000, 1e-6)])
def test_the_default_delta_is_at_most_a_tenth_of_one_over_n(records: int, expected: float) -> None:
    assert default_delta(records) == expected
    assert expected <= 1 / (10 * records)


NUMBERS = [float("nan"), float("inf"), -1.0, 0.0, True, "3"]


@pytest.mark.parametrize("bad", NUMBERS)
def test_bad_numbers_are_refused_at_construction(bad: object) -> None:
    for construct in (
        lambda: Privacy(bad),  # type: ignore[arg-type]
        lambda: Privacy(3, bad),  # type: ignore[arg-type]
        lambda: Budgets({"a": bad}),  # type: ignore[dict-item]
        lambda: FixedNoise(bad),  # type: ignore[arg-type]
        lambda: made(epochs=bad),
        lambda: made(batch_size=bad),
        lambda: method("dpsgd", {"bound": bad}),
        lambda: Counts(noise=bad),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            construct()


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: Privacy(3, 0.2), "promises nothing"),
        (lambda: Privacy(3, 1.0), "less than 1"),
        (lambda: Budgets({}), "at least one owner"),
        (lambda: made(Budgets({"strict": 1}, 1e-5)), "1 owner\\(s\\) have no budget"),
        (lambda: made(Budgets({"strict": 1, "open": 2, "x": 3}, 1e-5)), "1 budget\\(s\\) have no records"),
        (lambda: made(batch_size=1001), "at most 1000"),
        (lambda: made(None), "say what was promised"),
        (lambda: made(FixedNoise(1e-9, 1e-5)), "promises nothing"),
        (lambda: made(method=method("dpsgd", {"bound": 1e-40})), "Clip bounds must lie"),
        (lambda: made(method="dpsdg"), "Did you mean 'dpsgd'"),
        (lambda: method("dpsgd", {"bond": 1}), "Did you mean 'bound'"),
        (lambda: Counts(), "either share= .* or noise="),
        (lambda: Counts(share=1.5), "less than 1"),
        (lambda: Method(Clip(), queries=(Counts(share=0.5), Counts(share=0.2))), "same name"),
        (lambda: Method("clip"), "needs a rule"),
        (lambda: plan("dpsgd", Privacy(3), data=Facts(0, (("all", 0),))), "number of records"),
    ],
)
def test_messages_say_what_to_pass(construct: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        construct()  # type: ignore[operator]


def test_a_batch_rule_without_proof_needs_consent_and_prints_no_epsilon() -> None:
    @dataclass(frozen=True)
    class Unproved(BatchRule):
        name = "unproved"

        def weights(self, stats: Stats, state: State) -> Tensor:
            return stats.norm

        def sensitivity(self, state: State) -> Tensor:
            return state.bound

    with pytest.raises(UsageError, match="allow_unproven"):
        made(method=Method(Unproved()))
    assert made(method=Method(Unproved()), allow_unproven=True).epsilons == (None, None)


@pytest.mark.parametrize("counts", [(), (50,), (100, 0), (0, 100), (60, 60), (150, -50)])
def test_a_schedule_must_cover_every_step_exactly(counts: tuple[int, ...]) -> None:
    @dataclass(frozen=True)
    class Odd(Schedule):
        name = "odd"

        def segments(self, steps: int, steps_per_epoch: float) -> list[tuple[int, Level]]:
            return [(count, Level(1.0, 1.0)) for count in counts]

    with pytest.raises(UsageError, match="does not cover the 100 steps"):
        made(method=Method(Clip(), schedule=Odd()))


def test_every_method_of_the_catalogue_can_be_made() -> None:
    names = [recipe.name for recipe in catalogue()]
    assert {"dpsgd", "sgd", "idp_sample", "idp_scale"} <= set(names)
    for recipe in catalogue():
        assert method(recipe.name).rule.guarantee == recipe.guarantee
