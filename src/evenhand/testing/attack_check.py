"""The attack: run the step many times on two neighbouring batches, and try to tell them apart better than claimed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.accounting import accountant
from evenhand.mechanism.step import bounded
from evenhand.testing.made_up_batches import Case, Row
from evenhand.testing.reference_step import answers_of, as_pass, batch_of
from evenhand.testing.sensitivity_search import by_row, movements, weights
from evenhand.testing.subjects import Subject, public
from evenhand.types import State, Stats

Vector = NDArray[np.float64]

TRIALS = 600
MISS = 1e-7
_DELTA = 0.25
_NORMS = (1e3, 3.0, 0.4, 1.0, 10.0, 2.0)
_LOSSES = (1.0, 0.5, 2.0, 0.7, 1.5, 0.2)


@dataclass(frozen=True)
class Neighbours:
    """Two batches that differ by one record, with gradients aligned so that their sums are furthest apart."""

    whole: Case
    removed: int
    signs: tuple[float, ...]

    def case(self, present: bool) -> Case:
        """The batch with the record, or without it."""
        rows = tuple(row for i, row in enumerate(self.whole.rows) if present or i != self.removed)
        return replace(self.whole, rows=rows)

    def gradients(self, present: bool) -> Tensor:
        """All along one axis."""
        kept = [i for i in range(len(self.whole.rows)) if present or i != self.removed]
        found = torch.zeros(len(kept), 5, dtype=torch.float64)
        found[:, 0] = torch.tensor([self.signs[i] * self.whole.rows[i].norm for i in kept], dtype=torch.float64)
        return found


def audit(subject: Subject) -> tuple[bool, str]:
    """A likelihood-ratio attack on worst-case gradients stays below the epsilon that one step is accounted for."""
    pair = _worst(subject)
    made = subject.plan()
    owner = pair.whole.rows[pair.removed].owner
    z = made.noise_seen(made.level_at(0), owner)
    claimed = accountant.epsilon([(1.0, z, 1)], _DELTA)
    losses = {present: _losses(subject, pair, present) for present in (True, False)}
    lowest = max(
        bound
        for threshold in (0.0, claimed)
        for bound in (
            _lower(losses[True] > threshold, losses[False] > threshold),
            _lower(losses[False] < -threshold, losses[True] < -threshold),
        )
    )
    setting = f"(delta {_DELTA:g}, {losses[True].size} trials)"
    words = f"epsilon of one step at least {lowest:.3g}, accounted {claimed:.3g} {setting}"
    return lowest <= claimed, words if lowest <= claimed else f"{words}. Batch: {pair.whole}, row {pair.removed}"


def _worst(subject: Subject) -> Neighbours:
    """The pair, among batches of one to six rows, whose sums differ most."""
    best, found = -1.0, None
    for count in range(1, len(_NORMS) + 1):
        rows = tuple(Row(_NORMS[i], _LOSSES[i], i % 3, i % 3) for i in range(count))
        case = Case(rows)
        state = case.state(subject)
        moved = movements(subject.rule, case, state) / subject.rule.sensitivity(state)[case.stats().owner]
        if float(moved.max()) > best:
            best, removed = float(moved.max()), int(moved.argmax())
            found = Neighbours(case, removed, _signs(subject, case, state, removed))
    assert found is not None
    return found


def _signs(subject: Subject, case: Case, state: State, removed: int) -> tuple[float, ...]:
    """The removed record pulls one way; others pull with it if their weight falls when it leaves, else against it."""
    here = weights(subject.rule, case.stats(), state).tolist()
    there = weights(subject.rule, case.stats(without=removed), state).tolist()
    there.insert(removed, 0.0)
    return tuple(1.0 if a >= b else -1.0 for a, b in zip(here, there, strict=True))


def _losses(subject: Subject, pair: Neighbours, present: bool) -> Vector:
    """The log-likelihood ratio of "present" over "absent", by the recorded noise, in many trials."""
    made = subject.plan()
    case, memory = pair.case(present), subject.rule.initial(made.facts)
    result, batch = as_pass(case, gradients=pair.gradients(present)), batch_of(case, 0)
    start = State(0, case.bounds * made.level_at(0).bound, {}, memory, public(made))
    stats = pair.case(True).stats(), pair.case(False).stats()
    asked = [(_asked(query, stats[0], start), _asked(query, stats[1], start)) for query in subject.queries]
    found = np.empty(TRIALS // 2 if subject.queries else TRIALS)
    for trial in range(found.size):
        mechanism = subject.mechanism(made, seed=2 * trial + int(present))
        released = subject.step(mechanism, result, batch, memory)
        answers = answers_of(subject, mechanism, result, batch, memory)
        if answers or not trial:
            state = replace(start, answers=answers)
            means = _sum(subject, pair, True, state), _sum(subject, pair, False, state)
        seen = float(released.gradient["weight"][0]) * made.expected_batch
        ratio = _ratio(seen, *means, released.commit.std)
        for query, sides, (_, std) in zip(subject.queries, asked, released.commit.queries, strict=True):
            values = answers[query.name].tolist()
            ratio += sum(_ratio(*each, std) for each in zip(values, *sides, strict=True))
        found[trial] = ratio
    return found


def _ratio(seen: float, with_it: float, without: float, std: float) -> float:
    if std <= 0:
        return math.copysign(math.inf, abs(seen - without) - abs(seen - with_it))
    return ((seen - without) ** 2 - (seen - with_it) ** 2) / (2 * std**2)


def _sum(subject: Subject, pair: Neighbours, present: bool, state: State) -> float:
    stats = pair.case(present).stats()
    found = bounded(weights(subject.rule, stats, state), stats, subject.rule.sensitivity(state))
    return float((found * pair.gradients(present)[:, 0]).sum())


def _asked(query: Any, stats: Stats, state: State) -> Sequence[float]:
    values = by_row(query.value, stats, state).double()
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return list((values * (query.sensitivity / norms.clamp(min=query.sensitivity))).sum(0).tolist())


def _lower(hits: Any, alarms: Any) -> float:
    """Clopper-Pearson: a lower bound on the epsilon that these counts are possible with."""
    from scipy import stats

    low = stats.beta.ppf(MISS, hits.sum(), hits.size - hits.sum() + 1) if hits.any() else 0.0
    high = stats.beta.isf(MISS, alarms.sum() + 1, alarms.size - alarms.sum()) if not alarms.all() else 1.0
    return max(0.0, math.log((low - _DELTA) / high)) if low > _DELTA else 0.0
