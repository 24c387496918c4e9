"""Attack privacy claims of papers: the steps that a paper prints, and a classifier that stores its training points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenhand.accounting.budgets import FixedNoise
from evenhand.accounting.plan import Plan, PlannedLevel
from evenhand.density import PublishedSmoothing
from evenhand.density.published_smoothing import rho_of
from evenhand.mechanism.audit.attack import prepare
from evenhand.mechanism.audit.bounds import CHOOSING, Counts, direct_epsilon, direct_threshold
from evenhand.mechanism.audit.result import Bound
from evenhand.mechanism.make_plan import plan
from evenhand.types import Event, Facts

CONFIDENCE = 0.99
STEPS = 2000
"""Last steps of a training that the attacker looks at; what is spent in them is spent."""
_TRIALS, _FITS = 4000, 800
_RECORDS, _WIDTH = 12, 16


def audit_steps(events: Sequence[Event], delta: float, claimed: float, *, trials: int = _TRIALS) -> Bound:
    """Attack steps that draw Poisson batches and add Gaussian noise, as evenhand runs them, beside a claimed epsilon.

    Args:
      events: (rate, noise multiplier, count) of the steps in their order; one rate.
      delta: of the claim.
      claimed: the epsilon that is claimed for them.
      trials: with the record, and without it.

    Examples:
      >>> bound = audit_steps([(0.05, 0.5, 100)], 1e-5, 1.0, trials=1000)
      >>> bound.ok, bound.lower > 5
      (False, True)
    """
    outcome = prepare(_planned(_last(events), delta), trials=trials, confidence=CONFIDENCE).run()
    (bound,) = outcome.per_owner.values()
    return replace(bound, claim=claimed)


def _last(events: Sequence[Event]) -> list[Event]:
    """Return the last steps, at most ``STEPS``."""
    left, chosen = STEPS, list[Event]()
    for rate, noise, count in reversed(events):
        if left:
            chosen.insert(0, (rate, noise, min(count, left)))
            left -= min(count, left)
    return chosen


def _planned(events: Sequence[Event], delta: float) -> Plan:
    """Return a plan of clipped gradients whose steps are these events."""
    rate, steps = events[0][0], sum(count for *_, count in events)
    batch = max(1.0, rate * 1000)
    facts = Facts(round(batch / rate), (("all", round(batch / rate)),))
    first = plan("dpsgd", FixedNoise(max(1.0, events[0][1]), delta), data=facts, epochs=1, batch_size=batch)
    levels = tuple(PlannedLevel(count=count, noise=noise, bound=1.0, queries=()) for _, noise, count in events)
    return replace(first, rates=(rate,), levels=levels, steps=steps)


def audit_published_smoothing(epsilon: float, delta: float, *, fits: int = _FITS) -> Bound:
    """Attack paper 002's smoothing as it is printed: fit it with and without a record, and look for its stored point.

    Nothing is assumed about the mechanism. The records are made up; the projection is random, which favours the paper.

    Args:
      epsilon: that the paper converts its rho into.
      delta: of it.
      fits: with the record, and without it.

    Examples:
      >>> bound = audit_published_smoothing(3.0, 1e-5, fits=400)
      >>> bound.ok, round(bound.ceiling, 1) == round(bound.lower, 1)
      (False, True)
    """
    rng = np.random.default_rng(2)
    classifier = PublishedSmoothing(
        rho=rho_of(epsilon, delta), delta=delta, allow_unproven=True, dimension=_WIDTH, epochs=0
    )
    members, others = (
        np.array([_nearness(classifier, rng, inside=inside) for _ in range(fits)]) for inside in (True, False)
    )
    miss, first = 1 - CONFIDENCE, fits // CHOOSING
    threshold = direct_threshold(members[:first], others[:first], miss / 2, delta)
    counts = Counts.of(members[first:], others[first:], threshold)
    left = fits - first
    most = Counts(left, 0, left, left).rates(miss / 2)
    return Bound(epsilon, direct_epsilon(counts.rates(miss / 2), delta), direct_epsilon(most, delta), 2 * fits)


def _nearness(classifier: PublishedSmoothing, rng: np.random.Generator, *, inside: bool) -> float:
    """Return how near to a record's projection a point lies that the fitted classifier stores."""
    records: NDArray[np.float64] = rng.normal(size=(_RECORDS + 1, _WIDTH))
    labels = np.arange(_RECORDS + 1) % 2
    count = _RECORDS + 1 if inside else _RECORDS
    fitted = classifier.fit(records[:count], labels[:count])
    place = records[-1] @ fitted.projection_.numpy()
    stored = np.concatenate([points.numpy() for points in fitted.densities_.points])
    return -float(np.linalg.norm(stored - place, axis=1).min())
