"""Neighbouring data sets that differ in one person: no sum and no answer of a method moves by more than declared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.release_counts import CountTable, _one_of_each, release_counts
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, clamp_weights, weigh
from evenhand.mechanism.weights import total_of, weights_of
from evenhand.methods import registry
from evenhand.methods.catalogue import DENSITIES, catalogue
from evenhand.types import Batch, Pass, State, Stats

PRIVATE = sorted(recipe.name for recipe in catalogue() if recipe.name not in {"sgd", *DENSITIES})


def world(seed: int, most: int = 50, used: int = 1) -> Data:
    """Twelve persons with 1 to ``most`` records each, hostile in size, in two groups and two owner classes."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, most + 1, 12)
    names = np.repeat(np.arange(12), sizes)
    inputs = torch.from_numpy(random.normal(size=(len(names), 3)) * 10.0 ** random.integers(-3, 4, len(names))[:, None])
    owners = np.where(np.arange(12) % 2 == 0, "strict", "open")[names]
    labels, groups = random.integers(0, 2, len(names)), np.append(random.integers(0, 2, len(names) - 2), [0, 1])
    named = {"groups": groups.tolist(), "owners": owners, "persons": names, "labels": [0, 1], "group_names": [0, 1]}
    return wrap(inputs, labels, **named, records_per_person=used)


def gradients(batch: Batch) -> tuple[Tensor, Tensor]:
    """Gradients and losses of a logistic regression with given weights, person by person: means over their records."""
    inputs = batch.inputs.double()
    targets, shares = batch.targets if isinstance(batch.targets, tuple) else (batch.targets, None)
    sign = 2.0 * targets.double() - 1.0
    margin = sign * (inputs @ torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64))
    vectors, losses = -(sign * torch.sigmoid(-margin))[..., None] * inputs, torch.nn.functional.softplus(-margin)
    if shares is None:
        return vectors, losses
    return (vectors * shares[..., None]).sum(1), (losses * shares).sum(1)


def largest_move(name: str, seed: int) -> float:
    """Return the move of the sum when the last person goes, in declared sensitivities; answers are checked here.

    In every other world a step uses several records of a person.
    """
    data = world(seed, used=1 if seed % 2 == 0 else 1 + seed % 7)
    privacy = (
        eh.Budgets({"strict": 1.0, "open": 4.0}, delta=1e-3) if name.startswith(("idp", "ino")) else eh.Privacy(3, 1e-3)
    )
    plan = eh.plan(name, privacy, data=data.facts, epochs=8, batch_size=6)
    rule = registry.build("rule", **plan.rule)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    stream = Stream.insecure(seed, 0)
    mechanism = Mechanism(plan, rule, queries, stream)
    both, step = [], seed % plan.steps
    for part in (data, data.take(torch.arange(11))):
        batch = draw(part, PoissonSampler(part.owner, [1.0, 1.0], stream), step, 0)
        vectors, losses = gradients(batch)
        both.append((batch, vectors, Stats(vectors.norm(dim=1), losses, batch.group, batch.owner, batch.record)))
    (batch, vectors, stats), (_, fewer, rest) = both
    assert len(vectors) == len(fewer) + 1
    weighed = weigh(mechanism, Pass(stats.loss, stats.norm, lambda _: {}), batch, rule.initial(plan.facts))
    for query, noise in zip(queries, mechanism.query_noise, strict=True):
        asked = State(step, weighed.bound.clone(), memory=rule.initial(plan.facts), public=mechanism.public)
        answers = [total_of(query, noise.width, noise.sensitivity, part, asked) for part in (stats, rest)]
        assert float(np.linalg.norm(answers[0] - answers[1])) <= noise.sensitivity * (1 + 1e-12)
    sums = [
        clamp_weights(weights_of(rule, part, weighed.state), part, weighed.sensitivity) @ rows
        for part, rows in ((stats, vectors), (rest, fewer))
    ]
    gone = int(batch.owner[batch.record == 11])
    return float((sums[0] - sums[1]).norm() / weighed.sensitivity[gone])


@pytest.mark.parametrize("name", PRIVATE)
def test_a_person_moves_a_step_by_no_more_than_is_declared(name: str) -> None:
    assert max(largest_move(name, seed) for seed in range(4)) <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_a_person_moves_many_steps_by_no_more_than_is_declared(name: str) -> None:
    assert max(largest_move(name, seed) for seed in range(100)) <= 1 + 1e-9


@pytest.mark.parametrize("kind", ["labels", "labels by group"])
def test_a_person_adds_one_record_to_released_counts(kind: str) -> None:
    for seed in range(20):
        data, stream = world(seed), Stream.insecure(seed, 0)
        fewer = data.take(torch.arange(11))
        plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=data.facts, epochs=4, batch_size=6, prior=kind)  # type: ignore[arg-type]
        table = CountTable.of(plan.prior.kind, plan.facts)  # type: ignore[union-attr]
        with_, without = (table.count(part.by_record, _one_of_each(plan, stream, part)) for part in (data, fewer))
        assert with_.sum() == 12
        assert np.linalg.norm(with_ - without) <= table.sensitivity
        row = release_counts(plan, stream, data)
        assert row.sensitivity >= table.sensitivity
