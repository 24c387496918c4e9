"""Attack the releases of a density, without data, through its plan's own weights, noise and grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from evenhand.accounting.plan import Plan
from evenhand.density.noisy_sums import Releases
from evenhand.mechanism.audit.attack import CONFIDENCE, Attack, Forecast, prepare
from evenhand.mechanism.audit.packed_runs import Mechanics, Scores, World, add_ratio
from evenhand.mechanism.audit.result import Audit
from evenhand.methods.rules import Clip

_FAR = 1e3
"""Length of a record's vector in multiples of the bound: as far as a weight lets it go."""


def audit_releases(
    plan: Plan,
    *,
    confidence: float = CONFIDENCE,
    effort: str = "quick",
    trials: int | None = None,
    announce: Callable[[Forecast], None] | None = None,
) -> Audit:
    """Attack the releases of a density's plan and return what is certified beside what is accounted.

    Made-up sums go through ``Releases``; no data are read and nothing is spent.

    Args:
      plan: of a density.
      confidence: see ``audit_mechanism``; so are the others.
      effort: "quick" or "thorough".
      trials: instead of effort.
      announce: is told before the attack what it costs and can find.

    Examples:
      >>> from evenhand.accounting.budgets import Privacy
      >>> from evenhand.density.noisy_sums import Query, plan_of
      >>> from evenhand.types import Facts
      >>> facts = Facts(1000, (("all", 1000),))
      >>> planned = plan_of("moment_density", {}, [Query("sums", 1.0, 2.0)], Privacy(3.0, 1e-5), facts)
      >>> outcome = audit_releases(planned, trials=20_000)
      >>> outcome.ok, outcome.lower_bound > 2
      (True, True)
    """
    attack = prepare_releases(plan, confidence=confidence, effort=effort, trials=trials)
    if announce is not None:
        announce(attack.forecast())
    return replace(
        attack.run(),
        threat_model="knows every other record and the plan, chooses the record's vectors, and sees every noisy sum",
        data="none: made-up sums go through the plan's own weights, noise and grid",
    )


def prepare_releases(
    plan: Plan, *, confidence: float = CONFIDENCE, effort: str = "quick", trials: int | None = None
) -> Attack:
    """Return the attack on a density's plan, not yet run; see ``audit_mechanism`` for the arguments."""
    mechanics = Mechanics(Clip(), ())
    return prepare(plan, confidence=confidence, effort=effort, trials=trials, mechanics=mechanics, player=play_releases)


def play_releases(plan: Plan, mechanics: Mechanics, world: World, number: int) -> Scores:
    """Make all releases once in this world; return the score of every trial. A trial has a coordinate of its own."""
    releases = Releases(plan, mechanics.stream(number))
    classes = torch.tensor(world.classes)
    members, others = np.zeros(world.members.shape), np.zeros((len(classes), world.others.size))
    for position in range(plan.steps):
        length = torch.full((len(classes),), _FAR * plan.level_at(position).bound, dtype=torch.float64)
        reach = (releases.weights(length, classes) * length).numpy()
        summed = torch.zeros(world.dimension, dtype=torch.float64)
        for place, distance in zip(world.members, reach, strict=True):
            summed[torch.from_numpy(place)] = float(distance)
        noisy = releases.release(summed)
        std = releases.commits[-1].std
        for row, distance in enumerate(reach):
            for scores, places in ((members, world.members[row]), (others, world.others)):
                add_ratio(torch.from_numpy(scores[row]), noisy[torch.from_numpy(places)], float(distance), std, 1.0)
    return Scores(members, others)
