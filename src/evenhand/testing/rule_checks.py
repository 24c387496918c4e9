"""Checks a rule's claims: searches for the smallest input that breaks one, and that the rule is a pure function."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from evenhand import generators
from evenhand.errors import UsageError
from evenhand.mechanism.step import clamp_weights
from evenhand.methods import registry
from evenhand.methods.rules import BatchRule, Rule, SampleRule
from evenhand.testing.subjects import FACTS, SCALES, Case, Subject, cases, simpler
from evenhand.types import State, Stats

T = TypeVar("T")

_PATIENCE = 2000
_RAISES = "raises"


def search(draw: Callable[[random.Random], T], broken: Callable[[T], str], count: int) -> str:
    """Try ``count`` drawn inputs; return the fault with the smallest input that shows it, or "".

    The draws are the same at every run. An exception of the code under test counts as broken.

    Examples:
      >>> from evenhand.testing.subjects import cases
      >>> words = search(cases(), lambda case: "has rows of group 2" if {2} & {r.group for r in case.rows} else "", 50)
      >>> words.startswith("has rows of group 2. Smallest input found: (norm 1, loss 0, group 2, owner 0); bounds 1")
      True
    """

    def said(case: T) -> str:
        try:
            return broken(case)
        except Exception as error:
            return (
                f"{_RAISES} {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no words'}"
            )

    source = random.Random(0)
    for _ in range(count):
        case = draw(source)
        words = said(case)
        if words:
            return _worded(*_smallest(case, words, said))
    return ""


def _smallest(case: T, words: str, said: Callable[[T], str]) -> tuple[T, str]:
    """Take the first simpler case that is still broken, until none is; a crash is not replaced by another fault."""
    tries = 0
    while tries < _PATIENCE:
        for other in _simpler(case):
            tries += 1
            heard = said(other)
            if heard and heard.startswith(_RAISES) == words.startswith(_RAISES):
                case, words = other, heard
                break
        else:
            return case, words
    return case, words


def _simpler(case: Any) -> Iterator[Any]:
    if isinstance(case, Case):
        yield from simpler(case)
    elif isinstance(case, tuple):
        for i, part in enumerate(case):
            yield from ((*case[:i], other, *case[i + 1 :]) for other in _simpler(part))


def _worded(case: object, words: str) -> str:
    shown = " and ".join(map(str, case)) if isinstance(case, tuple) else str(case)
    return f"{words}. Smallest input found: {shown}"


Reading = Callable[[Stats, State], Tensor]


def columns(stats: Stats) -> tuple[Tensor, ...]:
    """Return the columns in the order in which Stats takes them."""
    return (stats.norm, stats.loss, stats.group, stats.owner, stats.record)


def taken(stats: Stats, index: Tensor) -> Stats:
    """Return the rows with these numbers, in this order."""
    return Stats(*(column[index] for column in columns(stats)))


def by_row(function: Reading, stats: Stats, state: State) -> Tensor:
    """Apply ``function`` to each row alone: so a sample rule and a query are defined, however the step computes it."""
    rows = columns(stats)
    if not stats.norm.numel():  # vmap cannot run on no rows: the shape is that of a made-up row, taken zero times
        return by_row(
            function, Stats(*(row.new_ones(1) for row in rows[:2]), *(row.new_zeros(1) for row in rows[2:])), state
        )[:0]
    return vmap(lambda *row: function(Stats(*row), state))(*rows)


def weights(rule: Rule, stats: Stats, state: State) -> Tensor:
    """Return the rule's weights, before the step limits them to the bound."""
    if isinstance(rule, SampleRule):
        return by_row(rule.weight, stats, state)
    if isinstance(rule, BatchRule):
        return rule.weights(stats, state)
    raise UsageError(f"{type(rule).__name__} is neither a SampleRule nor a BatchRule: derive it from one.")


def movements(rule: Rule, case: Case, state: State) -> Tensor:
    """Compute for each row how far removing it moves the weighted sum when gradients have the worst directions.

    Exact: ``w_r n_r + sum_j |w_j(with) - w_j(without)| n_j``, reached by gradients that are all parallel. For a sample
    rule other rows cannot move, and its weight counts as returned; a batch rule is held to its bound by the step first.
    """
    stats = case.stats()
    if isinstance(rule, SampleRule):
        return weights(rule, stats, state) * stats.norm
    sensitivity = rule.sensitivity(state)
    here = clamp_weights(weights(rule, stats, state), stats, sensitivity)
    moved = here * stats.norm
    for removed in range(len(case.rows)):
        rest = case.stats(without=removed)
        there = clamp_weights(weights(rule, rest, state), rest, sensitivity)
        stayed = torch.cat([here[:removed], here[removed + 1 :]])
        moved[removed] += ((stayed - there).abs() * rest.norm).sum()
    return moved


def same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Return whether tensors, numbers, and mappings and sequences of them are equal; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        close = torch.allclose(left, right, rtol=tolerance, atol=0.0, equal_nan=True)
        return close if tolerance else torch.equal(left.nan_to_num(nan=-77.0), right.nan_to_num(nan=-77.0)) and close
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key], tolerance) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b, tolerance) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and (bool(left == right) or (left != left and right != right))


_SLACK = 1e-9
_ROUNDING = 1e-12
SEARCHED = 1000
TRIED = 200


def form(subject: Subject) -> tuple[bool, str]:
    """Check for one finite weight >= 0 per row, a usable S, queries inside their declared norm; also on no rows."""

    def broken(case: Case) -> str:
        stats, state = case.stats(), case.state(subject)
        row_weights = weights(subject.rule, stats, state)
        if row_weights.shape != stats.norm.shape or not row_weights.is_floating_point():
            return "does not give one floating-point weight per row"
        if not bool(torch.isfinite(row_weights).all()) or bool((row_weights < 0).any()):
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
    """Check that removing any one record moves the weighted sum by at most the S of its owner class."""
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
    """Check that a sample rule's weight and a query's value depend on their own row only.

    Rows are tried alone, in a batch, and as whole columns.
    """
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
    """Compare four ways to evaluate: each row under vmap, whole columns, a batch of one, and among other rows."""
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
    """Return as many other rows: every column differs from the given one."""
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
    """Check that weights belong to rows, not to places or numbers: these may only break ties.

    Another order of the rows, and other numbers in the same order, which records get when one of them goes, give equal
    weights to equal records.
    """

    def broken(case: Case) -> str:
        stats, state = case.stats(), case.state(subject)
        here, places = weights(subject.rule, stats, state), torch.arange(len(case.rows))
        for moved in (places.flip(0), places.roll(1)):
            other = taken(stats, moved)
            if _moved(weights(subject.rule, other, state), here[moved], other):
                return "gives a record another weight when the rows come in another order"
        renumbered = replace(stats, record=3 * stats.record + 5)
        if not same(_results(subject, renumbered, state), _results(subject, stats, state)):
            return "depends on the numbers of records, which all change when one of them goes, beyond breaking ties"
        return ""

    problem = search(cases(), broken, TRIED)
    return not problem, problem or f"{TRIED} cases"


def _moved(here: Tensor, there: Tensor, stats: Stats) -> bool:
    """Return whether a difference moves the sum by more than rounding."""
    most = torch.maximum(here.abs(), there.abs()) * stats.norm
    return bool(((here - there).abs() * stats.norm > _SLACK * most.sum()).any()) or here.shape != there.shape


def purity(subject: Subject) -> tuple[bool, str]:
    """Check that equal inputs give equal outputs, whatever was asked in between.

    Inputs and random generators must stay as they were.
    """
    for part in _parts(subject):
        settings = getattr(part, "__dataclass_params__", None)
        if settings is None or not settings.frozen:
            return False, f"{type(part).__name__} is not a frozen dataclass"

    def broken(drawn: tuple[Case, Case]) -> str:
        case, other = drawn
        stats, state = case.stats(), case.state(subject)
        inputs = copy.deepcopy((columns(stats), state.bound, dict(state.answers), dict(state.memory)))
        before, python = generators.Snapshot(), random.getstate()  # the latter has the normal that gauss keeps
        first = _results(subject, stats, state)
        if before.moved() or python != random.getstate():
            return "draws from a global random generator"
        if not same(first, _results(subject, stats, state)):
            return "gives different results for the same input"
        if not same(inputs, (columns(stats), state.bound, dict(state.answers), dict(state.memory))):
            return "changes its input"
        _results(subject, other.stats(), other.state(subject))
        if not same(first, _results(subject, stats, state)):
            return "gives another result after it has seen another batch"
        return ""

    problem = search(lambda source: (cases(least=1)(source), cases()(source)), broken, TRIED)
    return not problem, problem or f"{TRIED} pairs of cases"


def memory(subject: Subject) -> tuple[bool, str]:
    """Check that memory and sensitivity depend on public constants and noisy answers only, not on rows."""
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
    """Check that settings survive the plan's JSON, so that a resumed or verified part equals the trained one."""
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
    """Build the part by name if it is registered, as a plan does; else by its class."""
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
