"""Checks of the step that carries the rule: equal to the slow reference, and the ledger says what was done."""

from __future__ import annotations

import math
from functools import cache

import torch

from evenhand.accounting import accountant
from evenhand.mechanism import noise_grid
from evenhand.mechanism.step import Released
from evenhand.testing import epsilon_lower_bound
from evenhand.testing.made_up_batches import BOUNDS, LAST, SCALES, Case, cases
from evenhand.testing.reference_step import ReferenceStep, answers_of, as_pass, batch_of
from evenhand.testing.rule_checks import TRIED
from evenhand.testing.sensitivity_search import same, search
from evenhand.testing.subjects import DELTA, Subject, public
from evenhand.types import State

_SLACK = 1e-9
_CLOSE = 1e-6


def step(subject: Subject) -> tuple[bool, str]:
    """The released gradient is the reference's on the same noise: rows that are not finite and no rows included."""
    reference = ReferenceStep()
    plans = {(b, s): subject.plan(bound=b, scales=s) for b in BOUNDS for s in SCALES}

    def broken(case: Case) -> str:
        made = plans[case.bound, case.scales]
        memory, batch = case.state(subject).memory, batch_of(case, case.step)
        mechanism = subject.mechanism(made)
        found = subject.step(mechanism, as_pass(case), batch, memory)
        expected = reference(mechanism, as_pass(case), batch, memory)
        scale = expected.commit.std + max(expected.commit.sensitivity)
        different = _different(found, expected, _CLOSE * scale / made.expected_batch)
        return different or _off_grid(found, made.expected_batch)

    problem = search(cases(spoilt=True), broken, TRIED)
    return not problem, problem or f"{TRIED} cases, equal to the slow reference"


def _different(found: Released, expected: Released, allowed: float) -> str:
    if found.gradient.keys() != expected.gradient.keys():
        return "releases other parameters than the gradient has"
    for name, value in expected.gradient.items():
        gap = (found.gradient[name].double() - value).abs().max() if value.numel() else torch.tensor(0.0)
        if not float(gap) <= allowed:
            return f"releases another {name!r} than the slow reference: off by {float(gap) / allowed * _CLOSE:.3g}"
    if not same(dict(found.memory), dict(expected.memory), _CLOSE):
        return "hands on another memory than the slow reference"
    return "" if found.left_out == expected.left_out else "counts other rows as left out than the slow reference"


def _off_grid(found: Released, batch: float) -> str:
    """Low-order bits that are not rounded away can tell the datum: releases lie on the grid of the sensitivity."""
    spacing = noise_grid.grid(max(found.commit.sensitivity)) / 2  # what is recorded may lie in the next power of two
    units = torch.cat([value.reshape(-1).double() for value in found.gradient.values()]) * batch / spacing
    return "releases values off the grid" if bool(((units - units.round()).abs() > 1e-3).any()) else ""


def ledger(subject: Subject) -> tuple[bool, str]:
    """What goes on the ledger covers the declared sensitivity and is at least the planned noise, for every class."""
    plans = {(b, s): subject.plan(bound=b, scales=s) for b in BOUNDS for s in SCALES}

    def broken(case: Case) -> str:
        made = plans[case.bound, case.scales]
        mechanism, batch, memory = subject.mechanism(made), batch_of(case, case.step), case.state(subject).memory
        commit = subject.step(mechanism, as_pass(case), batch, memory).commit
        answers = answers_of(subject, mechanism, as_pass(case), batch, memory)
        level = made.level_at(case.step)
        bound = torch.tensor([level.bound * scale for scale in made.scales], dtype=torch.float64)
        declared = subject.rule.sensitivity(State(case.step, bound, answers, memory, public(made)))
        if (commit.first, commit.count) != (case.step, 1):
            return "records another step than the one that ran"
        for covered, own, scale in zip(commit.sensitivity, declared.tolist(), made.scales, strict=True):
            if covered < own:
                return "records a sensitivity below the declared one"
            if commit.std < covered * level.noise / scale * (1 - _SLACK):
                return "records less noise for a class than the plan says"
        for (covered, std), query, multiplier in zip(commit.queries, subject.queries, level.queries, strict=True):
            if covered < query.sensitivity or std < covered * multiplier * (1 - _SLACK):
                return f"records less noise for the query {query.name!r} than the plan says"
        return ""

    problem = search(cases(spoilt=True), broken, TRIED // 3)
    return not problem, problem or f"{TRIED // 3} cases"


def accounting(subject: Subject) -> tuple[bool, str]:
    """The events that are accounted cost at least what the steps cost that the ledger records."""
    made = subject.plan(scales=SCALES[1])
    empty, memory = Case(()), subject.rule.initial(made.facts)
    found: dict[int, list[tuple[float, float, int]]] = {}
    for owner in range(len(made.scales)):
        for level, position in zip(made.levels, (0, LAST), strict=True):
            commit = subject.step(subject.mechanism(made), as_pass(empty), batch_of(empty, position), memory).commit
            parts = [covered / std for covered, std in commit.queries]
            cost = (commit.sensitivity[owner] / commit.std) ** 2 + sum(part**2 for part in parts)
            found.setdefault(owner, []).append((made.rates[owner], 1 / math.sqrt(cost), level.count))
    for owner, truth in found.items():
        claimed, least = accountant.epsilon(subject.events(made, owner), DELTA), _lower(tuple(truth))
        if claimed < least * (1 - 1e-4):
            return False, f"claims epsilon {claimed:.4g} for owner {owner}, but the steps spend at least {least:.4g}"
    return True, f"{len(found)} owner classes, both levels of noise"


@cache
def _lower(events: tuple[tuple[float, float, int], ...]) -> float:
    return epsilon_lower_bound.epsilon(events, DELTA)
