"""Play thousands of trials in one run of a plan: the sampler, step and noise that run are those that are attacked.

A run has as many coordinates as trials. A trial with the record has a record of its own, whose gradient is its own
coordinate, as long as the rule lets it be; a trial without the record is a coordinate to which nobody belongs. All
other records have a gradient of zero. Every step draws rows with the run's own sampler and goes through
``private_gradient`` once, for all trials together.

A trial in such a run is what it would be in a run of its own (docs/proofs/packed_trials.md): coins of records are
independent, so is the noise of coordinates, and the weight of a row follows from that row alone. Where a rule asks side
queries or looks at the whole batch, trials share what these say; the page tells what that means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.accounting.plan import Plan, Stage
from evenhand.mechanism.audit.worst_rows import WorstRows, WorstRowSearch, reach_of
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.mechanism.step import Mechanism, Released, private_gradient
from evenhand.methods import registry
from evenhand.methods.queries import Query
from evenhand.methods.rules import Rule, SampleRule
from evenhand.types import Batch, Pass, State, Stats

NAME = "weight"
_LARGEST_EXPONENT = 600.0


class Sampler(Protocol):
    """Protocol of a sampler, which draws the rows of each step."""

    def rows(self, step: int) -> Tensor:
        """Return the numbers of the rows that this step uses."""
        ...


@dataclass(frozen=True)
class Mechanics:
    """Hold what turns a plan into released numbers. The defaults are what every training runs.

    ``stream(number)`` gives the secret key of a stage of a run, another one for every number.
    """

    rule: Rule
    queries: tuple[Query, ...]
    step: Callable[[Mechanism, Pass, Batch, Mapping[str, Any]], Released] = private_gradient
    sampler: Callable[..., Sampler] = PoissonSampler
    stream: Callable[[int], Stream] = lambda number: Stream.fresh()

    @classmethod
    def of(cls, plan: Plan) -> Mechanics:
        """Return the mechanics that a training under this plan runs."""
        queries = tuple(registry.build("query", **query) for query in plan.queries)
        return cls(registry.build("rule", **plan.rule), queries)


@dataclass(frozen=True)
class World:
    """Say who is in the data of a packed run, and which coordinate belongs to whom.

    Attributes:
      owner: owner class of every record.
      place: coordinate of every record that is a trial, -1 for all others.
      members: coordinates of the trials with the record, one row per attacked class.
      others: coordinates of the trials without.
      classes: the attacked owner classes.
    """

    owner: Tensor
    place: NDArray[np.int64]
    members: NDArray[np.int64]
    others: NDArray[np.int64]
    classes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, classes: Sequence[int], trials: int) -> World:
        """Return a world with so many trials on either side for each of these classes.

        It has as many records of every class as the plan, or more where the trials need them.
        """
        sizes = [max(count, trials if k in classes else 0) for k, (_, count) in enumerate(plan.facts.owners)]
        owner, first = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([[0], np.cumsum(sizes)])
        mixed = np.random.default_rng(0).permutation((len(classes) + 1) * trials)  # so that no stretch is one side's
        coordinates, place = mixed.reshape(-1, trials), np.full(len(owner), -1, dtype=np.int64)
        for row, number in enumerate(classes):
            place[first[number] : first[number] + trials] = coordinates[row]
        return cls(torch.from_numpy(owner), place, coordinates[:-1], coordinates[-1], tuple(classes))

    @property
    def dimension(self) -> int:
        """Return the number of coordinates."""
        return self.members.size + self.others.size


@dataclass(frozen=True)
class Scores:
    """Hold the log-likelihood ratios of trials: one row per attacked class, high for "the record is in"."""

    members: NDArray[np.float64]
    others: NDArray[np.float64]


def stages_of(plan: Plan) -> Iterator[Plan]:
    """Yield a plan per stage: the steps that share rates and bounds, each of which a run made with a key of its own."""
    for stage in (*plan.earlier, Stage(plan.rates, plan.scales, plan.levels)):
        yield replace(
            plan,
            earlier=(),
            prior=None,
            rates=stage.rates,
            scales=stage.scales,
            levels=stage.levels,
            steps=stage.steps,
        )


def play(plan: Plan, mechanics: Mechanics, world: World, number: int = 0) -> Scores:
    """Run the whole plan once in this world; return the score of every trial, by all released gradients together."""
    scores = np.zeros((len(world.classes), world.members.shape[1])), np.zeros((len(world.classes), world.others.size))
    stages = list(stages_of(plan))
    for place, part in enumerate(stages, number * len(stages)):
        mechanism = Mechanism(part, mechanics.rule, mechanics.queries, mechanics.stream(place))
        _play_stage(mechanism, mechanics, world, Scores(*scores))
    return Scores(*scores)


def _play_stage(mechanism: Mechanism, mechanics: Mechanics, world: World, scores: Scores) -> None:
    """Add to the scores what the steps of one stage tell."""
    plan, rule = mechanism.plan, mechanics.rule
    sampler = sampler_of(mechanics, mechanism, world)
    memory = rule.initial(plan.facts)
    answers = {query.name: torch.zeros(query.width(plan.facts)).double() for query in mechanics.queries}
    owner, place = world.owner, torch.from_numpy(world.place)
    seen = [torch.from_numpy(np.concatenate([row, world.others])) for row in world.members]
    totals = [torch.zeros(len(coordinates), dtype=torch.float64) for coordinates in seen]
    search = WorstRowSearch(mechanism)
    for position in range(plan.steps):
        worst = search.find(position, answers, memory)
        rows = sampler.rows(position)
        batch = Batch(None, None, _groups(worst, owner[rows], place[rows]), owner[rows], rows, position, 0)
        released = mechanics.step(mechanism, _pass_of(worst, owner[rows], place[rows], world.dimension), batch, memory)
        reach = _reach_in(mechanism, released.state, worst)
        noisy = released.gradient[NAME].double() * plan.expected_batch
        for row, number in enumerate(world.classes):
            add_ratio(totals[row], noisy[seen[row]], reach[number], released.commit.std, plan.rates[number])
        memory = released.memory
        answers = dict(released.state.answers) if released.state is not None else answers
    trials = world.members.shape[1]
    for row, total in enumerate(totals):
        scores.members[row] += total[:trials].numpy()
        scores.others[row] += total[trials:].numpy()


def sampler_of(mechanics: Mechanics, mechanism: Mechanism, world: World) -> Sampler:
    """Return the sampler that a training of this mechanism on the world's records uses."""
    if mechanics.sampler is not PoissonSampler:
        return mechanics.sampler(world.owner, mechanism.plan.rates, mechanism.stream)
    scales = None if mechanism.whole else mechanism.plan.scales
    return PoissonSampler(world.owner, mechanism.plan.rates, mechanism.stream, scales)


def _groups(worst: WorstRows, owner: Tensor, place: Tensor) -> Tensor:
    return torch.where(place >= 0, torch.from_numpy(worst.group)[owner], 0)


def _pass_of(worst: WorstRows, owner: Tensor, place: Tensor, dimension: int) -> Pass:
    """Return the pass over these rows: a trial's gradient is its own coordinate, everybody else's is zero."""
    trial = place >= 0
    norm = torch.where(trial, torch.from_numpy(worst.norm)[owner], 0.0)
    loss = torch.where(trial, torch.from_numpy(worst.loss)[owner], 0.0)
    coordinates, lengths = place[trial], norm[trial]

    def weighted_sum(weights: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(dimension)
        return {NAME: total.index_add_(0, coordinates, (weights[trial].double() * lengths).float())}

    return Pass(loss, norm, weighted_sum, finite=True)


def _reach_in(mechanism: Mechanism, state: State | None, worst: WorstRows) -> NDArray[np.float64]:
    """Return how far the worst rows went in a step, which the attacker computes from the answers that it released."""
    if state is None or not mechanism.queries or not isinstance(mechanism.rule, SampleRule):
        return worst.reach
    stats = Stats(
        torch.from_numpy(worst.norm),
        torch.from_numpy(worst.loss),
        torch.from_numpy(worst.group),
        torch.arange(len(worst.norm)),
        torch.arange(len(worst.norm)),
    )
    return np.asarray(reach_of(mechanism, state, stats).numpy())


def add_ratio(total: Tensor, noisy: Tensor, reach: float, std: float, rate: float) -> None:
    """Add log P / Q of a step's outputs: Q is the noise alone, P has the record in it with its rate."""
    if rate == 0 or reach == 0:
        return
    std = max(std, 1e-9 * reach)
    distance = reach / std
    exponent = noisy.mul_(distance / std).sub_(distance**2 / 2)
    if rate == 1:
        total += exponent
    else:
        total += exponent.clamp_(max=_LARGEST_EXPONENT).expm1_().mul_(rate).log1p_()
