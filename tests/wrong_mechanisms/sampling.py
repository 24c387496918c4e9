"""Wrong samplers, and accounting of something that did not happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evenhand.mechanism.make_plan import Plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.methods.queries import GroupSizes
from evenhand.methods.rules import Clip
from evenhand.testing.reference_step import Vector
from evenhand.testing.subjects import Subject
from evenhand.types import Event
from wrong_mechanisms.base import Wrong


@dataclass(frozen=True)
class Other:
    """What wrong samplers share: they draw from a generator of their own."""

    owner: Tensor
    rates: Sequence[float]
    stream: Stream

    def source(self, step: int) -> np.random.Generator:
        """A generator for this step."""
        return np.random.default_rng([*self.stream.key[:4], step])

    @property
    def each(self) -> Vector:
        """The rate of each record."""
        return np.asarray(np.asarray(self.rates)[self.owner.numpy()])

    @property
    def size(self) -> int:
        """Expected size of a batch."""
        return max(1, round(float(self.each.sum())))


class FixedSize(Other):
    """Draws batches of one size and accounts them as Poisson samples."""

    def rows(self, step: int) -> Tensor:
        """Without replacement, by the rates."""
        chances = self.each / self.each.sum()
        return torch.from_numpy(self.source(step).choice(self.owner.numel(), self.size, replace=False, p=chances))


class Shuffled(Other):
    """Shuffles once an epoch and accounts that as Poisson sampling."""

    def rows(self, step: int) -> Tensor:
        """The next stretch of this epoch's order."""
        per_epoch = -(-self.owner.numel() // self.size)
        order = self.source(step // per_epoch).permutation(self.owner.numel())
        start = (step % per_epoch) * self.size
        return torch.from_numpy(order[start : start + self.size].copy())


class WithReplacement(Other):
    """May draw a record twice, which then counts twice."""

    def rows(self, step: int) -> Tensor:
        """A bootstrap."""
        return torch.from_numpy(self.source(step).integers(0, self.owner.numel(), self.size))


class OneDraw(Other):
    """Takes the same rows at every step."""

    def rows(self, step: int) -> Tensor:
        """Those of step 0 and 1 in turn."""
        return PoissonSampler(self.owner, self.rates, self.stream).rows(0)


class StickyDraw(Other):
    """Keeps a batch for two steps in a row: each draw is right, two of them are not."""

    def rows(self, step: int) -> Tensor:
        """A new draw every other step."""
        return PoissonSampler(self.owner, self.rates, self.stream).rows(step // 2)


class MeanRate(Other):
    """Gives every owner the mean rate, while each is accounted with its own."""

    def rows(self, step: int) -> Tensor:
        """Poisson, by the wrong rate."""
        rate = float(self.each.mean())
        return PoissonSampler(self.owner, [rate] * len(self.rates), self.stream).rows(step)


class Clusters(Other):
    """Draws neighbours together: every record has its rate, pairs have not."""

    def rows(self, step: int) -> Tensor:
        """One coin for two neighbours."""
        coins = np.repeat(self.source(step).random(-(-self.owner.numel() // 2)), 2)[: self.owner.numel()]
        return torch.from_numpy(np.flatnonzero(coins < self.each))


class ShortCoins(Other):
    """Tosses coins of 24 bits: a rate of one in a billion is met sixty times too often."""

    def rows(self, step: int) -> Tensor:
        """By float32 uniforms."""
        coins = self.source(step).random(self.owner.numel(), dtype=np.float32)
        return torch.from_numpy(np.flatnonzero(coins < self.each.astype(np.float32)))


def separately(plan: Plan, owner: int) -> list[Event]:
    """Accounts the gradient and its side queries as two samples."""
    rate, scale = plan.rates[owner], plan.scales[owner]
    gradient = [(rate, level.noise / scale, level.count) for level in plan.levels]
    return gradient + [(rate, noise, level.count) for level in plan.levels for noise in level.queries]


def gradient_only(plan: Plan, owner: int) -> list[Event]:
    """Forgets the side queries."""
    return replace(plan, levels=tuple(replace(level, queries=()) for level in plan.levels)).events(owner)


def once_an_epoch(plan: Plan, owner: int) -> list[Event]:
    """Composes once per epoch, while noise is added at every step."""
    epochs = plan.steps * plan.expected_batch / plan.facts.records
    return [(rate, noise, max(1, round(epochs / len(plan.levels)))) for rate, noise, _ in plan.events(owner)]


def last_noise(plan: Plan, owner: int) -> list[Event]:
    """Accounts a schedule by its largest noise."""
    events = plan.events(owner)
    return [(rate, max(noise for _, noise, _ in events), count) for rate, _, count in events]


def first_owner(plan: Plan, owner: int) -> list[Event]:
    """Accounts every owner like the first one."""
    return plan.events(0)


MEMBERS: tuple[Wrong, ...] = (
    *(
        Wrong(cls.__name__, (cls.__doc__ or "").strip(), Subject(Clip(), sampler=cls), "sampling")
        for cls in (FixedSize, Shuffled, WithReplacement, OneDraw, StickyDraw, MeanRate, Clusters, ShortCoins)
    ),
    *(
        Wrong(
            events.__name__,
            (events.__doc__ or "").strip(),
            Subject(Clip(), (GroupSizes(noise=1.0),), events=events),
            "accounting",
        )
        for events in (separately, gradient_only, once_an_epoch, last_noise, first_owner)
    ),
)
"""Wrong samplers and wrong accounting."""
