"""Wrong steps: the sum, its divisor or the ledger entry is not what the reference makes of the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from evenhand.gradients.norms_and_sums import RescuedPass
from evenhand.gradients.record_blocks import Blocks
from evenhand.mechanism.make_plan import Plan, PlannedLevel
from evenhand.mechanism.step import Mechanism, Released
from evenhand.methods.queries import Exceedance
from evenhand.methods.rules import Clip, GlobalAdapt, Rule
from evenhand.testing.reference_step import ReferenceStep, Vector
from evenhand.testing.subjects import Subject
from evenhand.types import Batch, Pass, State, Stats
from wrong_mechanisms.base import Wrong, wrong_step
from wrong_mechanisms.noise import AnswersWithout

Shapes = dict[str, torch.Size]


class WithoutClipping(ReferenceStep):
    """Sums gradients as they are."""

    def weights(self, rule: Rule, stats: Stats, used: Tensor, state: State, sensitivity: Tensor) -> Tensor:
        """1 for every usable row."""
        return torch.zeros_like(stats.norm).index_fill(0, used, 1.0)


class ClippedSum(WithoutClipping):
    """Clips the sum of the batch instead of each gradient."""

    def total(self, result: Pass, found: Tensor, sensitivity: Tensor) -> tuple[Vector, Shapes]:
        """The sum, held to S."""
        flat, shapes = super().total(result, found, sensitivity)
        return flat * min(1.0, float(sensitivity.max()) / max(float(np.linalg.norm(flat)), 1e-300)), shapes


@dataclass(frozen=True)
class Microbatches(ReferenceStep):
    """Clips the sum of two rows at a time, as gradient accumulation does."""

    size: int = 2

    def total(self, result: Pass, found: Tensor, sensitivity: Tensor) -> tuple[Vector, Shapes]:
        """Each micro-batch held to S."""
        flat, shapes = super().total(result, found, sensitivity)
        flat = np.zeros_like(flat)
        for start in range(0, found.numel(), self.size):
            alone = torch.zeros_like(found)
            alone[start : start + self.size] = (found[start : start + self.size] > 0).double()
            part = super().total(result, alone, sensitivity)[0]
            flat += part * min(1.0, float(sensitivity.max()) / max(float(np.linalg.norm(part)), 1e-300))
        return flat, shapes


class PerLayer(ReferenceStep):
    """Clips each parameter to C by itself, so that the whole gradient may be longer."""

    def total(self, result: Pass, found: Tensor, sensitivity: Tensor) -> tuple[Vector, Shapes]:
        """Each row's parameters held to S one by one."""
        shapes = super().total(result, found, sensitivity)[1]
        parts = {name: np.zeros(shape.numel()) for name, shape in shapes.items()}
        for i in torch.nonzero(found).flatten().tolist():
            alone = torch.zeros_like(found).index_fill(0, torch.tensor([i]), 1.0)
            for name, value in result.weighted_sum(alone).items():
                norm = float(value.norm())
                parts[name] += value.numpy().reshape(-1) * min(1.0, float(sensitivity.min()) / max(norm, 1e-300))
        return np.concatenate(list(parts.values())), shapes


class RealisedDivisor(ReferenceStep):
    """Divides by the number of rows that were drawn."""

    def divisor(self, plan: Plan, used: int) -> float:
        """How many were there."""
        return float(max(used, 1))


class SpoiltRows(ReferenceStep):
    """Keeps rows that are not finite: one of them makes every parameter NaN and tells that it was there."""

    def used(self, result: Pass) -> Tensor:
        """All rows."""
        return torch.arange(result.norm.numel())

    def weights(self, rule: Rule, stats: Stats, used: Tensor, state: State, sensitivity: Tensor) -> Tensor:
        """Of clipping, NaN and all."""
        return (sensitivity[stats.owner] / stats.norm).clamp(max=1.0)


class SpoiltBatch(ReferenceStep):
    """Skips the whole batch when one row is not finite."""

    def used(self, result: Pass) -> Tensor:
        """All rows or none."""
        kept = super().used(result)
        return kept if kept.numel() == result.norm.numel() else kept[:0]


class Residue(ReferenceStep):
    """Adds what an earlier batch left behind, as an aborted micro-batch does."""

    left: ClassVar[list[float]] = [0.0]

    def total(self, result: Pass, found: Tensor, sensitivity: Tensor) -> tuple[Vector, Shapes]:
        """The sum, and the first coordinate of the one before."""
        flat, shapes = super().total(result, found, sensitivity)
        before, self.left[0] = self.left[0], float(flat[0])
        return flat + before, shapes


class RawMemory(ReferenceStep):
    """Lets the rule remember the answers without their noise."""

    def __call__(self, mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Released:
        """A right release with a wrong memory."""
        raw = AnswersWithout()(mechanism, result, batch, memory)
        return replace(super().__call__(mechanism, result, batch, memory), memory=raw.memory)


class UnchargedEmpty(ReferenceStep):
    """Does not charge a step whose batch has no rows."""

    def __call__(self, mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Released:
        """A right release with a wrong entry."""
        released = super().__call__(mechanism, result, batch, memory)
        return released if len(batch) else replace(released, commit=replace(released.commit, count=0))


class HalfRecorded(ReferenceStep):
    """Records half the sensitivity that the rule declares, and makes noise for that."""

    def covered(self, sensitivity: Tensor, spacing: float, size: int, mechanism: Mechanism) -> tuple[float, ...]:
        """Half of it."""
        return tuple(0.5 * value for value in super().covered(sensitivity, spacing, size, mechanism))


class WithoutRounding(ReferenceStep):
    """Records the declared sensitivity a little rounded down: less than what the noise must cover."""

    def covered(self, sensitivity: Tensor, spacing: float, size: int, mechanism: Mechanism) -> tuple[float, ...]:
        """To one part in a thousand."""
        return tuple(float(value) * 0.999 for value in sensitivity)


class _OneRun(Blocks):
    """All records of a batch in one block, however many they are."""

    def of(self, most: int) -> list[slice]:
        """Return one slice."""
        return [slice(0, self.size)]


class FloatRun(ReferenceStep):
    """Adds all records up in one float32 run, whose roundings one record can turn round."""

    def total(self, result: Pass, found: Tensor, sensitivity: Tensor) -> tuple[Vector, Shapes]:
        """Return the sum of an engine's pass without its blocks."""
        finished = getattr(result.weighted_sum, "__self__", None)
        if isinstance(finished, RescuedPass):
            finished._blocks = _OneRun(len(found))
        return super().total(result, found, sensitivity)


class MeanClass(ReferenceStep):
    """Makes noise for the average owner: the class with the largest bound gets too little."""

    def std(self, level: PlannedLevel, covered: tuple[float, ...], plan: Plan) -> float:
        """By the smallest ratio instead of the largest."""
        return level.noise * sum(covered) / len(covered) / max(plan.scales)


class FirstLevel(ReferenceStep):
    """Calibrates a schedule and trains with its first level throughout."""

    def std(self, level: PlannedLevel, covered: tuple[float, ...], plan: Plan) -> float:
        """The noise of step 0."""
        return super().std(plan.levels[0], covered, plan)


MEMBERS: tuple[Wrong, ...] = (
    *(
        wrong_step(step, "step")
        for step in (
            WithoutClipping(),
            ClippedSum(),
            Microbatches(),
            PerLayer(),
            RealisedDivisor(),
            SpoiltRows(),
            SpoiltBatch(),
            Residue(),
        )
    ),
    wrong_step(RawMemory(), "step", Subject(GlobalAdapt(), (Exceedance(noise=2.0),))),
    *(
        wrong_step(step, "ledger")
        for step in (UnchargedEmpty(), HalfRecorded(), WithoutRounding(), MeanClass(), FirstLevel())
    ),
    wrong_step(FloatRun(), "large"),
    wrong_step(WithoutClipping(), "audit", Subject(Clip()), name="WithoutClipping, audited"),
)
"""Wrong steps."""
