"""Attacks a step on made-up neighbours, and bounds epsilon from below to pin the accountant from both sides.

Outcomes whose losses fall into the same grid cell are merged. Merging is post-processing, so it can only lower every
divergence; each merged outcome is then moved down to a grid point, which lowers it further by O(width^2).
Rounding of its FFT is not charged: use it at rates of 1e-4 and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.special import ndtr
from torch import Tensor

from evenhand._validate import any_delta
from evenhand.accounting import accountant
from evenhand.accounting.accountant import check_events
from evenhand.accounting.gaussian_profile import Array, Direction, Relation, directions, loss_at
from evenhand.accounting.loss_distribution import Grid, choose_grid
from evenhand.accounting.noise_levels import NoiseLevels
from evenhand.mechanism.step import clamp_weights
from evenhand.testing.reference_step import answers_of, as_pass, batch_of
from evenhand.testing.rule_checks import by_row, movements, weights
from evenhand.testing.subjects import Case, Row, Subject, public
from evenhand.types import Event, State, Stats


def _outputs(loss: Array, q: float, m: float, direction: Direction) -> Array:
    """Return the output ``t`` (in units of noise) at which the remove or replace loss takes each value, or infinity."""
    if direction == "replace":
        with np.errstate(divide="ignore"):
            log_b = np.log(np.abs(np.sinh(np.minimum(np.abs(loss), 300.0) / 2)))
        log_b += math.log(1 / q - 1 + 1e-300) + m * m / 2
        slope = np.where(log_b > 30, log_b + math.log(2), np.arcsinh(np.exp(np.minimum(log_b, 30.0))))
        return np.asarray(np.sign(loss) * (np.abs(loss) / 2 + slope) / m)
    ratio = 1 + np.expm1(np.minimum(loss, 600.0)) / q
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(ratio > 0, np.log(np.maximum(ratio, 1e-300)) / m + m / 2, -np.inf))


def _masses(q: float, noise: float, direction: Direction, grid: Grid) -> tuple[int, Array, float]:
    """Return merged masses on the grid, their first index, and the common offset (<= 0) of the points they sit on."""
    m, h = 1 / noise, grid.width
    shift = 0.0 if direction == "add" else m
    ends = sorted((loss_at(-grid.reach, q, noise, direction), loss_at(grid.reach + shift, q, noise, direction)))
    first, last = math.floor(ends[0] / h) - 1, math.ceil(ends[1] / h) + 1
    edges = (np.arange(first, last + 2, dtype=np.float64) - 0.5) * h
    t = _outputs(-edges if direction == "add" else edges, q, m, direction)
    if direction == "add":  # the loss falls with t, so the tail of the loss is the lower tail of t
        p, r = ndtr(t), (1 - q) * ndtr(t) + q * ndtr(t - m)
    else:
        p = (1 - q) * ndtr(-t) + q * ndtr(m - t)
        r = (1 - q) * ndtr(-t) + q * ndtr(-m - t) if direction == "replace" else ndtr(-t)
    tail_p, tail_r = p[:-1], r[:-1]
    p, r = np.maximum(-np.diff(p), 0.0), np.maximum(-np.diff(r), 0.0)
    index = np.arange(first, last + 1)
    seen = (p > 1e-12 * tail_p) & (r > 1e-12 * tail_r) & (r > 1e-280)
    safe_p, safe_r = np.where(seen, p, 1.0), np.where(seen, r, 1.0)
    rounding = 1e-15 * (tail_p / safe_p + tail_r / safe_r)
    gap = np.where(seen, np.clip(np.log(safe_p / safe_r) - rounding - index * h, -h, 0.0), -h)
    weight = p * np.exp(np.minimum(grid.tilt * index * h - (grid.tilt * index * h)[seen].max(), 0.0))
    # Cells below the offset fall a whole cell further: balance that against the offset, which everybody pays.
    order = np.argsort(gap)
    falling = np.cumsum(weight[order]) - weight[order]
    offset = float(gap[order][np.argmin(h * falling / weight.sum() - gap[order])]) - 1e-12
    moved = np.zeros(p.size + 1)
    stay = seen & (gap >= offset)
    moved[1:] += np.where(stay, p, 0.0)
    moved[:-1] += np.where(seen & ~stay, p, 0.0)
    return first - 1, moved, offset


def epsilon(events: Sequence[Event], delta: float, *, relation: Relation = "add_remove", rel: float = 4e-6) -> float:
    """Compute a lower bound on the exact epsilon of a composition of at most a few dozen levels.

    Example:
        >>> 1.826 < epsilon([(0.01, 1.0, 1000)], 1e-5) < 1.8284
        True
    """
    levels = NoiseLevels.of(check_events(events), relation)
    delta = any_delta(delta)
    return max(_one(levels, delta, direction, rel) for direction in directions(relation))


def _one(levels: NoiseLevels, delta: float, direction: Direction, rel: float) -> float:
    grid = choose_grid(levels, direction, delta=delta, rel=rel)
    size = grid.size
    log_k, offset, log_g = 0.0, 0.0, np.zeros(size // 2 + 1, dtype=np.complex128)
    for q, s, n in levels.events():
        first, p, step = _masses(q, s, direction, grid)
        exponent = grid.tilt * grid.width * np.arange(first, first + p.size)
        top = float(exponent[p > 0].max())
        weight = p * np.exp(np.minimum(exponent - top, 0.0))
        folded = np.zeros(-(-p.size // size) * size)
        folded[: p.size] = weight / weight.sum()
        spectrum = rfft(np.roll(folded.reshape(-1, size).sum(axis=0), first % size), workers=1)
        log_g += n * np.log(np.where(np.abs(spectrum) > 1e-15, spectrum, 1e-15))
        log_k += n * (math.log(float(weight.sum())) + top)
        offset += n * step
    end = math.floor(grid.top / grid.width)
    loss = np.arange(end - size + 1, end + 1) * grid.width
    mass = np.roll(irfft(np.exp(log_g), n=size, workers=1), -((end + 1) % size))
    mass = np.maximum(mass - 1e-9 * mass.max(), 0.0)

    def value(eps: float) -> float:
        above = loss + offset > eps
        payoff = np.exp(log_k - grid.tilt * loss[above]) * -np.expm1(eps - loss[above] - offset)
        return float((mass[above] * payoff).sum()) * (1 - 1e-6)

    low, high = max(0.0, float(loss[0]) + offset), float(loss[-1])
    if value(low) <= delta:
        return 0.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if value(middle) > delta else (low, middle)
    return low


Vector = NDArray[np.float64]

TRIALS = 600
MISS = 1e-7
_DELTA = 0.25
_NORMS = (1e3, 3.0, 0.4, 1.0, 10.0, 2.0)
_LOSSES = (1.0, 0.5, 2.0, 0.7, 1.5, 0.2)


@dataclass(frozen=True)
class Neighbours:
    """Two batches that differ by one record, with gradients aligned so that their sums are furthest apart."""

    whole: Case
    removed: int
    signs: tuple[float, ...]

    def case(self, present: bool) -> Case:
        """Return the batch with the record, or without it."""
        rows = tuple(row for i, row in enumerate(self.whole.rows) if present or i != self.removed)
        return replace(self.whole, rows=rows)

    def gradients(self, present: bool) -> Tensor:
        """Return the gradients, all along one axis."""
        rows = [i for i in range(len(self.whole.rows)) if present or i != self.removed]
        gradients = torch.zeros(len(rows), 5, dtype=torch.float64)
        gradients[:, 0] = torch.tensor([self.signs[i] * self.whole.rows[i].norm for i in rows], dtype=torch.float64)
        return gradients


def audit(subject: Subject) -> tuple[bool, str]:
    """Check that a likelihood-ratio attack on worst-case gradients stays below the epsilon accounted for one step."""
    pair = _worst(subject)
    plan = subject.plan()
    owner = pair.whole.rows[pair.removed].owner
    z = plan.noise_seen(plan.level_at(0), owner)
    claimed = accountant.epsilon([(1.0, z, 1)], _DELTA)
    losses = {present: _losses(subject, pair, present) for present in (True, False)}
    lowest = max(
        bound
        for threshold in (0.0, claimed)
        for bound in (
            _lower(losses[True] > threshold, losses[False] > threshold),
            _lower(losses[False] < -threshold, losses[True] < -threshold),
        )
    )
    setting = f"(delta {_DELTA:g}, {losses[True].size} trials)"
    words = f"epsilon of one step at least {lowest:.3g}, accounted {claimed:.3g} {setting}"
    return lowest <= claimed, words if lowest <= claimed else f"{words}. Batch: {pair.whole}, row {pair.removed}"


def _worst(subject: Subject) -> Neighbours:
    """Return the pair, among batches of one to six rows, whose sums differ most."""
    best, pair = -1.0, None
    for count in range(1, len(_NORMS) + 1):
        rows = tuple(Row(_NORMS[i], _LOSSES[i], i % 3, i % 3) for i in range(count))
        case = Case(rows)
        state = case.state(subject)
        moved = movements(subject.rule, case, state) / subject.rule.sensitivity(state)[case.stats().owner]
        if float(moved.max()) > best:
            best, removed = float(moved.max()), int(moved.argmax())
            pair = Neighbours(case, removed, _signs(subject, case, state, removed))
    assert pair is not None
    return pair


def _signs(subject: Subject, case: Case, state: State, removed: int) -> tuple[float, ...]:
    """Return the sign of each gradient, which puts the two sums furthest apart.

    The removed record pulls one way; others pull with it if their weight falls when it leaves, else against it.
    """
    here = weights(subject.rule, case.stats(), state).tolist()
    there = weights(subject.rule, case.stats(without=removed), state).tolist()
    there.insert(removed, 0.0)
    return tuple(1.0 if a >= b else -1.0 for a, b in zip(here, there, strict=True))


def _losses(subject: Subject, pair: Neighbours, present: bool) -> Vector:
    """Compute the log-likelihood ratio of "present" over "absent", by the recorded noise, in many trials."""
    plan = subject.plan()
    case, memory = pair.case(present), subject.rule.initial(plan.facts)
    result, batch = as_pass(case, gradients=pair.gradients(present)), batch_of(case, 0)
    start = State(0, case.bounds * plan.level_at(0).bound, {}, memory, public(plan))
    stats = pair.case(True).stats(), pair.case(False).stats()
    asked = [(_asked(query, stats[0], start), _asked(query, stats[1], start)) for query in subject.queries]
    losses = np.empty(TRIALS // 2 if subject.queries else TRIALS)
    for trial in range(losses.size):
        mechanism = subject.mechanism(plan, seed=2 * trial + int(present))
        released = subject.step(mechanism, result, batch, memory)
        answers = answers_of(subject, mechanism, result, batch, memory)
        if answers or not trial:
            state = replace(start, answers=answers)
            means = _sum(subject, pair, True, state), _sum(subject, pair, False, state)
        seen = float(released.gradient["weight"][0]) * plan.expected_batch
        ratio = _ratio(seen, *means, released.commit.std)
        for query, sides, (_, std) in zip(subject.queries, asked, released.commit.queries, strict=True):
            values = answers[query.name].tolist()
            ratio += sum(_ratio(*each, std) for each in zip(values, *sides, strict=True))
        losses[trial] = ratio
    return losses


def _ratio(seen: float, with_it: float, without: float, std: float) -> float:
    if std <= 0:
        return math.copysign(math.inf, abs(seen - without) - abs(seen - with_it))
    return ((seen - without) ** 2 - (seen - with_it) ** 2) / (2 * std**2)


def _sum(subject: Subject, pair: Neighbours, present: bool, state: State) -> float:
    stats = pair.case(present).stats()
    row_weights = clamp_weights(weights(subject.rule, stats, state), stats, subject.rule.sensitivity(state))
    return float((row_weights * pair.gradients(present)[:, 0]).sum())


def _asked(query: Any, stats: Stats, state: State) -> Sequence[float]:
    values = by_row(query.value, stats, state).double()
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return list((values * (query.sensitivity / norms.clamp(min=query.sensitivity))).sum(0).tolist())


def _lower(hits: Any, alarms: Any) -> float:
    """Return a lower bound on the epsilon with which these counts are possible (Clopper-Pearson)."""
    from scipy import stats

    low = stats.beta.ppf(MISS, hits.sum(), hits.size - hits.sum() + 1) if hits.any() else 0.0
    high = stats.beta.isf(MISS, alarms.sum() + 1, alarms.size - alarms.sum()) if not alarms.all() else 1.0
    return max(0.0, math.log((low - _DELTA) / high)) if low > _DELTA else 0.0
