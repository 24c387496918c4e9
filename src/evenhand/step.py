"""The private step, top to bottom: per-record scalars -> noisy answers -> weights -> bounded sum -> noise -> gradient.

Everything that makes a step private happens here, once, for every method. The caller has put the step's charge on disk
before (law 4); what comes back is safe to hand to any optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenhand.planning import Plan, PlannedLevel
from evenhand.privacy import noise
from evenhand.privacy.ledger import Commit
from evenhand.queries import Query
from evenhand.rules import Rule
from evenhand.streams import Stream
from evenhand.types import Batch, Pass, State, Stats


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
    sensitivity = mechanism.rule.sensitivity(state)
    weights = torch.zeros(len(batch), dtype=torch.float64, device=stats.norm.device)
    weights[finite] = bounded(mechanism.rule.weights(stats, state), stats, sensitivity)
    total = result.weighted_sum(weights)
    noisy, covered, std = _released(mechanism, level, total, sensitivity, batch.position)
    return Released(
        gradient={name: value / plan.expected_batch for name, value in noisy.items()},
        memory=mechanism.rule.advance(state),
        commit=Commit(batch.position, 1, covered, std, asked),
        left_out=int((~finite).sum()),
    )


def bounded(weights: Tensor, stats: Stats, sensitivity: Tensor) -> Tensor:
    """Project onto ``0 <= w n <= S_k``: the guarantee of every sample rule, whatever its code returns."""
    cap = sensitivity[stats.owner].to(torch.float64) / stats.norm
    allowed = torch.minimum(weights.to(torch.float64), cap.nan_to_num(nan=math.inf, posinf=math.inf))
    return torch.nan_to_num(allowed, nan=0.0).clamp(min=0.0)


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
        values = query.value(stats, state).to(torch.float64).reshape(-1, width)
        values = torch.where(torch.isfinite(values).all(1, keepdim=True), values, 0.0)
        norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
        total = (values * (query.sensitivity / norms.clamp(min=query.sensitivity))).sum(0)
        spacing = noise.grid(query.sensitivity)
        covered = noise.charged(query.sensitivity, spacing, width)
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
    covered = tuple(noise.charged(float(value), spacing, dimension) for value in sensitivity)
    std = noise_std(level, covered, mechanism.plan.scales)
    flat = torch.cat([value.reshape(-1).to(torch.float64) for value in total.values()]).cpu().numpy()
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
