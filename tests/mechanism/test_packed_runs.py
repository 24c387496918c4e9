"""Trials that share a run are what they would be alone: bit by bit, by the real sampler, step and noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import evenhand as eh
from evenhand.mechanism.audit.packed_runs import NAME, Mechanics, World, play
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, Released, private_gradient, weigh
from evenhand.types import Batch, Facts, Pass

FACTS = Facts(300, (("a", 200), ("b", 100)), groups=("x", "y"))


@dataclass
class Watched:
    """The real step, which notes what it was given and what it released."""

    calls: list[tuple[Mechanism, Pass, Batch, Mapping[str, Any], Released]] = field(default_factory=list)

    def __call__(self, mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Released:
        released = private_gradient(mechanism, result, batch, memory)
        self.calls.append((mechanism, result, batch, memory, released))
        return released


def played(method: str, *, steps: int = 6, trials: int = 40, batch: float = 60) -> tuple[eh.Plan, World, Watched]:
    plan = eh.plan(method, eh.FixedNoise(1.0, 1e-5), data=FACTS, epochs=steps * batch / FACTS.records, batch_size=batch)
    world, step = World.of(plan, (0, 1), trials), Watched()
    play(plan, replace(Mechanics.of(plan), step=step, stream=lambda number: Stream.insecure(7, number)), world)
    return plan, world, step


def alone(result: Pass, batch: Batch, row: int, coordinate: int, dimension: int) -> Pass:
    """The pass in which this row alone has a gradient."""
    norm = torch.zeros_like(result.norm).index_copy(0, torch.tensor([row]), result.norm[row : row + 1])

    def weighted_sum(weights: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(dimension)
        total[coordinate] = weights[row] * norm[row]
        return {NAME: total}

    return Pass(result.loss, norm, weighted_sum)


@pytest.mark.parametrize("method", ["dpsgd", "auto_s", "psac", "global", "global_adapt_v2", "sad"])
def test_a_trial_is_bit_by_bit_what_it_is_when_its_record_alone_has_a_gradient(method: str) -> None:
    _, world, step = played(method)
    compared = 0
    for mechanism, result, batch, memory, released in step.calls:
        for row in range(0, len(batch), 7):
            coordinate = int(world.place[batch.record[row]])
            if coordinate >= 0:
                single = private_gradient(
                    mechanism, alone(result, batch, row, coordinate, world.dimension), batch, memory
                )
                assert single.gradient[NAME][coordinate] == released.gradient[NAME][coordinate]
                assert single.commit == released.commit
                compared += 1
    assert compared > 10


def test_every_coordinate_is_the_bounded_gradient_and_the_noise_of_its_address() -> None:
    plan, world, step = played("dpsgd")
    for mechanism, _, batch, _, released in step.calls:
        normals = mechanism.stream.normals("gradient", batch.position, world.dimension)
        exact = np.zeros(world.dimension)
        drawn = world.place[batch.record]
        exact[drawn[drawn >= 0]] = 1.0
        noisy = released.gradient[NAME].double().numpy() * plan.expected_batch
        assert noisy == pytest.approx(exact + released.commit.std * normals, abs=1e-5)


def test_records_are_drawn_by_the_plans_own_rates() -> None:
    facts = Facts(300, (("strict", 200), ("open", 100)))
    plan = eh.plan("idp_sample", eh.Budgets({"strict": 1, "open": 8}, 1e-5), data=facts, epochs=20, batch_size=30)
    world, step = World.of(plan, (0, 1), 50), Watched()
    play(plan, replace(Mechanics.of(plan), step=step), world)
    for owner, rate in enumerate(plan.rates):
        drawn = sum(int((batch.owner == owner).sum()) for _, _, batch, _, _ in step.calls)
        tosses = plan.steps * FACTS.owners[owner][1]
        assert stats.binomtest(drawn, tosses, rate).pvalue > 1e-6


def test_scores_are_the_log_likelihood_ratio_over_all_steps() -> None:
    plan, world, step = played("dpsgd", trials=20)
    scores = play(plan, replace(Mechanics.of(plan), stream=lambda number: Stream.insecure(7, number)), world)
    rate, total = plan.rates[0], np.zeros(world.dimension)
    for _, _, _, _, released in step.calls:
        seen, std = released.gradient[NAME].double().numpy() * plan.expected_batch, released.commit.std
        present = rate * stats.norm.pdf(seen, 1.0, std) + (1 - rate) * stats.norm.pdf(seen, 0.0, std)
        total += np.log(present / stats.norm.pdf(seen, 0.0, std))
    assert scores.members[0] == pytest.approx(total[world.members[0]], abs=1e-9)
    assert scores.others[0] == pytest.approx(total[world.others], abs=1e-9)


def test_a_world_has_every_record_of_the_plan_and_a_coordinate_per_trial() -> None:
    plan = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=FACTS, epochs=1, batch_size=60)
    world = World.of(plan, (0, 1), 150)
    assert torch.bincount(world.owner).tolist() == [200, 150]
    coordinates = np.concatenate([world.members.ravel(), world.others])
    assert sorted(coordinates.tolist()) == list(range(450))
    assert sorted(world.place[world.place >= 0].tolist()) == sorted(world.members.ravel().tolist())


@pytest.mark.parametrize("method", ["dpsgd", "nsgd", "psac", "global", "global_adapt", "soft_ada_clip", "dpsgd_f"])
def test_the_worst_row_goes_nearly_as_far_as_the_rule_declares(method: str) -> None:
    """dpsgd_f decides by the answers of the step itself which group goes furthest: nobody can know it before."""
    _, _, step = played(method, steps=3)
    for mechanism, result, batch, memory, _ in step.calls:
        weighed = weigh(mechanism, result, batch, memory)
        reach = weighed.weights * result.norm / weighed.sensitivity[batch.owner]
        assert float(reach.max()) >= (0.6 if method == "dpsgd_f" else 0.95)
