"""Rules that are no functions: they remember raw values, draw, or change what they are given."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from evenhand.methods.rules import BatchRule, Clip
from evenhand.types import State, Stats
from wrong_mechanisms.base import Wrong, wrong_rule
from wrong_mechanisms.batch_rules import Clipping


class PresentGroups(Clipping):
    """Declares the largest bound of the groups in the batch instead of all groups: a leak of who is absent."""

    name = "present_groups"
    present: ClassVar[list[int]] = [0]

    def factor(self, stats: Stats, state: State) -> Tensor:
        """Shrink by group, and note who is there."""
        self.present[:] = [int(stats.group.max())]
        return 1.0 / (1.0 + stats.group)

    def sensitivity(self, state: State) -> Tensor:
        """Of the last batch."""
        return state.bound / (1.0 + self.present[0])


class BatchSensitivity(Clipping):
    """Declares the largest norm that it happened to see, up to C."""

    name = "batch_sensitivity"
    seen: ClassVar[list[float]] = [1.0]

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1, after a look at the largest norm."""
        self.seen[:] = [float(stats.norm.max())]
        return torch.ones_like(stats.norm)

    def sensitivity(self, state: State) -> Tensor:
        """The last largest norm."""
        return state.bound.clamp(max=max(self.seen[0], 1e-6))


class RawMemory(Clipping):
    """Carries the raw mean norm over to the next step."""

    name = "raw_memory"
    seen: ClassVar[list[float]] = [0.0]

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1, after a look at the mean."""
        self.seen[:] = [float(stats.norm.mean())]
        return torch.ones_like(stats.norm)

    def advance(self, state: State) -> Mapping[str, Any]:
        """The raw mean."""
        return {"mean": self.seen[0]}


class Counting(Clipping):
    """Weighs later batches less, by a count of its own."""

    name = "counting"
    calls: ClassVar[list[int]] = [0]

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 / number of calls."""
        self.calls[0] += 1
        return torch.full_like(stats.norm, 1 / self.calls[0])


class Mutating(Clipping):
    """Sorts the norms of the batch in place."""

    name = "mutating"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1, after the norms were clipped where they stand."""
        stats.norm.clamp_(max=1.0)
        return torch.ones_like(stats.norm)


class TorchDrops(Clipping):
    """Drops records by torch's global generator, which everybody else draws from too."""

    name = "torch_drops"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 or 0."""
        return (torch.rand_like(stats.norm) < 0.5).double()


class NumpyDrops(Clipping):
    """Drops records by numpy's global generator."""

    name = "numpy_drops"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 or 0."""
        return torch.from_numpy((np.random.rand(stats.norm.numel()) < 0.5).astype(float))  # noqa: NPY002


class PythonDrops(Clipping):
    """Drops records by Python's global generator."""

    name = "python_drops"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 or 0."""
        return torch.tensor([float(random.random() < 0.5) for _ in range(stats.norm.numel())]).double()


class SecretDrops(Clipping):
    """Drops records by the operating system's entropy: no two calls agree."""

    name = "secret_drops"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 or 0."""
        return torch.tensor([float(secrets.randbits(1)) for _ in range(stats.norm.numel())]).double()


@dataclass
class Thawed(BatchRule):
    """Is not frozen, so that anybody can change it in the middle of a run."""

    name = "thawed"

    def weights(self, stats: Stats, state: State) -> Tensor:
        """Clip."""
        return Clip().weight(stats, state)

    def sensitivity(self, state: State) -> Tensor:
        """The bound."""
        return state.bound


MEMBERS: tuple[Wrong, ...] = (
    *(wrong_rule(rule, "memory") for rule in (PresentGroups(), BatchSensitivity(), RawMemory())),
    *(
        wrong_rule(rule, "purity")
        for rule in (
            Counting(),
            Mutating(),
            TorchDrops(),
            NumpyDrops(),
            PythonDrops(),
            SecretDrops(),
            Thawed(),
        )
    ),
)
"""Rules with hidden state, draws or side effects."""
