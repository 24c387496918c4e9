"""Checks that a rule is a function: it keeps nothing, draws nothing, changes nothing, and survives JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from evenhand.methods import registry
from evenhand.testing.made_up_batches import Case, cases
from evenhand.testing.rule_checks import TRIED
from evenhand.testing.sensitivity_search import by_row, columns, same, search, weights
from evenhand.testing.subjects import Subject
from evenhand.types import State, Stats


def purity(subject: Subject) -> tuple[bool, str]:
    """Same input, same output, whatever was asked in between; inputs and random generators stay as they were."""
    for part in _parts(subject):
        settings = getattr(part, "__dataclass_params__", None)
        if settings is None or not settings.frozen:
            return False, f"{type(part).__name__} is not a frozen dataclass"

    def broken(drawn: tuple[Case, Case]) -> str:
        case, other = drawn
        stats, state = case.stats(), case.state(subject)
        kept = copy.deepcopy((columns(stats), state.bound, dict(state.answers), dict(state.memory)))
        before = _generators()
        first = _results(subject, stats, state)
        if not all(same(a, b) for a, b in zip(before, _generators(), strict=True)):
            return "draws from a global random generator"
        if not same(first, _results(subject, stats, state)):
            return "gives different results for the same input"
        if not same(kept, (columns(stats), state.bound, dict(state.answers), dict(state.memory))):
            return "changes its input"
        _results(subject, other.stats(), other.state(subject))
        if not same(first, _results(subject, stats, state)):
            return "gives another result after it has seen another batch"
        return ""

    problem = search(lambda source: (cases(least=1)(source), cases()(source)), broken, TRIED)
    return not problem, problem or f"{TRIED} pairs of cases"


def memory(subject: Subject) -> tuple[bool, str]:
    """Memory and sensitivity follow from public constants and noisy answers: other rows leave them as they are."""
    rule = subject.rule

    def broken(drawn: tuple[Case, Case]) -> str:
        case, other = drawn
        state = case.state(subject)
        untouched = copy.deepcopy(rule)
        expected = untouched.sensitivity(state), untouched.advance(state)
        for rows in (case, other):
            weights(rule, rows.stats(), state)
            if not same(expected[0], rule.sensitivity(state)):
                return "declares a sensitivity that depends on the rows of the batch"
            if not same(expected[1], rule.advance(state)):
                return "remembers something about the rows besides the noisy answers"
        return ""

    problem = search(lambda source: (cases(least=1)(source), cases()(source)), broken, TRIED)
    return not problem, problem or f"{TRIED} pairs of cases"


def round_trip(subject: Subject) -> tuple[bool, str]:
    """Settings survive the plan's JSON: what is resumed and verified is what was trained."""
    for part in _parts(subject):
        written = registry.spec(part)
        try:
            again = _built(part, json.loads(json.dumps(written)))
        except (TypeError, ValueError) as error:
            return False, f"{part.name!r} cannot be written as JSON and read back: {error}"
        if again != part:
            changed = [f.name for f in fields(part) if getattr(again, f.name) != getattr(part, f.name)]
            return False, f"{part.name!r} comes back from JSON with another {', '.join(changed) or 'identity'}"
    return True, "equal after JSON"


def _parts(subject: Subject) -> tuple[Any, ...]:
    return (subject.rule, *subject.queries)


def _built(part: Any, written: dict[str, Any]) -> Any:
    """By name if the part is registered, as a plan does it; else by its class."""
    known = part.name in registry.names(part.kind) and registry.part(part.kind, part.name) is type(part)
    return registry.build(part.kind, **written) if known else type(part)(**written["settings"])


def _results(subject: Subject, stats: Stats, state: State) -> list[Any]:
    asked: list[Callable[[], Any]] = [
        lambda: weights(subject.rule, stats, state),
        lambda: subject.rule.sensitivity(state),
        lambda: subject.rule.advance(state),
        *(lambda query=query: by_row(query.value, stats, state) for query in subject.queries),
    ]
    return [copy.deepcopy(ask()) for ask in asked]


def _generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global generator is what is being watched
    return (
        torch.random.get_rng_state(),
        torch.from_numpy(np.array(keys).astype(np.int64)),
        rest,
        random.getstate(),
        name,
    )
