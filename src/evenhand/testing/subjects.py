"""Subjects of the conformance kit, from the registry or a user's file, and the made-up cases they are tried on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from evenhand import _user_code
from evenhand.accounting.budgets import FixedNoise
from evenhand.errors import UsageError
from evenhand.mechanism.make_plan import Plan, plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.mechanism.step import Mechanism, Released, private_gradient
from evenhand.methods import catalogue, registry
from evenhand.methods.catalogue import RECIPES
from evenhand.methods.composition import Method
from evenhand.methods.plugins import adopt
from evenhand.methods.queries import Query
from evenhand.methods.rules import Clip, Rule
from evenhand.methods.schedules import Phases
from evenhand.types import Batch, Event, Facts, Pass, Public, State, Stats


def subjects_in(path: Path) -> tuple[Subject, ...]:
    """Return every rule and query that the file registers, with default settings; or the one that the path names.

    The file is executed, and so is the package that declares a name: use only those that you trust.
    """
    if not path.suffix and not path.exists():
        kinds = [kind for kind in ("rule", "query") if path.name in registry.names(kind)]
        part = registry.part(kinds[0], path.name) if kinds else adopt(path.name)
        if part is not None:
            return (Subject.of(build_default(part) if isinstance(part, type) else catalogue.method(path.name).rule),)
    module = _user_code.executed(path, "rule")
    rules, queries = (_registered(kind, module.__name__) for kind in ("rule", "query"))
    if not rules and not queries:
        raise UsageError(
            f"{path.name} registers no rule and no query: derive a frozen dataclass from SampleRule, BatchRule or "
            "Query and write @register above it."
        )
    subjects = [Subject.of(build_default(cls)) for cls in rules]
    seen = {query.name for subject in subjects for query in subject.queries}
    return (*subjects, *(Subject.of(build_default(cls)) for cls in queries if cls.name not in seen))


def _registered(kind: str, module: str) -> list[Any]:
    classes = [registry.part(kind, name) for name in registry.names(kind)]
    return [cls for cls in classes if cls.__module__ == module]


Step: TypeAlias = Callable[[Mechanism, Pass, Batch, Mapping[str, Any]], Released]

FACTS = Facts(400, (("a", 200), ("b", 100), ("c", 100)), groups=("x", "y", "z"))
"""Public facts of the made-up data: three owner classes, three groups."""

DELTA = 1e-5
BATCH, STEPS = 4.0, 200
_QUERY_NOISE = 2.0


class Sampler(Protocol):
    """Protocol of a sampler, which draws the rows of each step."""

    def rows(self, step: int) -> Tensor:
        """Return the numbers of the rows that this step uses."""
        ...


@dataclass(frozen=True)
class Subject:
    """A whole mechanism. Everything but the rule defaults to evenhand's own; put in another part to test that part.

    ``stream(seed, segment)`` makes the noise, ``sampler(owner, rates, stream)`` the draws, and ``events(plan, owner)``
    says what is accounted for a record of an owner class.

    Examples:
      >>> Subject(Clip()).name
      'clip'
    """

    rule: Rule
    queries: tuple[Query, ...] = ()
    step: Step = private_gradient
    stream: Callable[[int, int], Stream] = Stream.insecure
    sampler: Callable[[Tensor, Sequence[float], Stream], Sampler] = PoissonSampler
    events: Callable[[Plan, int], list[Event]] = Plan.events

    @classmethod
    def of(cls, part: Subject | Rule | Query) -> Subject:
        """Return a rule with the queries that it needs; a query with a rule that needs it, else with clipping."""
        if isinstance(part, Subject):
            return part
        if isinstance(part, Query):
            return _asking(part)
        if isinstance(part, Rule):
            return cls(part, _queries(part))
        raise UsageError(f"The kit checks rules and queries, not {type(part).__name__}: pass an instance of one.")

    @property
    def name(self) -> str:
        """The name of the rule, and of the queries it is asked with."""
        return " + ".join([self.rule.name, *(query.name for query in self.queries)])

    @property
    def private(self) -> bool:
        """Return whether the rule claims to be private, so that its claims can be tested."""
        return self.rule.guarantee != "not private"

    def plan(self, *, noise: float = 1.0, scales: Sequence[float] = (1.0, 1.0, 1.0), bound: float = 1.0) -> Plan:
        """Return a short plan with two levels of noise and bound, so that a step that ignores its level is caught."""
        method = Method(self.rule, self.queries, Phases(n=2, noise=0.8, length=1.0, growth=1.2, bound=bound))
        promise = FixedNoise(noise, DELTA) if self.private else None
        short_plan = plan(
            method, promise, data=FACTS, epochs=STEPS * BATCH / FACTS.records, batch_size=BATCH, allow_unproven=True
        )
        return replace(short_plan, scales=tuple(scales))

    def mechanism(self, plan: Plan, seed: int = 0, segment: int = 0) -> Mechanism:
        """Return the mechanism under this plan."""
        return Mechanism(plan, self.rule, self.queries, self.stream(seed, segment))


def public(plan: Plan) -> Public:
    """Return the constants of a plan as rules see them."""
    rate = torch.tensor(plan.rates, dtype=torch.float64)
    sizes = torch.tensor([count for _, count in plan.facts.owners], dtype=torch.float64)
    return Public(
        batch=plan.expected_batch,
        steps_per_epoch=plan.facts.records / plan.expected_batch,
        groups=len(plan.facts.groups),
        rate=rate,
        expected=rate * sizes,
    )


def registered() -> tuple[Subject, ...]:
    """Return every registered rule and query, each as a subject.

    Examples:
      >>> "clip" in [subject.name for subject in registered()]
      True
    """
    rules = [Subject.of(build_default(registry.part("rule", name))) for name in registry.names("rule")]
    seen = {query.name for subject in rules for query in subject.queries}
    others = [name for name in registry.names("query") if name not in seen]
    return (*rules, *(Subject.of(build_default(registry.part("query", name))) for name in others))


def build_default(cls: Any) -> Any:
    """Return an instance with the default settings; raise UsageError for a setting without a default."""
    missing = _required(cls)
    if missing:
        raise UsageError(
            f"{cls.__name__} has no default for {', '.join(missing)}, so the kit cannot make one: give it a default."
        )
    return cls(noise=_QUERY_NOISE) if issubclass(cls, Query) else cls()


def _queries(rule: Rule) -> tuple[Query, ...]:
    """Return the queries that the rule needs: as a recipe of the catalogue has them, else by name."""
    for recipe in RECIPES.values() if rule.needs else ():
        method = recipe.make(**recipe.defaults)
        if method.rule.name == rule.name and {query.name for query in method.queries} == set(rule.needs):
            return method.queries
    return tuple(build_default(registry.part("query", name)) for name in rule.needs)


def _asking(query: Query) -> Subject:
    """Return a registered rule that needs the query, together with it; clipping if there is none."""
    for name in registry.names("rule"):
        cls = registry.part("rule", name)
        if not _required(cls) and query.name in cls().needs:
            return Subject(cls(), tuple(query if other.name == query.name else other for other in _queries(cls())))
    return Subject(Clip(), (query,))


def _required(cls: Any) -> list[str]:
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


BOUNDS = (1.0, 0.1, 10.0)
SCALES: tuple[tuple[float, ...], ...] = ((1.0, 1.0, 1.0), (0.3, 1.0, 2.5))
_EXTREMES = (1e15, 1e-30, 1e30, 5e-324)
NORMS = (1.0, 0.0, 2.0, 0.5, 3.0, 0.1, 10.0, 0.05, 1.5, 7.0, 20.0, 50.0, 100.0, 1.0 + 1e-9, 1e3, 1e-6, *_EXTREMES)
LOSSES = (0.0, 1.0, 2.0, 0.5, 3.0, -1.0, 1e-30, 1e30, -1e30)
ANSWERS = (0.0, 1.0, 3.0, 10.0, 40.0, -1.0, -10.0, 0.5, 100.0, -100.0, 1000.0)
_RECORDS = (5, 2, 9, 0, 7, 3, 8, 1, 6, 4)
BATCHES = (4.0, 1.0, 40.0)
LAST = STEPS - 1


@dataclass(frozen=True)
class Row:
    """One record of a made-up batch; ``spoilt`` means that its loss or gradient is not finite."""

    norm: float
    loss: float
    group: int
    owner: int
    spoilt: bool = False

    def __str__(self) -> str:
        words = f"norm {self.norm:.10g}, loss {self.loss:.10g}, group {self.group}, owner {self.owner}"
        return f"({words}, not finite)" if self.spoilt else f"({words})"


@dataclass(frozen=True)
class Case:
    """A batch and everything else that a rule may see, all made up."""

    rows: tuple[Row, ...]
    bound: float = 1.0
    scales: tuple[float, ...] = SCALES[0]
    answers: tuple[float, ...] = (0.0,)
    age: int = 0
    step: int = 0
    batch: float = BATCHES[0]

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.rows)) or "no rows"
        bounds = ", ".join(f"{self.bound * scale:g}" for scale in self.scales)
        rest = {
            "answers": ", ".join(f"{answer:g}" for answer in self.answers) if any(self.answers) else "",
            "expected batch": f"{self.batch:g}" if self.batch != BATCHES[0] else "",
            "step": f"{self.step}" if self.step else "",
            "steps before": f"{self.age}" if self.age else "",
        }
        return "; ".join([rows, f"bounds {bounds}", *(f"{name} {value}" for name, value in rest.items() if value)])

    @property
    def bounds(self) -> Tensor:
        """The clip bound of each owner class."""
        return torch.tensor([self.bound * scale for scale in self.scales], dtype=torch.float64)

    @property
    def public(self) -> Public:
        """The constants of a plan with this expected batch."""
        sizes = torch.tensor([count for _, count in FACTS.owners], dtype=torch.float64)
        rate = torch.full_like(sizes, self.batch / FACTS.records)
        return Public(self.batch, FACTS.records / self.batch, len(FACTS.groups), rate, rate * sizes)

    def stats(self, without: int | None = None) -> Stats:
        """Return the columns, without one row if asked. Record ids stay with their rows and are not in their order."""
        numbers = [i for i in range(len(self.rows)) if i != without]
        rows = [self.rows[i] for i in numbers]
        return Stats(
            norm=torch.tensor([row.norm for row in rows], dtype=torch.float64),
            loss=torch.tensor([row.loss for row in rows], dtype=torch.float64),
            group=torch.tensor([row.group for row in rows], dtype=torch.long),
            owner=torch.tensor([row.owner for row in rows], dtype=torch.long),
            record=torch.tensor([_RECORDS[i] for i in numbers], dtype=torch.long),
        )

    def noisy(self, subject: Subject) -> dict[str, Tensor]:
        """Return made-up answers of the subject's queries: noise makes any value possible, so any may be tried."""
        answers = {}
        for place, query in enumerate(subject.queries):
            width = query.width(FACTS)
            values = [self.answers[(place + i) % len(self.answers)] for i in range(width)]
            answers[query.name] = torch.tensor(values, dtype=torch.float64)
        return answers

    def state(self, subject: Subject) -> State:
        """Return the state that the rule may use, with a memory of ``age`` steps with these answers."""
        state = State(0, self.bounds, self.noisy(subject), subject.rule.initial(FACTS), self.public)
        for step in range(self.age):
            state = replace(state, step=step, memory=subject.rule.advance(state))
        return replace(state, step=self.step)


def cases(*, spoilt: bool = False, least: int = 0) -> Callable[[random.Random], Case]:
    """Return a function that draws a case of at most seven rows.

    Many rows share a loss, so that ties are frequent.

    Examples:
      >>> len(cases(least=2)(random.Random(0)).rows) >= 2
      True
    """

    def draw(source: random.Random) -> Case:
        few = source.choices(LOSSES, k=source.choice((1, 2, 9)))
        rows = tuple(
            Row(
                norm=source.choice(NORMS) if source.random() < 0.6 else source.uniform(0, 12),
                loss=source.choice(few) if source.random() < 0.6 else source.uniform(-4, 4),
                group=source.randrange(3),
                owner=source.randrange(3),
                spoilt=spoilt and source.random() < 0.2,
            )
            for _ in range(source.randint(least, 7))
        )
        return Case(
            rows,
            bound=source.choice(BOUNDS),
            scales=source.choice(SCALES),
            answers=tuple(source.choices(ANSWERS, k=source.randint(1, 4))),
            age=source.randrange(3),
            step=source.choice((0, LAST)),
            batch=source.choice(BATCHES),
        )

    return draw


def simpler(case: Case) -> Iterator[Case]:
    """Yield simpler cases: a row dropped, or a value nearer to the front of its list."""
    for i in range(len(case.rows)):
        yield replace(case, rows=case.rows[:i] + case.rows[i + 1 :])
    if case.age:
        yield replace(case, age=case.age - 1)
    if case.step:
        yield replace(case, step=0)
    if case.answers != ANSWERS[:1]:
        yield replace(case, answers=ANSWERS[:1])
    yield from (replace(case, batch=batch) for batch in _before(case.batch, BATCHES))
    yield from (replace(case, bound=bound) for bound in _before(case.bound, BOUNDS))
    yield from (replace(case, scales=scales) for scales in _before(case.scales, SCALES))
    for i, row in enumerate(case.rows):
        for other in _simpler_rows(row):
            yield replace(case, rows=(*case.rows[:i], other, *case.rows[i + 1 :]))


def _simpler_rows(row: Row) -> Iterator[Row]:
    if row.spoilt:
        yield replace(row, spoilt=False)
    yield from (replace(row, norm=norm) for norm in _before(row.norm, NORMS))
    yield from (replace(row, loss=loss) for loss in _before(row.loss, LOSSES))
    yield from (replace(row, group=group) for group in range(row.group))
    yield from (replace(row, owner=owner) for owner in range(row.owner))


def _before(value: Any, values: Sequence[Any]) -> Sequence[Any]:
    return values[: values.index(value)] if value in values else values
