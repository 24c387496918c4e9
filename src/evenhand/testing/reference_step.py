"""A slow and plain implementation of the private step: row by row, sharing nothing with the fast one but its noise.

The kit holds every step to it. Each piece is a method, so that the zoo can get exactly one of them wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.mechanism import noise_grid as noise
from evenhand.mechanism.make_plan import Plan, PlannedLevel
from evenhand.mechanism.random_streams import Domain, Stream
from evenhand.mechanism.step import Mechanism, Released
from evenhand.methods.queries import Query
from evenhand.methods.rules import BatchRule, Clip, Rule
from evenhand.summation import Summation
from evenhand.testing.rule_checks import by_row, taken, weights
from evenhand.testing.subjects import Case, Subject, public
from evenhand.types import Batch, Commit, Facts, Pass, State, Stats

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceStep:
    """Step that is called like ``private_gradient`` and equals it up to rounding.

    Examples:
      >>> from evenhand.testing import Subject, check
      >>> from evenhand.methods.rules import Clip
      >>> check(Subject(Clip(), step=ReferenceStep()), only=["step"]).ok
      True
    """

    def __call__(self, mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Released:
        """Run one step and return its release."""
        plan, level = mechanism.plan, mechanism.plan.level_at(batch.position)
        used = self.used(result)
        stats = Stats(result.norm.double(), result.loss.double(), batch.group, batch.owner, batch.record)
        bound = torch.tensor([level.bound * scale for scale in plan.scales], dtype=torch.float64)
        state = State(batch.position, bound, {}, memory, public(plan))
        answers: dict[str, Tensor] = {}
        asked: list[tuple[float, float]] = []
        offset = 0
        for query, multiplier in zip(mechanism.queries, level.queries, strict=True):
            total = self.asked(query, taken(stats, used), state)
            spacing = noise.grid(query.sensitivity)
            charged = float(noise.charged(query.sensitivity, spacing, total.size, plan.expected_batch))
            drawn = self.answer_noise(mechanism.stream, state.step, total.size, offset, multiplier * charged)
            answers[query.name] = torch.from_numpy(on_grid(total, spacing) + on_grid(drawn, spacing))
            asked.append((charged, multiplier * charged))
            offset += total.size
        state = replace(state, answers=answers)
        sensitivity = mechanism.rule.sensitivity(state)
        total, shapes = self.total(result, self.weights(mechanism.rule, stats, used, state, sensitivity), sensitivity)
        spacing = noise.grid(float(sensitivity.max()))
        covered = self.covered(sensitivity, spacing, total.size, mechanism)
        std = self.std(level, covered, plan)
        commit = Commit(state.step, 1, covered, std, tuple(asked))
        rounded = self.rounded(total, spacing)
        noisy = rounded + self.noise(mechanism.stream, commit, total.size, len(used), spacing)
        flat = torch.from_numpy(noisy / self.divisor(plan, len(used)))
        pieces = torch.split(flat, [shape.numel() for shape in shapes.values()])
        return Released(
            gradient={name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)},
            memory=mechanism.rule.advance(state),
            commit=commit,
            left_out=len(batch) - len(used),
        )

    def used(self, result: Pass) -> Tensor:
        """Return the numbers of the rows that are finite."""
        return torch.nonzero(torch.isfinite(result.norm) & torch.isfinite(result.loss)).flatten()

    def asked(self, query: Query, stats: Stats, state: State) -> Vector:
        """Return a query's sum of values, each scaled down to the declared norm."""
        values = by_row(query.value, stats, state).double().numpy()
        total = np.zeros(values.shape[1])
        for value in values:
            total += value * min(1.0, query.sensitivity / max(float(np.linalg.norm(value)), 1e-300))
        return total

    def weights(self, rule: Rule, stats: Stats, used: Tensor, state: State, sensitivity: Tensor) -> Tensor:
        """Return the rule's weights, limited to ``0 <= w n <= S`` of the owner class; 0 for rows that are not used."""
        row_weights = torch.zeros(stats.norm.shape[0], dtype=torch.float64)
        for i, weight in zip(used.tolist(), weights(rule, taken(stats, used), state).tolist(), strict=True):
            norm, most = float(stats.norm[i]), float(sensitivity[stats.owner[i]])
            if norm > 0 and np.isfinite(weight):
                row_weights[i] = min(max(weight, 0.0), most / norm, 1e30)
        return row_weights

    def total(self, result: Pass, row_weights: Tensor, sensitivity: Tensor) -> tuple[Vector, dict[str, torch.Size]]:
        """Return the weighted sum as one vector, and the shapes to split it again."""
        parts = result.weighted_sum(row_weights)
        flat = torch.cat([part.reshape(-1).double() for part in parts.values()]).numpy()
        return flat, {name: part.shape for name, part in parts.items()}

    def covered(self, sensitivity: Tensor, spacing: float, size: int, mechanism: Mechanism) -> tuple[float, ...]:
        """Return the sensitivity per class that the ledger records: the rule's, plus what rounding can add."""
        plan, whole = mechanism.plan, isinstance(mechanism.rule, BatchRule)
        summation = Summation(plan.expected_batch, 1.0 if whole else max(plan.scales) / min(plan.scales))
        charged = noise.charged_sum(sensitivity.numpy(), plan.scales, spacing, size, summation, whole)
        return tuple(charged.tolist())

    def std(self, level: PlannedLevel, covered: tuple[float, ...], plan: Plan) -> float:
        """Return the standard deviation that is enough for the class that needs most noise."""
        return level.noise * max(value / scale for value, scale in zip(covered, plan.scales, strict=True))

    def rounded(self, total: Vector, spacing: float) -> Vector:
        """Return the sum on the grid, so that low-order bits reveal nothing about the data."""
        return on_grid(total, spacing)

    def noise(self, stream: Stream, commit: Commit, size: int, used: int, spacing: float) -> Vector:
        """Return the gradient's noise."""
        return on_grid(commit.std * self.normals(stream, "gradient", commit.first, size), spacing)

    def answer_noise(self, stream: Stream, step: int, size: int, offset: int, std: float) -> Vector:
        """Return a query's noise."""
        return std * self.normals(stream, "queries", step, size, offset)

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Return standard normals that nobody can predict and that are used once."""
        return stream.normals(domain, step, size, offset)

    def divisor(self, plan: Plan, used: int) -> float:
        """Return the divisor of the noisy sum: never a count of records."""
        return plan.expected_batch


def on_grid(values: Vector, spacing: float) -> Vector:
    """Return the nearest multiples of ``spacing``."""
    return np.asarray(np.rint(values / spacing) * spacing)


WEIGHT = 3
"""Coordinates of a made-up gradient that belong to the parameter "weight"; the rest are "bias"."""


@dataclass(frozen=True)
class Recorder(Clip):
    """Clipping that remembers the noisy answers it was given, so that the kit can read them."""

    name = "recorder"

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the answers as memory."""
        return {"answers": dict(state.answers)}


@dataclass(frozen=True)
class Wide(Query):
    """An answer wide enough to look at its noise; every value is zero."""

    name = "wide"
    size: int = 4000

    def width(self, facts: Facts) -> int:
        """Return ``size``."""
        return self.size

    def value(self, rows: Stats, state: State) -> Tensor:
        """Return zeros."""
        return rows.norm.new_zeros(self.size)


def directions(count: int, size: int) -> Tensor:
    """Return unit vectors, a different one for every row."""
    angles = torch.arange(1, count * size + 1, dtype=torch.float64).reshape(count, size)
    return torch.nn.functional.normalize(torch.sin(angles**1.7), dim=1)


def pass_over(gradients: Tensor, norm: Tensor, loss: Tensor, weight: int = WEIGHT) -> Pass:
    """Return the Pass that an engine would return for these gradients.

    A row of weight 0 is not touched, so NaN shows if it is used.
    """

    def weighted_sum(row_weights: Tensor) -> dict[str, Tensor]:
        used = row_weights != 0
        total = (gradients[used] * row_weights[used].double().unsqueeze(1)).sum(0)
        return {"weight": total[:weight], "bias": total[weight:]}

    return Pass(loss=loss, norm=norm, weighted_sum=weighted_sum)


def batch_of(case: Case, position: int) -> Batch:
    """Return the case's rows as a drawn batch."""
    stats = case.stats()
    return Batch(None, None, stats.group, stats.owner, stats.record, position, 0)


def as_pass(case: Case, size: int = 5, gradients: Tensor | None = None) -> Pass:
    """Return the case's rows as gradients of their norms; a spoilt row has NaN in its gradient, or an infinite loss."""
    stats = case.stats()
    norm, loss = stats.norm.clone(), stats.loss.clone()
    vectors = directions(len(case.rows), size) * norm.unsqueeze(1) if gradients is None else gradients
    for i, row in enumerate(case.rows):
        if row.spoilt and i % 2:
            loss[i] = math.inf
        elif row.spoilt:
            norm[i], vectors[i] = math.nan, math.nan
    return pass_over(vectors, norm, loss)


def answers_of(subject: Subject, mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Any:
    """Return the noisy answers of this step: it is run again with the recorder in place of the rule."""
    if not subject.queries:
        return {}
    return subject.step(replace(mechanism, rule=Recorder()), result, batch, memory).memory["answers"]
