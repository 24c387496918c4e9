"""Checks of the step that carries the rule: equal to the slow reference, and the ledger says what was done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenhand.accounting import accountant
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.record_blocks import Blocks
from evenhand.mechanism import noise_grid
from evenhand.mechanism.step import Mechanism, Released
from evenhand.summation import KEY_BITS
from evenhand.testing import attack_check
from evenhand.testing.reference_step import ReferenceStep, answers_of, as_pass, batch_of
from evenhand.testing.rule_checks import TRIED, same, search
from evenhand.testing.subjects import BOUNDS, DELTA, FACTS, LAST, SCALES, Case, Subject, cases, public
from evenhand.types import Batch, State

_SLACK = 1e-9
_CLOSE = 1e-6


def step(subject: Subject) -> tuple[bool, str]:
    """Check that the released gradient equals the reference's on the same noise.

    Rows that are not finite and batches without rows are included.
    """
    reference = ReferenceStep()
    plans = {(b, s): subject.plan(bound=b, scales=s) for b in BOUNDS for s in SCALES}

    def broken(case: Case) -> str:
        plan = plans[case.bound, case.scales]
        memory, batch = case.state(subject).memory, batch_of(case, case.step)
        mechanism = subject.mechanism(plan)
        released = subject.step(mechanism, as_pass(case), batch, memory)
        expected = reference(mechanism, as_pass(case), batch, memory)
        scale = expected.commit.std + max(expected.commit.sensitivity)
        different = _different(released, expected, _CLOSE * scale / plan.expected_batch)
        return different or _off_grid(released, plan.expected_batch)

    problem = search(cases(spoilt=True), broken, TRIED)
    return not problem, problem or f"{TRIED} cases, equal to the slow reference"


def _different(released: Released, expected: Released, allowed: float) -> str:
    if released.gradient.keys() != expected.gradient.keys():
        return "releases other parameters than the gradient has"
    for name, value in expected.gradient.items():
        gap = (released.gradient[name].double() - value).abs().max() if value.numel() else torch.tensor(0.0)
        if not float(gap) <= allowed:
            return f"releases another {name!r} than the slow reference: off by {float(gap) / allowed * _CLOSE:.3g}"
    if not same(dict(released.memory), dict(expected.memory), _CLOSE):
        return "hands on another memory than the slow reference"
    return "" if released.left_out == expected.left_out else "counts other rows as left out than the slow reference"


def _off_grid(released: Released, batch: float) -> str:
    """Return a problem if releases lie off the grid of the sensitivity, or "".

    Low-order bits that are not rounded away can reveal the data.
    """
    spacing = noise_grid.grid(max(released.commit.sensitivity)) / 2  # what is recorded may lie in the next power of two
    units = torch.cat([value.reshape(-1).double() for value in released.gradient.values()]) * batch / spacing
    return "releases values off the grid" if bool(((units - units.round()).abs() > 1e-3).any()) else ""


def ledger(subject: Subject) -> tuple[bool, str]:
    """Check that the ledger records at least the declared sensitivity and the planned noise, for every class."""
    plans = {(b, s): subject.plan(bound=b, scales=s) for b in BOUNDS for s in SCALES}

    def broken(case: Case) -> str:
        plan = plans[case.bound, case.scales]
        mechanism, batch, memory = subject.mechanism(plan), batch_of(case, case.step), case.state(subject).memory
        commit = subject.step(mechanism, as_pass(case), batch, memory).commit
        answers = answers_of(subject, mechanism, as_pass(case), batch, memory)
        level = plan.level_at(case.step)
        bound = torch.tensor([level.bound * scale for scale in plan.scales], dtype=torch.float64)
        declared = subject.rule.sensitivity(State(case.step, bound, answers, memory, public(plan)))
        if (commit.first, commit.count) != (case.step, 1):
            return "records another step than the one that ran"
        for covered, sensitivity, scale in zip(commit.sensitivity, declared.tolist(), plan.scales, strict=True):
            if covered < sensitivity:
                return "records a sensitivity below the declared one"
            if commit.std < covered * level.noise / scale * (1 - _SLACK):
                return "records less noise for a class than the plan says"
        for (covered, std), query, multiplier in zip(commit.queries, subject.queries, level.queries, strict=True):
            if covered < query.sensitivity or std < covered * multiplier * (1 - _SLACK):
                return f"records less noise for the query {query.name!r} than the plan says"
        return ""

    problem = search(cases(spoilt=True), broken, TRIED // 3)
    return not problem, problem or f"{TRIED // 3} cases"


def accounting(subject: Subject) -> tuple[bool, str]:
    """Check that the accounted events cost at least as much as the steps that the ledger records."""
    plan = subject.plan(scales=SCALES[1])
    empty, memory = Case(()), subject.rule.initial(plan.facts)
    events: dict[int, list[tuple[float, float, int]]] = {}
    for owner in range(len(plan.scales)):
        for level, position in zip(plan.levels, (0, LAST), strict=True):
            commit = subject.step(subject.mechanism(plan), as_pass(empty), batch_of(empty, position), memory).commit
            parts = [covered / std for covered, std in commit.queries]
            cost = (commit.sensitivity[owner] / commit.std) ** 2 + sum(part**2 for part in parts)
            events.setdefault(owner, []).append((plan.rates[owner], 1 / math.sqrt(cost), level.count))
    for owner, truth in events.items():
        claimed, least = accountant.epsilon(subject.events(plan, owner), DELTA), _lower(tuple(truth))
        if claimed < least * (1 - 1e-4):
            return False, f"claims epsilon {claimed:.4g} for owner {owner}, but the steps spend at least {least:.4g}"
    return True, f"{len(events)} owner classes, both levels of noise"


@cache
def _lower(events: tuple[tuple[float, float, int], ...]) -> float:
    return attack_check.epsilon(events, DELTA)


RECORDS = 16_384


class _Alone(nn.Module):
    """A module that calls another, so that the engine records it on a tape."""

    def __init__(self, inner: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.inner, self._twice = inner, twice

    def forward(self, x: Tensor) -> Tensor:
        """Call the inner module, with the input twice if it takes two."""
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
    """Check that one of 16,384 records moves the released sum by at most the recorded sensitivity, on every way.

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
    plan = subject.plan()
    mechanism = subject.mechanism(plan)
    model, times = way.build(), _times(way.records, plan.level_at(0).bound)
    keys = np.sort(np.random.default_rng(0).integers(0, 2**KEY_BITS, way.records, dtype=np.uint64))
    rest = np.delete(np.arange(way.records), way.records // 3)
    gradient, covered = _release(subject, mechanism, way, model, times, keys)
    without, _ = _release(subject, mechanism, way, model, times[torch.from_numpy(rest)], keys[rest])
    return float((gradient - without).norm()) * plan.expected_batch, covered


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
