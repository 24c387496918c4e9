"""Audits of right mechanisms exceed the claim no more often than their confidence allows, whatever the method."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scipy.stats import binom

import evenhand as eh
from evenhand.mechanism.audit.attack import prepare
from evenhand.mechanism.audit.packed_runs import Mechanics
from evenhand.mechanism.audit.result import Audit
from evenhand.mechanism.random_streams import Stream
from evenhand.methods.catalogue import catalogue
from evenhand.types import Facts

CONFIDENCE = 0.9
"""Low, so that a bound which errs too often shows in a few hundred audits."""
AUDITS = 300
OWNERS = (("strict", 600), ("usual", 300), ("open", 100))
WORLDS = {
    "records": Facts(1000, (("all", 1000),), groups=("x", "y")),
    "owners": Facts(1000, OWNERS, groups=("x", "y")),
    "persons": Facts(1000, OWNERS, groups=("x", "y"), unit="person", told_apart="name", records_per_person=2),
}
METHODS = [recipe.name for recipe in catalogue() if recipe.guarantee != "not private"]
CASES = [(method, world) for method in METHODS for world in WORLDS]


def planned(method: str, world: str) -> eh.Plan:
    promise = eh.Privacy(3, 1e-5) if world == "records" else eh.Budgets({"strict": 1, "usual": 3, "open": 8}, 1e-5)
    try:
        return eh.plan(method, promise, data=WORLDS[world], epochs=1, batch_size=100)
    except eh.errors.UsageError:  # a method without bounds or rates of its own per owner promises the same to all
        return eh.plan(method, eh.Privacy(3, 1e-5), data=WORLDS[world], epochs=1, batch_size=100)


def audited(method: str, world: str, seed: int, trials: int) -> Audit:
    plan = planned(method, world)
    mechanics = replace(Mechanics.of(plan), stream=lambda number: Stream.insecure(seed, number))
    return prepare(plan, mechanics=mechanics, trials=trials, confidence=CONFIDENCE).run()


def test_every_method_is_audited_below_its_claim_and_above_nothing() -> None:
    outcomes = [audited(method, "records", seed, 4000) for seed, method in enumerate(METHODS)]
    exceeding = [outcome for outcome in outcomes if not outcome.ok]
    assert len(exceeding) <= binom.ppf(0.99, len(METHODS), 1 - CONFIDENCE)
    assert sorted(outcome.lower_bound for outcome in outcomes)[len(METHODS) // 4] > 1.0


@pytest.mark.slow
def test_of_300_audits_of_right_mechanisms_no_more_exceed_than_the_confidence_allows() -> None:
    cases = [CASES[number % len(CASES)] for number in range(AUDITS)]
    exceeding = []
    for seed, (method, world) in enumerate(cases):
        outcome = audited(method, world, 1000 + seed, 4000)
        for name, bound in outcome.per_owner.items():
            print(method, world, seed, name, f"{bound.lower:.3f} of {bound.claim:.3f}", "" if bound.ok else "ABOVE")
        if not outcome.ok:
            exceeding.append((method, world, seed))
    print(f"{len(exceeding)} of {AUDITS} exceed at confidence {CONFIDENCE}: {exceeding}")
    assert len(exceeding) <= binom.ppf(0.99, AUDITS, 1 - CONFIDENCE)
