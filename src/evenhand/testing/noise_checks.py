"""Checks of the noise itself: 128,000 values through the real step, and the rows that the sampler draws.

Each test alarms with probability 1e-8 on a right mechanism, and fewer than a hundred are made, so that the false-alarm
rate of a check is below 1e-6. Seeds are fixed: a check that passed once passes again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenhand.mechanism.random_streams import Stream
from evenhand.testing.reference_step import Recorder, Wide, as_pass, batch_of, pass_over
from evenhand.testing.subjects import FACTS, SCALES, Case, Row, Sampler, Subject

Vector = NDArray[np.float64]

ALARM = 1e-8
STEPS = 8
SIZE = 16_000
BIAS = 4_000


def noise(subject: Subject) -> tuple[bool, str]:
    """Check that gradient and answers carry independent Gaussian noise of exactly the recorded standard deviation."""
    drawn = [_noise(subject, position, segment=0) for position in range(STEPS)]
    problem = next(filter(None, _problems(subject, drawn)), "")
    return not problem, problem or f"{STEPS * SIZE} values of the gradient, {STEPS * Wide.size} of an answer"


def _problems(subject: Subject, drawn: list[Vector]) -> Iterator[str]:
    rows = ("on a batch without rows", "on a batch with rows")
    for words, vectors in zip(rows, (drawn[::2], drawn[1::2]), strict=True):
        for name, part in (("weight", slice(0, SIZE - BIAS)), ("bias", slice(SIZE - BIAS, SIZE))):
            yield _gaussian(np.concatenate([vector[part] for vector in vectors]), f"the noise of {name!r} {words}")
    yield _gaussian(np.concatenate(drawn), "the noise of the gradient")
    for lag in (1, 2, 3, BIAS):
        left, right = (np.concatenate([v[s] for v in drawn]) for s in (slice(None, -lag), slice(lag, None)))
        yield _related(left, right, f"noise of coordinates {lag} apart")
        yield _related(left**2, right**2, f"size of the noise of coordinates {lag} apart")
    for first, second in itertools.combinations(range(STEPS), 2):
        yield _related(drawn[first], drawn[second], f"noise of steps {first} and {second}")
    yield _related(drawn[0], _noise(subject, 0, segment=1), "noise of a run and of its resumed segment")
    answers = [_answer_noise(subject, position) for position in range(STEPS)]
    yield _gaussian(np.concatenate(answers), "the noise of an answer")
    yield _related(answers[0], answers[1], "noise of an answer at steps 0 and 1")
    for position in range(2):
        yield _related(answers[position], drawn[position][: Wide.size], "noise of an answer and of the gradient")
    yield _coarse(np.concatenate(drawn), "the noise of the gradient")
    yield _coarse(np.concatenate(answers), "the noise of an answer")


def _noise(subject: Subject, position: int, segment: int) -> Vector:
    """Return the gradient's noise in units of the recorded standard deviation.

    Odd positions have rows, all of norm zero.
    """
    plan = subject.plan(scales=SCALES[1])
    case = Case((Row(0.0, 1.0, 0, 0), Row(0.0, 2.0, 1, 1)) if position % 2 else ())
    stats = case.stats()
    result = pass_over(torch.zeros(len(case.rows), SIZE), stats.norm, stats.loss, weight=SIZE - BIAS)
    mechanism = subject.mechanism(plan, seed=1, segment=segment)
    released = subject.step(mechanism, result, batch_of(case, position), subject.rule.initial(FACTS))
    flat = torch.cat([value.reshape(-1).double() for value in released.gradient.values()]).numpy()
    return np.asarray(flat * plan.expected_batch / released.commit.std)


def _answer_noise(subject: Subject, position: int) -> Vector:
    asked = replace(subject, rule=Recorder(), queries=(Wide(noise=2.0),))
    plan = asked.plan()
    case = Case((Row(1.0, 1.0, 0, 0),) if position % 2 else ())
    released = asked.step(asked.mechanism(plan, seed=1), as_pass(case), batch_of(case, position), {})
    answer: Any = released.memory["answers"][Wide.name]
    return np.asarray(answer.numpy() / released.commit.queries[0][1])


def _gaussian(values: Vector, what: str) -> str:
    """Return how values differ from standard normal ones (mean, variance, distribution, tails), or ""."""
    from scipy import special, stats

    count = values.size
    if not np.isfinite(values).all() or not values.any():
        return f"{what} is missing"
    squares = float((values**2).sum())
    tests = {
        "mean": 2 * special.ndtr(-abs(values.mean()) * math.sqrt(count)),
        "variance": 2 * min(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count)),
        "distribution": stats.kstest(values, "norm").pvalue,
    }
    for edge in (3.0, 3.5):
        tail, expected = int((np.abs(values) > edge).sum()), 2 * special.ndtr(-edge)
        both = stats.binom.cdf(tail, count, expected), stats.binom.sf(tail - 1, count, expected)
        tests[f"tail beyond {edge:g}"] = 2 * min(both)
    for name, p in tests.items():
        if p < ALARM:
            std = math.sqrt(squares / count)
            return f"{what} has a wrong {name}: its standard deviation is {std:.4g} of the recorded one"
    return ""


def _coarse(values: Vector, what: str) -> str:
    distinct = np.unique(values).size
    return f"{what} takes only {distinct} values in {values.size}" if distinct < 0.98 * values.size else ""


def _related(left: Vector, right: Vector, what: str) -> str:
    from scipy import special

    correlation = float(np.corrcoef(left, right)[0, 1])
    p = 2 * special.ndtr(-abs(correlation) * math.sqrt(left.size))
    return "" if p >= ALARM else f"the {what} are correlated by {correlation:.3g}"


def sampling(subject: Subject) -> tuple[bool, str]:
    """Check that records enter independently of each other and of other steps, at the rate of their owner class."""
    problem = _drawn(subject.sampler)
    return not problem, problem or f"{2 * _DRAWS} draws of {3 * _EACH} records"


_DRAWS, _EACH = 5000, 8
_TINY, _MANY, _TIMES = 1e-9, 1_000_000, 100


@cache
def _drawn(make: Any) -> str:
    """Return a problem of the sampler, or "": equal rates first, then one per owner, then a very small rate."""
    for rates in ((0.25, 0.25, 0.25), (0.1, 0.25, 0.4)):
        problem = _dependent(make, rates)
        if problem:
            return problem
    rare: Sampler = make(torch.zeros(_MANY, dtype=torch.long), (_TINY,), Stream.insecure(3, 0))
    entered = sum(rare.rows(position).numel() for position in range(_TIMES))
    likely = float(_p(np.array([entered]), _MANY * _TIMES, np.array([_TINY])).min())
    return "" if likely >= ALARM else f"a rate of {_TINY:g} is met by {entered / (_MANY * _TIMES):.1g}"


def _dependent(make: Any, rates: tuple[float, ...]) -> str:
    owner = torch.arange(3).repeat_interleave(_EACH)
    sampler: Sampler = make(owner, rates, Stream.insecure(2, 0))
    each = np.repeat(rates, _EACH)
    table = np.zeros((_DRAWS, each.size), dtype=np.int64)
    for position in range(_DRAWS):
        rows = sampler.rows(position).numpy()
        if np.unique(rows).size != rows.size:
            return "draws a record twice for one step"
        table[position, rows] = 1
    pairs = np.triu_indices(each.size, 1)
    twice = (table[0::2] * table[1::2]).sum(0)
    tests = (
        ("a record enters at another rate than its owner's", table.sum(0), _DRAWS, each),
        ("two records do not enter independently", (table.T @ table)[pairs], _DRAWS, np.outer(each, each)[pairs]),
        ("a record's entries at two steps are not independent", twice, _DRAWS // 2, each**2),
    )
    for words, counts, trials, chances in tests:
        p = float(_p(counts, trials, chances).min())
        if p < ALARM / each.size:
            return f"{words} (p = {p:.1g})"
    return ""


def _p(counts: NDArray[np.int64], trials: int, rates: Vector) -> Vector:
    from scipy import stats

    return np.asarray(2 * np.minimum(stats.binom.cdf(counts, trials, rates), stats.binom.sf(counts - 1, trials, rates)))
