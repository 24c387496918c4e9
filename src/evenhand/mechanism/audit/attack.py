"""Audit a plan's mechanism: attack its own steps with worst-case gradients, without any data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenhand import _validate
from evenhand.accounting.accountant import epsilon
from evenhand.accounting.owner_classes import chosen_few
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.mechanism.audit.bounds import ceiling, certify, expected
from evenhand.mechanism.audit.packed_runs import Mechanics, Scores, World, play
from evenhand.mechanism.audit.result import Audit, Bound
from evenhand.methods.densities import DENSITIES
from evenhand.types import Event

CONFIDENCE = 0.99
MOST_OWNERS = 8
"""Owner classes that one audit attacks; of more, those that stand for all."""
_WORK = {"quick": 4e7, "thorough": 8e8}
_FEWEST, _LEAST_TRIALS, _MOST_TRIALS, _TRIALS_OF_A_RUN = 200, 1_000, 400_000, 100_000
_NANOSECONDS_OF_A_NUMBER, _MICROSECONDS_OF_A_STEP, _SECONDS_OF_A_BOUND = 50, 400, 0.5
THREAT_MODEL = (
    "knows every other record and the plan, chooses the record's gradients, and sees the noisy gradient of every step"
)
METHOD = (
    "log-likelihood ratio of the accounted pair over all steps; Clopper-Pearson bounds at a threshold that other "
    "trials chose; epsilon within the family of the accounted events with all noise scaled by one factor"
)
DATA = "none: made-up gradients go through the plan's own sampler, step and noise"
Accounted = Callable[[Plan, int], list[Event]]
Player = Callable[[Plan, Mechanics, World, int], Scores]


@dataclass(frozen=True)
class Forecast:
    """Say before an audit what it costs and what it can find.

    Attributes:
      trials: on either side, with and without the record, for each attacked owner class.
      runs: how often the plan is run, with a secret key each.
      seconds: about how long it takes on one core.
      expected: about the epsilon that is certified per owner, if the mechanism is right.
      ceiling: the most that can be certified per owner, however wrong the noise is.
    """

    trials: int
    runs: int
    seconds: float
    expected: Mapping[str, float]
    ceiling: Mapping[str, float]


@dataclass(frozen=True)
class Attack:
    """Describe an attack on a plan: whom, how often, and with which confidence.

    ``mechanics`` are what is attacked and ``accounted`` what is claimed of it; the defaults are the plan's own.
    ``player`` plays all trials of a packed run.
    """

    plan: Plan
    classes: tuple[int, ...]
    trials: int
    confidence: float
    mechanics: Mechanics
    accounted: Accounted = field(default=Plan.events)
    player: Player = field(default=play)

    @property
    def runs(self) -> int:
        """Return how many packed runs the trials need."""
        return math.ceil(self.trials / _TRIALS_OF_A_RUN)

    @property
    def miss(self) -> float:
        """Return the probability with which the bounds of one owner may be wrong (Bonferroni)."""
        return (1 - self.confidence) / len(self.classes)

    def events(self, owner: int) -> list[Event]:
        """Return what is accounted for a record of this class."""
        return self.accounted(self.plan, owner)

    def forecast(self) -> Forecast:
        """Return what the attack will cost and can find."""
        names, delta = self.plan.facts.owner_names, self.plan.delta
        numbers = self.plan.steps * self.trials * (3 * len(self.classes) + 1)
        return Forecast(
            self.trials,
            self.runs,
            numbers * _NANOSECONDS_OF_A_NUMBER * 1e-9
            + self.plan.steps * self.runs * _MICROSECONDS_OF_A_STEP * 1e-6
            + len(self.classes) * _SECONDS_OF_A_BOUND,
            {names[k]: expected(self.events(k), self.trials, delta, self.miss) for k in self.classes},
            {names[k]: ceiling(self.events(k), self.trials, delta, self.miss).family for k in self.classes},
        )

    def run(self) -> Audit:
        """Play all trials and return what they show."""
        scores = self._play()
        delta, names = self.plan.delta, self.plan.facts.owner_names
        bounds, direct = dict[str, Bound](), dict[str, Any]()
        for row, owner in enumerate(self.classes):
            events = self.events(owner)
            shown = certify(scores.members[row], scores.others[row], events, delta, self.miss)
            most = ceiling(events, self.trials, delta, self.miss)
            claim = epsilon(events, delta)
            bounds[names[owner]] = Bound(claim, max(shown.family, shown.direct), most.family, 2 * self.trials)
            direct[names[owner]] = {"lower_bound": shown.direct, "ceiling": most.direct}
        return Audit(
            kind="mechanism",
            delta=delta,
            confidence=self.confidence,
            per_owner=bounds,
            threat_model=THREAT_MODEL,
            method=METHOD,
            data=DATA,
            private=False,
            details={
                "plan": self.plan.digest,
                "steps": self.plan.steps,
                "trials_per_owner": 2 * self.trials,
                "without_the_family": direct,
                "owners": len(names),
            },
        )

    def _play(self) -> Scores:
        parts = []
        for number in range(self.runs):
            count = self.trials // self.runs + (number < self.trials % self.runs)
            parts.append(self.player(self.plan, self.mechanics, World.of(self.plan, self.classes, count), number))
        members, others = ([getattr(part, name) for part in parts] for name in ("members", "others"))
        return Scores(np.concatenate(members, axis=1), np.concatenate(others, axis=1))


def audit_mechanism(
    plan: Plan,
    *,
    confidence: float = CONFIDENCE,
    effort: str = "quick",
    trials: int | None = None,
    announce: Callable[[Forecast], None] | None = None,
) -> Audit:
    """Attack the mechanism of a plan and return the epsilon that the attack certifies, beside what is accounted.

    Worst-case gradients go through the plan's own sampler, step and noise; no data are read and nothing is spent. All
    lower bounds hold together with the confidence. At most ``MOST_OWNERS`` owner classes are attacked.

    Args:
      plan: of a method that takes gradient steps and is private.
      confidence: with which all lower bounds hold together.
      effort: "quick" (seconds) or "thorough" (about twenty times as many trials).
      trials: on either side, with and without the record, per owner class; instead of effort.
      announce: is told before the attack what it costs and can find.

    Raises:
      UsageError: there is no finite epsilon to attack, or the plan's method takes no gradient steps.

    Examples:
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand.accounting.budgets import Privacy
      >>> from evenhand.types import Facts
      >>> planned = plan("dpsgd", Privacy(3, 1e-5), data=Facts(1000, (("all", 1000),)), epochs=1, batch_size=100)
      >>> outcome = audit_mechanism(planned, trials=20_000)
      >>> round(outcome.claim, 2), outcome.lower_bound > 1
      (3.0, True)
    """
    attack = prepare(plan, confidence=confidence, effort=effort, trials=trials)
    if announce is not None:
        announce(attack.forecast())
    return attack.run()


def prepare(
    plan: Plan,
    *,
    confidence: float = CONFIDENCE,
    effort: str = "quick",
    trials: int | None = None,
    mechanics: Mechanics | None = None,
    accounted: Accounted = Plan.events,
    player: Player = play,
) -> Attack:
    """Return the attack on a plan, not yet run; see ``audit_mechanism`` for the arguments.

    Raises:
      UsageError: the plan cannot be attacked in this way.
    """
    confidence = _validate.number(confidence, "confidence", low=0.5, high=1)
    _validate.known(effort, _WORK, "effort")
    if not plan.certified:
        raise UsageError(f"For {plan.method!r} no epsilon is established, so there is no promise to attack.")
    if plan.cap > 1:
        raise UsageError(
            f"This audit puts one record in, and up to {plan.cap} records of a person are each drawn by themselves "
            "here: it attacks data by person without person_cap."
        )
    if plan.method in DENSITIES and player is play:
        raise UsageError(f"{plan.method!r} takes no gradient steps: the mechanism audit does not know its release.")
    classes = tuple(sorted(chosen_few(plan.epsilons, MOST_OWNERS)))
    count = _trials(plan, len(classes), _WORK[effort]) if trials is None else _validate.whole(trials, "trials")
    if count < _FEWEST:
        raise UsageError(f"trials={count} certify nothing: give at least {_FEWEST} on either side.")
    return Attack(plan, classes, count, confidence, mechanics or Mechanics.of(plan), accounted, player)


def _trials(plan: Plan, classes: int, work: float) -> int:
    """Return how many trials on either side this work allows."""
    return int(np.clip(work / (plan.steps * (3 * classes + 1)), _LEAST_TRIALS, _MOST_TRIALS))
