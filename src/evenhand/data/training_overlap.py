"""Whether data that are called held-out hold training records: told by digests of their rows (``survey``).

Equal rows alone say little: in a table of age, sex and label almost every new person has a twin among the training
records. So the question is whether there are more, or in another pattern, than independent records would show. Three
patterns are looked for; each is refused where independent records show it less often than once in a million.

1. *Spread.* Take the rows of both sides together. Were all drawn alike, a row that occurs c times would lie on both
   sides with probability ``1 - p^c - (1-p)^c``, where p is the held-out share: twins lie on one side as often as chance
   says. A copied record always lies on both.
2. *Order.* Long stretches of the held-out rows equal training rows, in their order.
3. *Counts.* Every value occurs exactly as often on both sides: the training records in another order.

Not seen: rescaled, shuffled-column or otherwise transformed copies; a few copies among many rows; copies in data with
so few distinct rows that they look like any other sample; copies made by another random transform than in training.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import Data
from evenhand.data.row_digests import Survey, survey
from evenhand.errors import UsageError

CHANCE = 1e-6
"""Refused where independent records would look like this less often."""
_ALIGNED, _PAIRS = 64, 2_000_000


def refuse_training_records(train: Survey, test: Data) -> None:
    """Raise UsageError if ``test`` holds training records, as far as digests of rows can tell.

    Examples:
      >>> import torch
      >>> from evenhand.data import wrap
      >>> people = torch.rand(200, 5)
      >>> refuse_training_records(survey(wrap(people[:100], [0] * 100)), wrap(people[100:], [0] * 100))
      >>> refuse_training_records(survey(wrap(people, [0] * 200)), wrap(people[50:100], [0] * 50))
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: The held-out data hold training records: ...
    """
    held_out = survey(test, train.key)
    if looks_copied(train, held_out):
        raise UsageError(
            "The held-out data hold training records: more of their rows are training rows, or in the same order, than "
            "independent records would show. Metrics on training records reveal them, and the statement does not cover "
            "that. Hold records out; or, for research, pass training_records=True (--training-records): such figures "
            "then go into the run's private/ folder only."
        )


def looks_copied(train: Survey, test: Survey) -> bool:
    """Return whether the rows show one of the three patterns; the surveys must have the same key."""
    return any(
        _spread(one, two) < CHANCE or _counts(one, two) < CHANCE or _order(train.rows, one, test.rows, two) < CHANCE
        for one, two in ((train.inputs, test.inputs), (train.both, test.both))
    )


def _spread(train: NDArray[np.uint64], test: NDArray[np.uint64]) -> float:
    """Return a bound on the chance that so many values lie on both sides (Chernoff), each by its own coins."""
    here, there = _occurrences(train, test)
    times = here + there
    often, number = np.unique(times[times > 1], return_counts=True)
    both = int(((here > 0) & (there > 0)).sum())
    share = len(test) / (len(train) + len(test))
    alike = 1.0 - share**often - (1.0 - share) ** often
    if both <= float(number @ alike):
        return 1.0
    tilts = np.linspace(0.0, 40.0, 201)
    bounds = number @ np.log1p(alike[:, None] * np.expm1(tilts)) - tilts * both
    return math.exp(min(0.0, float(bounds.min())))


def _counts(train: NDArray[np.uint64], test: NDArray[np.uint64]) -> float:
    """Return about the chance that two samples have exactly the same counts of all values, if these do; else 1."""
    if len(train) != len(test):
        return 1.0
    here, there = _occurrences(train, test)
    if not np.array_equal(here, there):
        return 1.0
    return math.exp(-0.5 * float(np.log(4.0 * math.pi * np.sort(here)[:-1]).sum()))


def _order(
    train_rows: NDArray[np.int64], train: NDArray[np.uint64], test_rows: NDArray[np.int64], test: NDArray[np.uint64]
) -> float:
    """Return a bound on the chance that so many of some held-out rows equal training rows at one common distance.

    Rows that follow each other may be alike in honest data too (sorted tables): how often a training row equals one of
    its eight next neighbours counts as the usual rate.
    """
    chosen = np.unique(np.linspace(0, len(test) - 1, min(_ALIGNED, len(test))).round().astype(np.int64))
    place = np.argsort(train, kind="stable")
    low, high = (np.searchsorted(train[place], test[chosen], side) for side in ("left", "right"))
    kept = np.cumsum(high - low) <= _PAIRS
    chosen, low, high = chosen[kept], low[kept], high[kept]
    if not len(chosen) or not (high > low).any():
        return 1.0
    found = np.concatenate([place[a:b] for a, b in zip(low, high, strict=True)])
    distances = train_rows[found] - np.repeat(test_rows[chosen], high - low)
    most = int(np.unique(distances, return_counts=True)[1].max())
    near = [float((train[lag:] == train[:-lag]).mean()) for lag in range(1, min(9, len(train)))]
    rate = max([_alike(train), *near])
    return min(1.0, (len(train) + len(test)) * _tail(len(chosen), most, rate))


def _alike(values: NDArray[np.uint64]) -> float:
    """Return the chance that two random rows are equal."""
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float(counts @ counts) / len(values) ** 2


def _tail(draws: int, hits: int, rate: float) -> float:
    """Return a bound on the chance of so many hits (Chernoff)."""
    share = hits / draws
    if share <= rate:
        return 1.0
    rest = (1.0 - share) * math.log((1.0 - share) / (1.0 - rate)) if share < 1.0 else 0.0
    return math.exp(-draws * (share * math.log(share / rate) + rest))


def _occurrences(train: NDArray[np.uint64], test: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how often each value occurs on each side."""
    values, code = np.unique(np.concatenate([train, test]), return_inverse=True)
    return (
        np.bincount(code[: len(train)], minlength=len(values)),
        np.bincount(code[len(train) :], minlength=len(values)),
    )
