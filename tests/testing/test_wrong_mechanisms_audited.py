"""Every wrong mechanism is exposed by the mechanism audit, or by a named check of the kit for the reason given here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import evenhand as eh
from evenhand.errors import UsageError
from evenhand.mechanism.audit.attack import prepare
from evenhand.mechanism.audit.packed_runs import Mechanics
from evenhand.mechanism.make_plan import plan
from evenhand.methods.composition import Method
from evenhand.methods.rules import SampleRule
from evenhand.methods.schedules import Constant, Phases, Schedule
from evenhand.testing.subjects import FACTS
from wrong_mechanisms import ZOO
from wrong_mechanisms.base import Wrong


@dataclass(frozen=True)
class Arena:
    """A plan on which mechanisms are audited."""

    batch: float
    steps: int
    trials: int
    schedule: Schedule
    scales: tuple[float, ...] = (1.0, 1.0, 1.0)
    rates: tuple[float, ...] | None = None


PHASES = Phases(n=2, noise=0.6, length=1.0, growth=1.2)
ARENAS = {
    "one step": Arena(400, 1, 100_000, Constant()),
    "twenty steps": Arena(20, 20, 6000, PHASES),
    "owners": Arena(40, 10, 6000, PHASES, (0.5, 1.0, 2.0), (0.02, 0.1, 0.3)),
}
EXPOSED_IN = {
    "WithoutClipping": "twenty steps",
    "WithoutClipping, audited": "twenty steps",
    "Microbatches": "owners",
    "HalfRecorded": "twenty steps",
    "MeanClass": "owners",
    "FirstLevel": "twenty steps",
    "no noise": "twenty steps",
    "no noise, audited": "twenty steps",
    "noise times 0.5": "twenty steps",
    "noise times 0.5, audited": "twenty steps",
    "noise times 0.9": "one step",
    "noise divided by the root of 2": "twenty steps",
    "noise divided by the batch twice": "twenty steps",
    "BiasesWithout": "twenty steps",
    "Broadcast": "twenty steps",
    "SmallestClass": "owners",
    "Truncated": "one step",
    "CommonScale": "one step",
    "Laplace": "one step",
    "Shuffled": "owners",
    "WithReplacement": "owners",
    "OneDraw": "twenty steps",
    "MeanRate": "owners",
    "once_an_epoch": "twenty steps",
    "last_noise": "owners",
    "first_owner": "owners",
}
_PROJECTED = "the step holds each row's weight to what its rule declares, so that such a rule spends no more"
_ANSWERS = "the attack takes no side answer, and nothing that a rule remembers of one, as evidence"
_ALONE = "a trial alone looks right: the fault lies between coordinates, between steps or between records"
_SMALL = "the difference is smaller than so few trials can show"
_REGULAR = "all trials are finite rows of one coordinate in a full batch that nobody else fills"
NOT_BY_THE_AUDIT = {
    **dict.fromkeys(
        ("never_clipped", "squared_norm", "negative", "without_bound", "strictest_class", "normalised"), _PROJECTED
    ),
    **dict.fromkeys(("without_clamps", "unbounded", "two_counts", "comparing"), _ANSWERS),
    **dict.fromkeys(("AnswersWithout", "AnswersShare", "RawMemory", "gradient_only", "separately"), _ANSWERS),
    **dict.fromkeys(("coupled", "FixedSize", "StickyDraw", "Clusters"), _ALONE),
    **dict.fromkeys(("EveryStepTheSame", "Repeated", "Seeded", "Whole"), _ALONE),
    **dict.fromkeys(("WithoutRounding", "FloatRun", "noise times 0.97"), _SMALL),
    **dict.fromkeys(("ShortFloats", "FreeFloats", "ShortCoins"), _SMALL),
    **dict.fromkeys(("ClippedSum", "PerLayer", "RealisedDivisor", "Residue"), _REGULAR),
    **dict.fromkeys(("SpoiltRows", "SpoiltBatch", "UnchargedEmpty", "EmptyWithout"), _REGULAR),
    **dict.fromkeys(("lists", "one_key"), "only a run that is resumed is wrong"),
    "every_second": "the other records keep their numbers where the attacked one is missing",
}
"""Reasons why the audit shows nothing; ``caught_by`` of each names the check of the kit that does."""
REFUSED = ("endless", "branching", "narrow")
"""Sample rules that no plan or step takes."""


def unproved(wrong: Wrong) -> bool:
    """Whether the rule looks at whole batches without a proof: then no epsilon is promised that could be broken."""
    return not isinstance(wrong.subject.rule, SampleRule)


def exposed(wrong: Wrong, arena: Arena) -> bool:
    subject = wrong.subject
    method = Method(subject.rule, subject.queries, arena.schedule)
    epochs = arena.steps * arena.batch / FACTS.records
    promise = eh.FixedNoise(1.0, 1e-5)
    short = plan(method, promise, data=FACTS, epochs=epochs, batch_size=arena.batch, allow_unproven=True)
    short = replace(short, scales=arena.scales, rates=arena.rates or short.rates)
    mechanics = Mechanics(
        subject.rule, subject.queries, subject.step, subject.sampler, lambda number: subject.stream(1, number)
    )
    return not prepare(short, mechanics=mechanics, accounted=subject.events, trials=arena.trials).run().ok


def test_every_wrong_mechanism_is_in_one_table() -> None:
    for wrong in ZOO:
        tables = [wrong.name in EXPOSED_IN, wrong.name in NOT_BY_THE_AUDIT, wrong.name in REFUSED, unproved(wrong)]
        assert sum(tables) == 1, wrong.name
    assert {*EXPOSED_IN, *NOT_BY_THE_AUDIT, *REFUSED} <= {wrong.name for wrong in ZOO}


@pytest.mark.parametrize("name", EXPOSED_IN)
def test_the_audit_exposes(name: str) -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == name]
    assert exposed(wrong, ARENAS[EXPOSED_IN[name]])


@pytest.mark.parametrize("wrong", [wrong for wrong in ZOO if unproved(wrong)], ids=lambda wrong: wrong.name)
def test_a_batch_rule_without_a_proof_has_no_promise_to_break(wrong: Wrong) -> None:
    with pytest.raises(UsageError, match="no promise to attack"):
        exposed(wrong, ARENAS["twenty steps"])


@pytest.mark.parametrize("name", REFUSED)
def test_these_run_nowhere(name: str) -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == name]
    with pytest.raises((UsageError, RuntimeError)):
        exposed(wrong, ARENAS["twenty steps"])


@pytest.mark.slow
@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("name", NOT_BY_THE_AUDIT)
def test_what_the_audit_does_not_expose_is_said_to_be_so(name: str, arena: str) -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == name]
    fewer = replace(ARENAS[arena], trials=1000) if name == "PerLayer" else ARENAS[arena]  # it walks row by row
    assert not exposed(wrong, fewer), "the audit exposes it now: move it to the other table"
