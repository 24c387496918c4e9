"""What stays the same over a segment of steps: the numbers and parts that every step of it uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evenhand.errors import UnsupportedModelError
from evenhand.methods.queries import Count, Query
from evenhand.methods.rules import Rule, SampleRule
from evenhand.planning import Plan, PlannedLevel
from evenhand.privacy import noise
from evenhand.releasing import Ahead
from evenhand.streams import Stream
from evenhand.summation import Summation, ratio_of
from evenhand.types import Public


@dataclass(frozen=True)
class Mechanism:
    """What stays the same over a segment: the plan, the parts it names, and the secret stream."""

    plan: Plan
    rule: Rule
    queries: tuple[Query, ...]
    stream: Stream
    lean: bool = False

    @cached_property
    def normals(self) -> Ahead:
        """The stream's normals, made one step ahead where that pays."""
        return Ahead(self.stream)

    @cached_property
    def usual_noise(self) -> dict[tuple[float, float, int], tuple[float, tuple[float, ...], float]]:
        """Grid, covered sensitivities and standard deviation where a rule's sensitivity is its bound.

        They depend on the level's noise and bound, and on how many numbers are released.
        """
        return {}

    @cached_property
    def asking(self) -> tuple[tuple[int, float, float, float], ...]:
        """Of every query the length of its answer, its sensitivity, its grid, and what its noise covers."""
        found = []
        for query in self.queries:
            width, sensitivity = int(query.width(self.plan.facts)), float(query.sensitivity)
            if isinstance(query, Count) and width != query.places(len(self.plan.facts.groups)):
                raise UnsupportedModelError(f"The query {query.name!r} must have one count per place: leave out width.")
            spacing = noise.grid(sensitivity)
            covered = noise.charged(sensitivity, spacing, width, self.plan.expected_batch)
            found.append((width, sensitivity, spacing, covered))
        return tuple(found)

    @cached_property
    def summation(self) -> Summation:
        """How the sums of gradients are split, and what their rounding costs."""
        return Summation(self.plan.expected_batch, 1.0 if self.whole else ratio_of(self.plan.scales))

    @property
    def whole(self) -> bool:
        """Whether the weight of a record may depend on the other records of its batch."""
        return not isinstance(self.rule, SampleRule)

    @cached_property
    def scales(self) -> Tensor:
        """What multiplies the clip bound, per owner class."""
        return torch.tensor(self.plan.scales, dtype=torch.float64)

    def bound(self, level: PlannedLevel, device: torch.device) -> Tensor:
        """The clip bound per owner class. Rules get a copy, since they could write into it unnoticed."""
        usual = self._bounds.get(level.bound)
        if usual is None:
            usual = self._bounds[level.bound] = self.scales * level.bound
        return usual if device.type == "cpu" else usual.to(device)

    @cached_property
    def _bounds(self) -> dict[float, Tensor]:
        return {}

    @cached_property
    def public(self) -> Public:
        """The plan's constants as rules see them."""
        rates = torch.tensor(self.plan.rates, dtype=torch.float64)
        sizes = torch.tensor([count for _, count in self.plan.facts.owners], dtype=torch.float64)
        return Public(
            batch=self.plan.expected_batch,
            steps_per_epoch=self.plan.facts.records / self.plan.expected_batch,
            groups=len(self.plan.facts.groups),
            rate=rates,
            expected=rates * sizes,
        )
