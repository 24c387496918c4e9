"""The mechanism audit certifies much of a right claim, never above it, and exposes noise that is too small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import evenhand as eh
from evenhand.accounting.plan import Stage
from evenhand.errors import UsageError
from evenhand.mechanism import sampling, step
from evenhand.mechanism.audit.attack import Forecast, audit_mechanism, prepare
from evenhand.mechanism.audit.packed_runs import Mechanics
from evenhand.mechanism.audit.result import Audit
from evenhand.mechanism.random_streams import Stream
from evenhand.types import Facts

FACTS = Facts(1000, (("all", 1000),))
OWNERS = Facts(1000, (("strict", 600), ("open", 400)))
WHOLE = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=FACTS, epochs=1, batch_size=1000)
TEN = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=FACTS, epochs=1, batch_size=100)


def seeded(plan: eh.Plan, seed: int = 1, **options: Any) -> Audit:
    """An audit whose outcome is the same in every run: bounds may fail now and then, which is no fault of a test."""
    mechanics = replace(Mechanics.of(plan), stream=lambda number: Stream.insecure(seed, number))
    return prepare(plan, mechanics=mechanics, **options).run()


def test_one_gaussian_release_of_epsilon_4_38_is_certified_to_be_above_3_2() -> None:
    outcome = seeded(WHOLE)
    assert round(outcome.claim or 0, 2) == 4.38
    assert 3.2 <= outcome.lower_bound <= 4.38
    assert outcome.ok


def test_ten_steps_at_rate_a_tenth_are_certified_to_seventy_per_cent() -> None:
    outcome = seeded(TEN)
    assert 0.7 * (outcome.claim or 0) <= outcome.lower_bound <= (outcome.claim or 0)


@pytest.mark.parametrize("seed", [13, 19, 23])
def test_a_threshold_is_not_taken_where_a_few_false_alarms_decide(seed: int) -> None:
    """The one that needs the largest distance of two Gaussians certifies three quarters of the claim here."""
    outcome = seeded(TEN, seed)
    assert 0.85 * (outcome.claim or 0) <= outcome.lower_bound <= (outcome.claim or 0)


@pytest.mark.parametrize("method", ["idp_sample", "idp_scale", "ino_sample", "ino_scale"])
def test_every_owner_is_attacked_at_its_own_budget(method: str) -> None:
    plan = eh.plan(method, eh.Budgets({"strict": 1, "open": 6}, 1e-5), data=OWNERS, epochs=3, batch_size=100)
    outcome = seeded(plan, trials=10_000)
    assert outcome.ok
    assert outcome.per_owner["strict"].lower < 1
    assert 3 < outcome.per_owner["open"].lower < 6
    assert [bound.claim for bound in outcome.per_owner.values()] == pytest.approx(list(plan.epsilons), rel=1e-6)


def test_half_of_the_noise_is_exposed_and_what_was_promised_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise that runs is the noise that is audited: a fault in the release itself is seen."""
    real = step.noise_std
    monkeypatch.setattr(step, "noise_std", lambda *numbers: (real(*numbers)[0], 0.5 * real(*numbers)[1]))
    outcome = seeded(TEN)
    assert not outcome.ok
    assert outcome.lower_bound > 1.5 * (outcome.claim or 0)


def test_a_sampler_that_draws_too_often_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampling.per_word
    monkeypatch.setattr(sampling, "per_word", lambda rate: real(min(1.0, 2 * rate)))
    assert not seeded(TEN).ok


def test_more_owners_share_the_confidence() -> None:
    plan = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=OWNERS, epochs=1, batch_size=100)
    assert prepare(plan, confidence=0.98).miss == pytest.approx(0.01)


def test_of_many_owners_those_are_attacked_that_stand_for_all() -> None:
    facts = Facts(4000, tuple((f"owner {k}", 100) for k in range(40)))
    budgets = {f"owner {k}": 1 + k / 10 for k in range(40)}
    plan = eh.plan("idp_scale", eh.Budgets(budgets, 1e-5), data=facts, epochs=1, batch_size=400)
    attack = prepare(plan, trials=500)
    assert len(attack.classes) == 8
    assert {0, 39} <= set(attack.classes)


def test_cost_and_power_are_told_before_the_attack() -> None:
    told: list[Forecast] = []
    audit_mechanism(TEN, trials=20_000, announce=told.append)
    (forecast,) = told
    outcome = seeded(TEN, trials=20_000)
    assert forecast.trials == 20_000
    assert forecast.seconds < 5
    assert forecast.expected["all"] == pytest.approx(outcome.lower_bound, rel=0.3)
    assert forecast.ceiling["all"] == outcome.per_owner["all"].ceiling > outcome.lower_bound


def test_changed_budgets_are_audited_stage_by_stage() -> None:
    levels = tuple(replace(level, count=5) for level in TEN.levels)
    changed = replace(TEN, earlier=(Stage(TEN.rates, TEN.scales, levels, TEN.digest),), levels=levels, steps=10)
    outcome = seeded(changed, trials=50_000)
    assert outcome.claim == pytest.approx(TEN.epsilons[0], rel=1e-3)
    assert 0.6 * (outcome.claim or 0) < outcome.lower_bound < (outcome.claim or 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"confidence": 1.5}, "confidence"),
        ({"effort": "endless"}, "effort"),
        ({"trials": 10}, "trials=10 certify nothing"),
    ],
)
def test_what_cannot_be_asked_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audit_mechanism(TEN, **change)


def test_there_is_nothing_to_attack_without_a_promise_or_without_steps() -> None:
    with pytest.raises(UsageError, match="no promise to attack"):
        audit_mechanism(eh.plan("sgd", None, data=FACTS, epochs=1))
    with pytest.raises(UsageError, match="takes no gradient steps"):
        audit_mechanism(replace(TEN, method="moment_density"))


def test_the_mechanics_are_those_that_the_plan_names() -> None:
    plan = eh.plan("dpsgd_f", eh.Privacy(3, 1e-5), data=FACTS, epochs=1, batch_size=100)
    mechanics = Mechanics.of(plan)
    assert mechanics.rule.name == plan.rule["name"]
    assert [query.name for query in mechanics.queries] == [query["name"] for query in plan.queries]
