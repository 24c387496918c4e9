"""A user's file: run it, and take what it registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from evenhand.methods import registry
from evenhand.methods.catalogue import RECIPES
from evenhand.methods.composition import Method
from evenhand.methods.queries import Query
from evenhand.methods.rules import Clip, Rule
from evenhand.methods.schedules import Phases
from evenhand.types import Batch, Event, Facts, Pass, Public


def subjects_in(path: Path) -> tuple[Subject, ...]:
    """Every rule and query that the file registers, with default settings. The file is executed: use your own only."""
    module = _user_code.executed(path, "rule")
    rules, queries = (_registered(kind, module.__name__) for kind in ("rule", "query"))
    if not rules and not queries:
        raise UsageError(
            f"{path.name} registers no rule and no query: derive a frozen dataclass from SampleRule, BatchRule or "
            "Query and write @register above it."
        )
    subjects = [Subject.of(made(cls)) for cls in rules]
    seen = {query.name for subject in subjects for query in subject.queries}
    return (*subjects, *(Subject.of(made(cls)) for cls in queries if cls.name not in seen))


def _registered(kind: str, module: str) -> list[Any]:
    found = [registry.part(kind, name) for name in registry.names(kind)]
    return [cls for cls in found if cls.__module__ == module]


Step: TypeAlias = Callable[[Mechanism, Pass, Batch, Mapping[str, Any]], Released]

FACTS = Facts(400, (("a", 200), ("b", 100), ("c", 100)), groups=("x", "y", "z"))
"""Public facts of the made-up data: three owner classes, three groups."""

DELTA = 1e-5
BATCH, STEPS = 4.0, 200
_QUERY_NOISE = 2.0


class Sampler(Protocol):
    """Draws the rows of each step."""

    def rows(self, step: int) -> Tensor:
        """Numbers of the rows that this step uses."""
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
        """A rule with the queries that it needs; a query with a rule that needs it, else with clipping."""
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
        """Whether the rule claims anything that could be wrong."""
        return self.rule.guarantee != "not private"

    def plan(self, *, noise: float = 1.0, scales: Sequence[float] = (1.0, 1.0, 1.0), bound: float = 1.0) -> Plan:
        """A short plan with two levels of noise and bound, so that a step that forgets its level shows."""
        method = Method(self.rule, self.queries, Phases(n=2, noise=0.8, length=1.0, growth=1.2, bound=bound))
        promise = FixedNoise(noise, DELTA) if self.private else None
        made = plan(
            method, promise, data=FACTS, epochs=STEPS * BATCH / FACTS.records, batch_size=BATCH, allow_unproven=True
        )
        return replace(made, scales=tuple(scales))

    def mechanism(self, made: Plan, seed: int = 0, segment: int = 0) -> Mechanism:
        """The mechanism under this plan."""
        return Mechanism(made, self.rule, self.queries, self.stream(seed, segment))


def public(made: Plan) -> Public:
    """The constants of a plan as rules see them."""
    rate = torch.tensor(made.rates, dtype=torch.float64)
    sizes = torch.tensor([count for _, count in made.facts.owners], dtype=torch.float64)
    return Public(
        batch=made.expected_batch,
        steps_per_epoch=made.facts.records / made.expected_batch,
        groups=len(made.facts.groups),
        rate=rate,
        expected=rate * sizes,
    )


def registered() -> tuple[Subject, ...]:
    """Every registered rule and query, as its own subject.

    Examples:
      >>> "clip" in [subject.name for subject in registered()]
      True
    """
    rules = [Subject.of(made(registry.part("rule", name))) for name in registry.names("rule")]
    seen = {query.name for subject in rules for query in subject.queries}
    others = [name for name in registry.names("query") if name not in seen]
    return (*rules, *(Subject.of(made(registry.part("query", name))) for name in others))


def made(cls: Any) -> Any:
    """An instance with the default settings; a setting without a default is an error that says so."""
    missing = _required(cls)
    if missing:
        raise UsageError(
            f"{cls.__name__} has no default for {', '.join(missing)}, so the kit cannot make one: give it a default."
        )
    return cls(noise=_QUERY_NOISE) if issubclass(cls, Query) else cls()


def _queries(rule: Rule) -> tuple[Query, ...]:
    """The queries that the rule needs: as a recipe of the catalogue asks them, else by name."""
    for recipe in RECIPES.values() if rule.needs else ():
        method = recipe.make(**recipe.defaults)
        if method.rule.name == rule.name and {query.name for query in method.queries} == set(rule.needs):
            return method.queries
    return tuple(made(registry.part("query", name)) for name in rule.needs)


def _asking(query: Query) -> Subject:
    """A registered rule that needs the query, asked with it; clipping if there is none."""
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
