"""Running a subject's step on made-up gradients, and reading out the noisy answers that its rule was given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenhand.mechanism import Mechanism
from evenhand.methods.queries import Query
from evenhand.methods.rules import Clip
from evenhand.testing.cases import Case
from evenhand.testing.subjects import Subject
from evenhand.types import Batch, Facts, Pass, State, Stats

WEIGHT = 3
"""Coordinates of a made-up gradient that belong to the parameter "weight"; the rest are "bias"."""


@dataclass(frozen=True)
class Recorder(Clip):
    """Clipping that remembers the noisy answers it was given, so that the kit can read them."""

    name = "recorder"

    def advance(self, state: State) -> Mapping[str, Any]:
        """The answers themselves."""
        return {"answers": dict(state.answers)}


@dataclass(frozen=True)
class Wide(Query):
    """An answer wide enough to look at its noise; every value is zero."""

    name = "wide"
    size: int = 4000

    def width(self, facts: Facts) -> int:
        """Always ``size``."""
        return self.size

    def value(self, rows: Stats, state: State) -> Tensor:
        """Zeros."""
        return rows.norm.new_zeros(self.size)


def directions(count: int, size: int) -> Tensor:
    """Unit vectors, a different one for every row."""
    angles = torch.arange(1, count * size + 1, dtype=torch.float64).reshape(count, size)
    return torch.nn.functional.normalize(torch.sin(angles**1.7), dim=1)


def pass_over(gradients: Tensor, norm: Tensor, loss: Tensor, weight: int = WEIGHT) -> Pass:
    """What an engine would return for these gradients. A row of weight 0 is not touched, so NaN shows if it is used."""

    def weighted_sum(found: Tensor) -> dict[str, Tensor]:
        used = found != 0
        total = (gradients[used] * found[used].double().unsqueeze(1)).sum(0)
        return {"weight": total[:weight], "bias": total[weight:]}

    return Pass(loss=loss, norm=norm, weighted_sum=weighted_sum)


def batch_of(case: Case, position: int) -> Batch:
    """The case's rows as a drawn batch."""
    stats = case.stats()
    return Batch(None, None, stats.group, stats.owner, stats.record, position, 0)


def as_pass(case: Case, size: int = 5, gradients: Tensor | None = None) -> Pass:
    """The case's rows as gradients of their norms; a spoilt row has NaN in its gradient, or an infinite loss."""
    stats = case.stats()
    norm, loss = stats.norm.clone(), stats.loss.clone()
    found = directions(len(case.rows), size) * norm.unsqueeze(1) if gradients is None else gradients
    for i, row in enumerate(case.rows):
        if row.spoilt and i % 2:
            loss[i] = math.inf
        elif row.spoilt:
            norm[i], found[i] = math.nan, math.nan
    return pass_over(found, norm, loss)


def answers_of(subject: Subject, mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Any:
    """The noisy answers of this very step: run once more with the recorder in the rule's place."""
    if not subject.queries:
        return {}
    return subject.step(replace(mechanism, rule=Recorder()), result, batch, memory).memory["answers"]
