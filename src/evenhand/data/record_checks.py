"""Checks of records: exact copies, values that are not finite, training records among held-out ones.

A copy counts as a record of its own, so a person who was copied is protected less.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from evenhand.data.dataset import Data
from evenhand.data.fingerprint import Survey, survey
from evenhand.errors import DataError, UsageError
from evenhand.model_io import of_one_width
from evenhand.terminal import say

FIRST, CHUNK = 64, 4096
SECONDS = 1.0
"""Data that take longer to read are not looked through."""
SHARE, TIMES = 0.01, 4.0
"""Copies are named from this share of the records on, and above this many times what chance explains."""
ROWS, COLUMNS = 2048, 256


def copies(data: Data, seconds: float = SECONDS) -> int | None:
    """Count the records whose inputs equal an earlier record's; None where they take too long to read.

    The count depends on private records: it is for the trainer's eyes and must not get into a file that is shared.

    Examples:
      >>> from evenhand.data import wrap
      >>> copies(wrap(torch.tensor([[1.0], [2.0], [1.0]]), [0, 1, 1]))
      1
    """
    began, digests, start, size = time.perf_counter(), [], 0, FIRST
    while start < len(data):
        if time.perf_counter() - began > seconds:
            return None
        digests.append(_digests(data, torch.arange(start, min(start + size, len(data)))))
        start, size = start + size, min(2 * size, CHUNK)
    digest = np.sort(np.concatenate(digests))  # np.unique makes a table of 50 bytes a record, and keeps its memory
    return int((digest[1:] == digest[:-1]).sum())


def warning(data: Data) -> str | None:
    """Return a warning for the trainer if there are more copies than chance explains; None otherwise.

    Few columns make honest twins: in a table of age and sex almost every record has one. How many to expect is judged
    by how often two records agree in each column, as if half of the columns told nothing new.
    """
    count = copies(data)
    if count is None or count < max(2.0, SHARE * len(data)) or count <= TIMES * _expected(data):
        return None
    return (
        f"{count} of the {len(data)} training records have exactly the inputs of an earlier one, more than chance "
        "explains. If they are copies (oversampling, joined files), each counts as a record of its own: the promise to "
        "one record does not cover who is in k of them, whose epsilon is up to k times as large. Take copies out and "
        "weigh groups through the method instead. This line is for you and stands in no file."
    )


def tell(data: Data) -> None:
    """Print the warning to the trainer's terminal, if there is one."""
    message = warning(data)
    if message is not None:
        say(f"evenhand: {message}")


def _columns(data: Data, rows: torch.Tensor) -> list[NDArray[np.uint8]]:
    """Return every input tensor as one row of bytes per record."""
    leaves = [leaf.detach().cpu().contiguous() for leaf in _tensors(data, rows) if leaf.numel()]
    return [leaf.view(len(rows), -1).view(torch.uint8).numpy() for leaf in leaves]


def _tensors(data: Data, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs of these records, without what all records share."""
    tensors = (leaf for leaf in tree_leaves(data.fetch(rows)[0]) if isinstance(leaf, torch.Tensor))
    return [of_one_width(leaf) if leaf.is_nested else leaf for leaf in tensors]


def _digests(data: Data, rows: torch.Tensor) -> NDArray[np.int64]:
    """Return a 64-bit sum of the bytes of each record, with fixed odd weights: equal for equal records."""
    total = np.zeros(len(rows), dtype=np.int64)
    generator = np.random.default_rng(0)
    for part in _columns(data, rows):
        padded = np.zeros((len(rows), -(-part.shape[1] // 8) * 8), dtype=np.uint8)
        padded[:, : part.shape[1]] = part
        words = padded.view(np.int64)
        weights = generator.integers(-(2**62), 2**62, words.shape[1], dtype=np.int64) * 2 + 1
        words = words ^ (words >> 29)
        total += words @ weights
    return total


def _expected(data: Data) -> float:
    """Estimate generously how many copies chance explains: pairs times the root of the product over columns."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(data), generator=generator)[:ROWS].sort().values
    agree = 0.0
    for leaf in _tensors(data, rows):
        flat = leaf.detach().cpu().reshape(len(rows), -1)
        chosen = torch.randperm(flat.shape[1], generator=generator)[:COLUMNS]
        for column in flat[:, chosen].numpy().T:
            counts = np.unique(column, return_counts=True)[1]
            agree += math.log(float((counts / len(rows)) @ (counts / len(rows))))
    return float(len(data)) ** 2 / 2 * math.exp(agree / 2)


SHARE, COUNT = 0.01, 10
"""More than one record in a hundred, and at least ten, is no accident: a failed sensor or a mistyped cell spoils single
records, a division by zero, a logarithm or missing cells read as NaN spoil a column. Then the model would be trained on
other records than the statement speaks of."""


def check_finite(survey: Survey, allowed: bool) -> None:
    """Say how many records are not finite, before anything is spent; raise DataError where they are too many.

    Examples:
      >>> from evenhand.data import wrap
      >>> from evenhand.data.fingerprint import survey
      >>> rows = [[float("nan")]] * 10 + [[1.0]] * 10
      >>> check_finite(survey(wrap(rows, [0] * 20)), allowed=False)
      Traceback (most recent call last):
      ...
      evenhand.errors.DataError: Too many records hold values that are not finite ...
    """
    seen = len(survey.rows)
    if too_many(survey.not_finite, seen) and not allowed:
        raise DataError(
            "Too many records hold values that are not finite (NaN or infinite): more than one in a hundred. They "
            "would contribute nothing, and the model would be trained on fewer records than the statement speaks of. "
            "Fill or declare missing values first; if it is meant, pass allow_not_finite=True (--allow-not-finite). "
            "Nothing was spent."
        )
    if survey.not_finite:
        part = "" if seen == survey.records else f" {seen:,} that were looked at, out of"
        _tell(f"{survey.not_finite:,} of{part} {survey.records:,} records hold values that are not finite", "will add")


def too_many(count: int, among: int) -> bool:
    """Return whether so many rows that are not finite cannot be an accident.

    Examples:
      >>> too_many(9, 9), too_many(10, 1000), too_many(11, 1000)
      (False, False, True)
    """
    return count >= COUNT and count > SHARE * among


class LeftOut:
    """Counts the rows of steps that were not finite, and tells the trainer: once in training, and at its end.

    Training goes on: to stop by a rule that looks at the records would itself tell something about them.
    """

    def __init__(self) -> None:
        self.count, self._said = 0, False

    def add(self, left_out: int, drawn: int) -> None:
        """Take in a step that left rows out; ``drawn`` counts those of all steps. Say so once there are too many."""
        self.count += left_out
        if not self._said and too_many(self.count, drawn):
            self._said = True
            _tell(f"{self.count:,} of {drawn:,} rows drawn so far were not finite", "add")

    def summary(self, drawn: int) -> None:
        """Say at the end how many of all drawn rows there were, if any."""
        if self.count:
            _tell(f"{self.count:,} of {drawn:,} rows drawn in all steps were not finite", "added")


def _tell(what: str, contribute: str) -> None:
    say(f"evenhand: {what}: they {contribute} nothing to the model. This count is not private: keep it to yourself.")


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
    within_limit = np.cumsum(high - low) <= _PAIRS
    chosen, low, high = chosen[within_limit], low[within_limit], high[within_limit]
    if not len(chosen) or not (high > low).any():
        return 1.0
    matches = np.concatenate([place[a:b] for a, b in zip(low, high, strict=True)])
    distances = train_rows[matches] - np.repeat(test_rows[chosen], high - low)
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


def refuse_other_shape(train: Data, test: Data) -> None:
    """Raise DataError if held-out inputs have another shape than those of training, where both are arrays.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> try: refuse_other_shape(wrap(torch.zeros(2, 4), [0, 1]), wrap(torch.zeros(2, 3), [0, 1]))
      ... except DataError as error: print(str(error)[:71])
      The held-out inputs have shape (3,) a record, those to train on (4,): g
    """
    shapes = [data.facts.inputs.rpartition(" ")[0] for data in (train, test)]
    if all(shape.startswith("(") for shape in shapes) and shapes[0] != shapes[1]:
        raise DataError(
            f"The held-out inputs have shape {shapes[1]} a record, those to train on {shapes[0]}: give both the same "
            "columns."
        )


def refuse_both_sides(train: Data, test: Data) -> None:
    """Raise if records that are to be kept together are on both sides, in the training and in the held-out file.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> sides = [wrap(torch.zeros(2, 1), [0, 1], keep_together=names) for names in (["a", "b"], ["b", "c"])]
      >>> refuse_both_sides(*sides)
      Traceback (most recent call last):
      evenhand.errors.DataError: 1 of 2 names in the held-out data ...
    """
    if train.together is None or test.together is None:
        return
    held_out = torch.unique(test.together)
    both = int(torch.isin(held_out, train.together).sum())
    if both:
        raise DataError(
            f"{both} of {len(held_out)} names in the held-out data that keep records together are in the training data "
            "too: figures would be about persons whom the model has seen. Move each person to one file."
        )
