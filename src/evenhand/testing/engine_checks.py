"""The check of a step on large batches through the real engine, on every way that its sums can take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.record_blocks import Blocks
from evenhand.mechanism.step import Mechanism
from evenhand.summation import KEY_BITS
from evenhand.testing.subjects import FACTS, Subject
from evenhand.types import Batch

RECORDS = 16_384


class _Alone(nn.Module):
    """A module that calls another, so that the engine records it on a tape."""

    def __init__(self, inner: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.inner, self._twice = inner, twice

    def forward(self, x: Tensor) -> Tensor:
        """Call it, with the input twice if it takes two."""
        out: Tensor = self.inner(x, x) if self._twice else self.inner(x)
        return out


@dataclass(frozen=True)
class _Way:
    """A model, the shape of its records, options of the engine, and how many records are tried."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    records: int = RECORDS


_WAYS = {
    "a chain of layers": _Way(lambda: nn.Sequential(nn.Linear(16, 1, bias=False)), (16,)),
    "a tape": _Way(lambda: _Alone(nn.Linear(16, 1, bias=False)), (16,)),
    "sums over time": _Way(lambda: _Alone(nn.Linear(40, 1, bias=False)), (2, 40)),
    "records one by one": _Way(lambda: _Alone(nn.Bilinear(2, 2, 2), twice=True), (2,), records=RECORDS // 4),
    "parts": _Way(lambda: nn.Sequential(nn.Linear(16, 1, bias=False)), (16,), {"limit": RECORDS // 3}),
}


def large(subject: Subject) -> tuple[bool, str]:
    """One of 16,384 records moves the released sum by at most what the step records, on every way of the engine.

    Where records are differentiated one by one, which adds up in float64, a quarter of them must do.

    Large records lift float32 sums past a power of two, after which tiny ones are lost: a sum in one run would move by
    several bounds. Steps with side queries are left out, since their answers follow the records.
    """
    if subject.queries:
        return True, "not tried: weights follow the answers of side queries"
    worst = 0.0
    for name, way in _WAYS.items():
        moved, covered = _moved(subject, way)
        worst = max(worst, moved / covered)
        if not moved <= covered:
            words = f"one of {way.records} records moves the sum by {moved / covered:.4g} times what is recorded"
            return False, f"by {name}, {words}"
    return True, f"{len(_WAYS)} ways, {RECORDS} records, worst / recorded = {worst:.3f}"


def _moved(subject: Subject, way: _Way) -> tuple[float, float]:
    """Return how far the released sum moves with one of the large records, and the sensitivity on the ledger."""
    torch.manual_seed(0)
    made = subject.plan()
    mechanism = subject.mechanism(made)
    model, times = way.build(), _times(way.records, made.level_at(0).bound)
    keys = np.sort(np.random.default_rng(0).integers(0, 2**KEY_BITS, way.records, dtype=np.uint64))
    rest = np.delete(np.arange(way.records), way.records // 3)
    gradient, covered = _release(subject, mechanism, way, model, times, keys)
    without, _ = _release(subject, mechanism, way, model, times[torch.from_numpy(rest)], keys[rest])
    return float((gradient - without).norm()) * made.expected_batch, covered


def _times(records: int, bound: float) -> Tensor:
    """Return multiples of a record's gradient: large ones first, then tiny ones of the other sign.

    Without one of the large ones their sum is just below a power of two, with it above, where all tiny ones are lost.
    """
    half = records // 2
    large = torch.full((half + 1,), 1.0 - 2.0**-18, dtype=torch.float64)
    tiny = torch.full((half - 1,), -half * 2.0**-24 * (1 - 2.0**-10), dtype=torch.float64)
    return torch.cat([large, tiny]) * 2.0 ** math.floor(math.log2(bound))


def _release(
    subject: Subject, mechanism: Mechanism, way: _Way, model: nn.Module, times: Tensor, keys: NDArray[np.uint64]
) -> tuple[Tensor, float]:
    """Return the released gradient as one vector, and the largest sensitivity that the step recorded."""
    count = len(times)
    engine = MicroBatches(model, lambda out, y: out.flatten(1).sum(1) * y, **way.options)
    ones = torch.ones(1, *way.shape)
    unit = float(engine.run(ones.expand(2, *way.shape).contiguous(), torch.ones(2)).norm[0])
    blocks = Blocks(count, keys, mechanism.summation, mechanism.whole)
    result = engine.run(ones.expand(count, *way.shape).contiguous(), (times / unit).float(), None, blocks)
    zero = torch.zeros(count, dtype=torch.long)
    batch = Batch(None, None, zero, zero, torch.arange(count), 0, 0, keys)
    released = subject.step(mechanism, result, batch, subject.rule.initial(FACTS))
    flat = torch.cat([value.detach().double().reshape(-1) for value in released.gradient.values()])
    return flat, max(released.commit.sensitivity)
