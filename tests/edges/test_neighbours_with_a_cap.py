"""Neighbouring data sets that differ in one person, whose records are drawn one by one: k of them move k bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare
from torch import Tensor

import evenhand as eh
from evenhand.accounting import accountant
from evenhand.data import Data, wrap
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.release_counts import CountTable
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.mechanism.step import Mechanism, clamp_weights, weigh
from evenhand.mechanism.weights import total_of, weights_of
from evenhand.methods import registry
from evenhand.methods.catalogue import DENSITIES, catalogue
from evenhand.types import Batch, Pass, State, Stats

PRIVATE = sorted(recipe.name for recipe in catalogue() if recipe.name not in {"sgd", *DENSITIES})
PERSONS = 12
DIRECTION = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)


@dataclass(frozen=True)
class World:
    """Twelve persons with 1 to 60 records each before the cap, hostile in size, in two groups and two owner classes."""

    data: Data
    fewer: Data
    gone: Tensor

    @classmethod
    def of(cls, seed: int) -> World:
        """Return the data with and without a person, both wrapped from their own arrays: records are renumbered."""
        random = np.random.default_rng(seed)
        cap, gone = int(random.integers(1, 9)), int(random.integers(PERSONS))
        names = random.permutation(np.repeat(np.arange(PERSONS), random.integers(1, 61, PERSONS)))
        scale = 10.0 ** random.integers(-3, 4, len(names))
        inputs = torch.from_numpy(random.normal(size=(len(names), 3)) * scale[:, None])
        if seed % 2:  # all records of a person pull the same way
            inputs = torch.from_numpy(scale)[:, None] * torch.from_numpy(random.normal(size=(PERSONS, 3)))[names]
        labels, groups = random.integers(0, 2, len(names)), random.integers(0, 2, len(names))
        owners = np.where(np.arange(PERSONS) % 2 == 0, "strict", "open")[names]

        def part(rows: np.ndarray) -> Data:
            numbered = torch.cat([inputs[rows], torch.from_numpy(np.flatnonzero(rows))[:, None]], dim=1)
            roles = {"groups": groups[rows].tolist(), "owners": owners[rows], "persons": names[rows]}
            named = {"labels": [0, 1], "group_names": [0, 1], "person_cap": cap}
            return wrap(numbered, labels[rows], **roles, **named)

        data = part(np.ones(len(names), dtype=bool))
        whose = torch.from_numpy(names)[records_of(data)]
        return cls(data, part(names != gone), whose == gone)


def records_of(data: Data) -> Tensor:
    """Return the numbers that the kept records have in the whole data."""
    return data.fetch(torch.arange(len(data)))[0][:, 3].long()


def gradients(data: Data) -> tuple[Tensor, Tensor]:
    """Gradients and losses of a logistic regression with given weights, record by record."""
    inputs, targets = data.fetch(torch.arange(len(data)))
    inputs, sign = inputs[:, :3].double(), 2.0 * targets.double() - 1.0
    margin = sign * (inputs @ DIRECTION)
    return -(sign * torch.sigmoid(-margin))[:, None] * inputs, torch.nn.functional.softplus(-margin)


def stats_of(data: Data, rows: Tensor) -> tuple[Tensor, Stats]:
    vectors, losses = (column[rows] for column in gradients(data))
    return vectors, Stats(vectors.norm(dim=1), losses, data.group[rows], data.owner[rows], rows)


def largest_move(name: str, seed: int) -> float:
    """Return the move of the sum when a person goes, in declared sensitivities of each drawn record of theirs."""
    world, random = World.of(seed), np.random.default_rng([seed, 1])
    data, fewer = world.data, world.fewer
    assert torch.equal(records_of(data)[~world.gone], records_of(fewer)), "nobody else's choice of records changes"
    theirs = world.gone.nonzero().squeeze(1)
    assert 1 <= len(theirs) <= data.facts.person_cap
    privacy = (
        eh.Budgets({"strict": 1.0, "open": 4.0}, delta=1e-3) if name.startswith(("idp", "ino")) else eh.Privacy(3, 1e-3)
    )
    plan = eh.plan(name, privacy, data=data.facts, epochs=8, batch_size=6)
    assert plan.unit == "person"
    rule = registry.build("rule", **plan.rule)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    mechanism = Mechanism(plan, rule, queries, Stream.insecure(seed, 0))
    step, memory, worst = seed % plan.steps, rule.initial(plan.facts), 0.0
    for _ in range(4):
        others = torch.from_numpy(random.random(len(fewer)) < random.random())
        drawn = torch.from_numpy(random.random(len(theirs)) < 0.7)
        drawn[random.integers(len(theirs))] = True
        chosen = world.gone.clone()
        chosen[theirs] = drawn
        chosen[~world.gone] = others
        rows = chosen.nonzero().squeeze(1)
        (vectors, stats), (rest_vectors, rest) = stats_of(data, rows), stats_of(fewer, others.nonzero().squeeze(1))
        batch = Batch(None, None, stats.group, stats.owner, stats.record, step, 0)
        weighed = weigh(mechanism, Pass(stats.loss, stats.norm, lambda _: {}), batch, memory)
        many = int(drawn.sum())
        for query, noise in zip(queries, mechanism.query_noise, strict=True):
            asked = State(step, weighed.bound.clone(), memory=memory, public=mechanism.public)
            answers = [total_of(query, noise.width, noise.sensitivity, part, asked) for part in (stats, rest)]
            assert float(np.linalg.norm(answers[0] - answers[1])) <= many * noise.sensitivity * (1 + 1e-12)
        sums = [
            clamp_weights(weights_of(rule, part, weighed.state), part, weighed.sensitivity) @ columns
            for part, columns in ((stats, vectors), (rest, rest_vectors))
        ]
        bound = float(weighed.sensitivity[int(data.owner[theirs[0]])])
        worst = max(worst, float((sums[0] - sums[1]).norm()) / (many * bound))
    return worst


@pytest.mark.parametrize("name", PRIVATE)
def test_drawn_records_of_a_person_move_a_step_by_no_more_than_is_declared_for_each(name: str) -> None:
    worst = max(largest_move(name, seed) for seed in range(5))
    assert 0.05 < worst <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_drawn_records_of_a_person_move_many_steps_by_no_more_than_is_declared(name: str) -> None:
    assert max(largest_move(name, seed) for seed in range(100)) <= 1 + 1e-9


@pytest.mark.parametrize("kind", ["labels", "labels by group"])
def test_a_person_adds_at_most_the_cap_to_released_counts(kind: str) -> None:
    for seed in range(20):
        world = World.of(seed)
        plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=world.data.facts, epochs=4, batch_size=6, prior=kind)  # type: ignore[arg-type]
        table = CountTable.of(plan.prior.kind, plan.facts)  # type: ignore[union-attr]
        moved = np.linalg.norm(table.count(world.data) - table.count(world.fewer))
        assert 0 < moved <= plan.cap * table.sensitivity
        alone = accountant.epsilon([(1.0, plan.prior.noise / plan.cap, 1)], 1e-3)  # type: ignore[union-attr]
        assert plan.composed(0, 0).epsilon(1e-3) == pytest.approx(alone, rel=1e-9), "all of the person's records count"


def test_the_number_of_drawn_records_of_a_person_is_binomial_and_an_attack_finds_less_than_is_claimed() -> None:
    """Worst-case records of one person through the plan's own sampler: how many are drawn, and what it gives away."""
    cap, others = 6, 60
    names = np.append(np.repeat(0, 9), np.arange(1, others + 1))
    data = wrap(torch.zeros(len(names), 1), [0, 1] * 34 + [0], labels=[0, 1], persons=names, person_cap=cap)
    plan = eh.plan("dpsgd", eh.Privacy(2, 1e-2), data=data.facts, epochs=0.2, batch_size=20)
    assert plan.steps == 1
    stream, noise, trials = Stream.insecure(5, 0), plan.levels[0].noise, 20_000
    sampler = PoissonSampler(data.owner, plan.rates, stream)
    assert data.together is not None
    first = int(torch.mode(data.together).values)
    theirs = (data.together == first).numpy()
    drawn = np.array([theirs[sampler.rows(step).numpy()].sum() for step in range(trials)])
    expected = trials * binom.pmf(np.arange(cap + 1), cap, plan.rates[0])
    seen = np.bincount(drawn, minlength=cap + 1)
    assert expected.min() > 5
    assert chisquare(seen, expected).pvalue > 1e-6
    random = np.random.default_rng(0)
    member, other = drawn + noise * random.normal(size=trials), noise * random.normal(size=trials)
    places = np.quantile(other, np.linspace(0.5, 0.995, 60))
    hits, alarms = ((column[:, None] > places).mean(0) for column in (member, other))
    shown = float(np.log((hits - plan.delta) / alarms).max())
    claimed = plan.composed().epsilon(plan.delta)
    of_one = accountant.epsilon(plan.events_of_each(), plan.delta)
    assert of_one < 0.7 * shown < shown < claimed, "accounted as a single record the attack would win"
