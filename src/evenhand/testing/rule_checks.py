"""Checks of a rule on its own: form, sensitivity, isolation, order."""

from __future__ import annotations

import torch
from torch import Tensor

from evenhand.methods.rules import SampleRule
from evenhand.testing.made_up_batches import SCALES, Case, cases
from evenhand.testing.sensitivity_search import Reading, by_row, columns, movements, same, search, taken, weights
from evenhand.testing.subjects import FACTS, Subject
from evenhand.types import State, Stats

_SLACK = 1e-9
_ROUNDING = 1e-12
SEARCHED = 1000
TRIED = 200


def form(subject: Subject) -> tuple[bool, str]:
    """One finite weight of at least 0 per row, a usable S, queries inside their declared norm; also without rows."""

    def broken(case: Case) -> str:
        stats, state = case.stats(), case.state(subject)
        found = weights(subject.rule, stats, state)
        if found.shape != stats.norm.shape or not found.is_floating_point():
            return "does not give one floating-point weight per row"
        if not bool(torch.isfinite(found).all()) or bool((found < 0).any()):
            return "gives a weight that is negative or not finite"
        declared = subject.rule.sensitivity(state)
        if declared.shape != state.bound.shape or not bool((declared > 0).all()):
            return "declares no positive sensitivity per owner class"
        if subject.private and not bool(torch.isfinite(declared).all()):
            return "declares an infinite sensitivity"
        return _query_form(subject, stats, state)

    problem = search(cases(), broken, TRIED)
    return not problem, problem or f"{TRIED} cases"


def _query_form(subject: Subject, stats: Stats, state: State) -> str:
    for query in subject.queries:
        values = by_row(query.value, stats, state)
        if values.shape != (stats.norm.shape[0], query.width(FACTS)):
            return f"the query {query.name!r} does not give one vector of its width per row"
        if not bool(torch.isfinite(values).all()):
            return f"the query {query.name!r} gives a value that is not finite"
        if bool((torch.linalg.vector_norm(values.double(), dim=1) > query.sensitivity * (1 + _SLACK)).any()):
            return f"the query {query.name!r} gives a value larger than its declared sensitivity"
    return ""


def sensitivity(subject: Subject) -> tuple[bool, str]:
    """Removing any one record moves the weighted sum by at most the S of its owner class."""
    worst = 0.0

    def broken(case: Case) -> str:
        nonlocal worst
        if not case.rows:
            return ""
        state = case.state(subject)
        ratios = movements(subject.rule, case, state) / subject.rule.sensitivity(state)[case.stats().owner]
        largest, place = float(ratios.max()), int(ratios.argmax())
        worst = max(worst, largest)
        moved = f"removing row {place} moves the weighted sum by {largest:.6g} times the declared sensitivity"
        return "" if largest <= 1 + _SLACK else moved

    problem = search(cases(least=1), broken, SEARCHED)
    return not problem, problem or f"{SEARCHED} cases, worst / declared = {worst:.3f}"


def isolation(subject: Subject) -> tuple[bool, str]:
    """A sample rule's weight and a query's value come from their own row: alone, in a batch, and on whole columns."""
    rule = subject.rule
    readings: list[tuple[str, Reading, int | None]] = [(q.name, q.value, q.width(FACTS)) for q in subject.queries]
    if isinstance(rule, SampleRule):
        readings.append((rule.name, rule.weight, None))

    def broken(case: Case) -> str:
        stats, state = case.stats(), case.state(subject)
        return next(filter(None, (_coupled(*reading, stats, state) for reading in readings)), "")

    problem = search(cases(), broken, TRIED)
    for size in () if problem else (1, 2, 33, 64, 257):
        large = Case((), scales=SCALES[size % 2], answers=(1.0, 5.0, -3.0), age=size % 3).state(subject)
        said = next(filter(None, (_coupled(*reading, _random(size), large) for reading in readings)), "")
        problem = problem or (said and f"{said}. Found in a batch of {size} random rows")
    return not problem, problem or (f"{TRIED} cases, batches of 0 to 257 rows" if readings else "reads whole batches")


def _coupled(name: str, function: Reading, width: int | None, stats: Stats, state: State) -> str:
    """Compare four ways of asking: each row under vmap, the whole columns, a batch of one, and among other rows."""
    count = stats.norm.shape[0]
    alone = by_row(function, stats, state)
    whole = function(stats, state)
    comparable = width is None or whole.shape == (count, width) != (width, count)
    if comparable and (whole.shape != alone.shape or not same(whole.double(), alone.double(), _ROUNDING)):
        return f"{name!r} gives another result on whole columns than on each row alone"
    others = _changed(stats)
    for i in range(min(count, 8)):
        index = torch.tensor([i])
        if not same(by_row(function, taken(stats, index), state)[0].double(), alone[i].double(), _ROUNDING):
            return f"{name!r} gives row {i} another result in a batch of one"
        if width is None and not same(function(taken(stats, index), state).double(), alone[index].double(), _ROUNDING):
            return f"{name!r} gives row {i} another result as columns of length one"
        mixed = Stats(
            *(
                torch.cat([a[:i], b[i : i + 1], a[i + 1 :]])
                for a, b in zip(columns(others), columns(stats), strict=True)
            )
        )
        if not same(by_row(function, mixed, state)[i].double(), alone[i].double(), _ROUNDING) or (
            width is None and not same(function(mixed, state)[i].double(), alone[i].double(), _ROUNDING)
        ):
            return f"{name!r} gives row {i} another result when other rows change"
    return ""


def _changed(stats: Stats) -> Stats:
    """Other rows of the same number: every column differs from the given one."""
    return Stats(
        norm=stats.norm.flip(0) * 3 + 1.7,
        loss=1.0 - stats.loss.flip(0),
        group=(stats.group + 1) % len(FACTS.groups),
        owner=(stats.owner + 1) % len(FACTS.owners),
        record=stats.record + 100,
    )


def _random(count: int) -> Stats:
    source = torch.Generator().manual_seed(count)
    return Stats(
        norm=10 ** (4 * torch.randn(count, generator=source, dtype=torch.float64)),
        loss=torch.randn(count, generator=source, dtype=torch.float64),
        group=torch.randint(len(FACTS.groups), (count,), generator=source),
        owner=torch.randint(len(FACTS.owners), (count,), generator=source),
        record=torch.randperm(count, generator=source),
    )


def order(subject: Subject) -> tuple[bool, str]:
    """Weights belong to rows, not to places: a batch in another order gives the same weight to the same record."""

    def broken(case: Case) -> str:
        stats, state = case.stats(), case.state(subject)
        here, places = weights(subject.rule, stats, state), torch.arange(len(case.rows))
        for moved in (places.flip(0), places.roll(1)):
            other = taken(stats, moved)
            if _moved(weights(subject.rule, other, state), here[moved], other):
                return "gives a record another weight when the rows come in another order"
        return ""

    problem = search(cases(), broken, TRIED)
    return not problem, problem or f"{TRIED} cases"


def _moved(here: Tensor, there: Tensor, stats: Stats) -> bool:
    """A difference counts when it moves the sum by more than rounding."""
    most = torch.maximum(here.abs(), there.abs()) * stats.norm
    return bool(((here - there).abs() * stats.norm > _SLACK * most.sum()).any()) or here.shape != there.shape
