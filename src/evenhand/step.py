"""The private step, top to bottom: per-record scalars -> noisy answers -> weights -> bounded sum -> noise -> gradient.

Everything that makes a step private happens here, once, for every method. The caller has put the step's charge on disk
before (law 4); what comes back is safe to hand to any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from evenhand.errors import UnsupportedModelError
from evenhand.planning import Plan, PlannedLevel
from evenhand.privacy import noise
from evenhand.privacy.ledger import Commit
from evenhand.queries import Query
from evenhand.rules import BatchRule, Rule, SampleRule
from evenhand.streams import Stream
from evenhand.types import Batch, Pass, State, Stats

_LARGEST_WEIGHT = 1e30


@dataclass(frozen=True)
class Mechanism:
    """What stays the same over a segment: the plan, the parts it names, and the secret stream."""

    plan: Plan
    rule: Rule
    queries: tuple[Query, ...]
    stream: Stream


@dataclass(frozen=True)
class Released:
    """The outcome of a step: a private gradient, the rule's next memory, and what the ledger must say.

    ``left_out`` (rows that were not finite) is not private: it belongs in the run's private log only.
    """

    gradient: dict[str, Tensor]
    memory: Mapping[str, Any]
    commit: Commit
    left_out: int


def private_gradient(mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Released:
    """Turn one pass over the sampled rows into a private gradient.

    Guarantee:
      For a record of class k the released values are a Gaussian mechanism of sensitivity ``commit.sensitivity[k]`` and
      standard deviation ``commit.std`` (and likewise per query): the numbers that made the noise are the numbers
      returned for the ledger (law 2). Divides by the EXPECTED batch size (law 5).
    """
    plan = mechanism.plan
    level = plan.level_at(batch.position)
    finite = torch.isfinite(result.norm) & torch.isfinite(result.loss)
    stats = _stats(result, batch, finite)
    bound = torch.tensor([level.bound * scale for scale in plan.scales], dtype=torch.float64, device=stats.norm.device)
    state = State(step=batch.position, bound=bound, memory=memory)
    answers, asked = _answers(mechanism, level, stats, state)
    state = replace(state, answers=answers)
    sensitivity = _declared(mechanism, state)
    weights = torch.zeros(len(batch), dtype=torch.float64, device=stats.norm.device)
    weights[finite] = bounded(_weights(mechanism.rule, stats, state), stats, sensitivity)
    total = result.weighted_sum(weights)
    noisy, covered, std = _released(mechanism, level, total, sensitivity, batch.position)
    return Released(
        gradient={name: value / plan.expected_batch for name, value in noisy.items()},
        memory=mechanism.rule.advance(state),
        commit=Commit(batch.position, 1, covered, std, asked),
        left_out=int((~finite).sum()),
    )


def rehearse(mechanism: Mechanism) -> None:
    """Run rule and queries on made-up rows, so that code which cannot run fails before anything is charged."""
    ones = torch.ones(2, dtype=torch.float64)
    index = torch.zeros(2, dtype=torch.long)
    batch = Batch(None, None, group=index, owner=index, record=torch.arange(2), position=0, token=0)
    result = Pass(loss=ones, norm=ones, weighted_sum=lambda weights: {"rehearsal": weights})
    quiet = replace(mechanism, stream=Stream.fresh())
    private_gradient(quiet, result, batch, mechanism.rule.initial(mechanism.plan.facts))


def bounded(weights: Tensor, stats: Stats, sensitivity: Tensor) -> Tensor:
    """Project onto ``0 <= w n <= S_k``: the guarantee of every sample rule, whatever its code returns.

    A weight that is not finite becomes 0, and none exceeds what float32 can carry.
    """
    cap = sensitivity[stats.owner].to(torch.float64) / stats.norm
    allowed = torch.minimum(weights.to(torch.float64), cap)
    usable = torch.isfinite(weights) & (stats.norm > 0)
    return torch.where(usable, allowed, 0.0).clamp(min=0.0, max=_LARGEST_WEIGHT)


def _weights(rule: Rule, stats: Stats, state: State) -> Tensor:
    """A sample rule sees one row at a time (vmap), so that it cannot couple records even by mistake."""
    if isinstance(rule, SampleRule):
        weights = by_row(rule.weight, stats, state)
    elif isinstance(rule, BatchRule):
        weights = rule.weights(stats, state)
    else:
        raise UnsupportedModelError(
            f"{type(rule).__name__} is neither a SampleRule nor a BatchRule: derive it from one."
        )
    if weights.shape != stats.norm.shape:
        raise UnsupportedModelError(f"The rule {rule.name!r} must give one weight per record.")
    return weights


def by_row(function: Callable[[Stats, State], Tensor], stats: Stats, state: State) -> Tensor:
    """``function`` applied to each row on its own."""
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    return vmap(lambda *row: function(Stats(*row), state))(*columns)


def _declared(mechanism: Mechanism, state: State) -> Tensor:
    """The rule's sensitivity per class; anything that is not a bound is refused before it can serve as one."""
    sensitivity = mechanism.rule.sensitivity(state)
    bounded_rule = mechanism.plan.guarantee != "not private"
    if (
        sensitivity.shape != state.bound.shape
        or (bounded_rule and not bool(torch.isfinite(sensitivity).all()))
        or bool((sensitivity <= 0).any())
    ):
        raise UnsupportedModelError(
            f"The rule {mechanism.rule.name!r} declares no finite positive sensitivity per owner class: "
            "nothing was released."
        )
    return sensitivity


def _stats(result: Pass, batch: Batch, finite: Tensor) -> Stats:
    """The columns a rule may see. A row that is not finite is absent: it contributes to nothing."""
    device = finite.device
    return Stats(
        norm=result.norm[finite].to(torch.float64),
        loss=result.loss[finite].to(torch.float64),
        group=batch.group.to(device)[finite],
        owner=batch.owner.to(device)[finite],
        record=batch.record.to(device)[finite],
    )


def _answers(
    mechanism: Mechanism, level: PlannedLevel, stats: Stats, state: State
) -> tuple[dict[str, Tensor], tuple[tuple[float, float], ...]]:
    """Noisy side queries on this step's own sample, each value held to its declared norm."""
    answers: dict[str, Tensor] = {}
    asked: list[tuple[float, float]] = []
    offset = 0
    for query, multiplier in zip(mechanism.queries, level.queries, strict=True):
        width = query.width(mechanism.plan.facts)
        values = by_row(query.value, stats, state).to(torch.float64)
        if values.shape != (stats.norm.shape[0], width):
            raise UnsupportedModelError(f"The query {query.name!r} must give one vector of length {width} per record.")
        values = torch.where(torch.isfinite(values).all(1, keepdim=True), values, 0.0)
        norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
        total = (values * (query.sensitivity / norms.clamp(min=query.sensitivity))).sum(0)
        spacing = noise.grid(query.sensitivity)
        covered = noise.charged(query.sensitivity, spacing, width, mechanism.plan.expected_batch)
        std = multiplier * covered
        noisy = noise.release(total.cpu().numpy(), std, spacing, mechanism.stream, "queries", state.step, offset)
        answers[query.name] = torch.from_numpy(noisy).to(stats.norm.device)
        asked.append((covered, std))
        offset += width
    return answers, tuple(asked)


def _released(
    mechanism: Mechanism, level: PlannedLevel, total: Mapping[str, Tensor], sensitivity: Tensor, step: int
) -> tuple[dict[str, Tensor], tuple[float, ...], float]:
    """Sum plus noise by parameter, the sensitivity it covers per class, and the noise's standard deviation."""
    if mechanism.plan.guarantee == "not private":
        return dict(total), (), 0.0
    dimension = sum(value.numel() for value in total.values())
    spacing = noise.grid(float(sensitivity.max()))
    batch = mechanism.plan.expected_batch
    covered = tuple(noise.charged(float(value), spacing, dimension, batch) for value in sensitivity)
    std = noise_std(level, covered, mechanism.plan.scales)
    flat = torch.cat([value.reshape(-1).to(torch.float64) for value in total.values()]).cpu().numpy()
    if not np.isfinite(flat).all():
        raise UnsupportedModelError("The bounded sum of gradients is not finite: nothing was released.")
    noisy = torch.from_numpy(noise.release(flat, std, spacing, mechanism.stream, "gradient", step))
    parts = torch.split(noisy, [value.numel() for value in total.values()])
    shaped = {
        name: part.reshape(value.shape).to(device=value.device)
        for (name, value), part in zip(total.items(), parts, strict=True)
    }
    return shaped, covered, std


def noise_std(level: PlannedLevel, covered: Sequence[float], scales: Sequence[float]) -> float:
    """The one number s_t: large enough that every class k sees at least its planned multiplier noise / scale_k."""
    return level.noise * max(value / scale for value, scale in zip(covered, scales, strict=True))
