"""Made-up batches: small, with ties, zeros and extremes, and everything else that a rule may see."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenhand.testing.subjects import FACTS, STEPS, Subject
from evenhand.types import Public, State, Stats

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
        """The columns, if asked without one row. Record ids stay with their rows and are not in their order."""
        kept = [i for i in range(len(self.rows)) if i != without]
        rows = [self.rows[i] for i in kept]
        return Stats(
            norm=torch.tensor([row.norm for row in rows], dtype=torch.float64),
            loss=torch.tensor([row.loss for row in rows], dtype=torch.float64),
            group=torch.tensor([row.group for row in rows], dtype=torch.long),
            owner=torch.tensor([row.owner for row in rows], dtype=torch.long),
            record=torch.tensor([_RECORDS[i] for i in kept], dtype=torch.long),
        )

    def noisy(self, subject: Subject) -> dict[str, Tensor]:
        """Made-up answers of the subject's queries: noise makes any value possible, so any may be tried."""
        found = {}
        for place, query in enumerate(subject.queries):
            width = query.width(FACTS)
            values = [self.answers[(place + i) % len(self.answers)] for i in range(width)]
            found[query.name] = torch.tensor(values, dtype=torch.float64)
        return found

    def state(self, subject: Subject) -> State:
        """What the rule may use besides its rows, with a memory of ``age`` steps with these answers."""
        state = State(0, self.bounds, self.noisy(subject), subject.rule.initial(FACTS), self.public)
        for step in range(self.age):
            state = replace(state, step=step, memory=subject.rule.advance(state))
        return replace(state, step=self.step)


def cases(*, spoilt: bool = False, least: int = 0) -> Callable[[random.Random], Case]:
    """How to draw a case of at most seven rows. Half of the rows come from one or two losses, so that ties are usual.

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
    """Cases with one thing less: a row dropped, or a value nearer to the front of its list."""
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
