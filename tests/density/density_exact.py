"""Releases without noise: what they sum, so that sensitivities can be measured by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from evenhand.accounting.budgets import Budgets, FixedNoise, Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density.noisy_sums import Query, Releases, as_data, plan_of
from evenhand.mechanism.random_streams import Stream


class Exact(Releases):
    """Keeps every sum and releases it as it is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, Stream.fresh())
        self.sums: list[Tensor] = []

    def release(self, summed: Tensor, *, dimension: int | None = None) -> Tensor:
        super().release(summed, dimension=dimension)
        self.sums.append(summed.double().clone())
        return self.sums[-1]


def wrapped(inputs: Any, labels: Any, classes: int = 3, owners: Sequence[str] | None = None) -> Data:
    return as_data(torch.as_tensor(inputs).float(), labels, owners=owners, classes=range(classes))[0]


def planned(data: Data, queries: Sequence[Query], promise: Promise | None = None) -> Plan:
    return plan_of("test", {}, queries, promise or FixedNoise(1.0, 1e-5), data.facts)


def two_owners(data: Data, queries: Sequence[Query]) -> Plan:
    return planned(data, queries, Budgets({"strict": 1.0, "usual": 4.0}, 1e-5))


Summed = Callable[[Data], Tensor]


def worst_move(summed: Summed, inputs: Tensor, labels: Any, owners: Sequence[str], classes: int) -> list[float]:
    """How far each record's removal moves the sum; the others, and the owners' names, stay as they are."""
    whole = summed(wrapped(inputs, labels, classes, owners))
    moves = []
    for removed in range(len(inputs)):
        kept = [i for i in range(len(inputs)) if i != removed]
        part = wrapped(inputs[kept], np.asarray(labels)[kept], classes, [owners[i] for i in kept])
        moves.append(float(torch.linalg.vector_norm(whole - summed(part))))
    return moves


def certified(hits: Any, alarms: Any, delta: float, miss: float = 1e-5) -> float:
    """Clopper-Pearson: the least epsilon that is possible with so many hits among members, alarms among others."""
    low = stats.beta.ppf(miss, hits.sum(), hits.size - hits.sum() + 1) if hits.any() else 0.0
    high = stats.beta.isf(miss, alarms.sum() + 1, alarms.size - alarms.sum()) if not alarms.all() else 1.0
    return max(0.0, math.log((low - delta) / high)) if low > delta else 0.0
