"""Poisson sampling: every record enters a step by its own coin, whose probability depends on its owner class only.

The draw that runs is the draw that is accounted (law 7): rates come from the plan, coins from the secret stream. The
seeds for fetching records come from the same stream, one for each (step, record).

A draw costs time and memory of the batch, not of the data. Records are put into strata of rates near each other. In a
stratum candidates are drawn at its largest rate, by the gaps between them (by coins where rates are high), and each
candidate then passes a coin for its own share of that rate. Few records, and those of whom a good part is drawn, cost
least with a coin for each of them (``Coins``). However a record is drawn, its probability is its rate rounded down to a
multiple of 2^-64 (to 2^-192): it must not depend on which other records there are. Proof: docs/proofs/poisson_draws.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.data.persons import slotted
from evenhand.data.record_seeds import begun, seeds
from evenhand.errors import UsageError
from evenhand.summation import KEY_BITS, levels
from evenhand.types import Batch

if TYPE_CHECKING:
    from evenhand.mechanism.random_streams import Stream


COINS_FROM = 0.125
"""Rate from which a coin for every record costs less than gaps."""
LONGEST_GAP = 1 << 15
"""Records that one random word skips at most."""
REACH = 2.5
"""Length of a gap table in mean gaps: 92 of 100 words then end at a candidate."""
NEVER = 2.0**-62
"""Rate below which no record is drawn at all."""
MOST_RECORDS = 1 << 37
"""Records that one draw can be made from: beyond, words of one purpose would meet those of another."""
GUIDED = 16
"""First bits of a word that tell where in the gap table to look for it."""
FURTHEST = 4
"""Entries of the table with the same first bits up to which looking at each costs less than a binary search."""
_STRATUM_COST = 500
"""Candidates whose draw costs as much as one stratum more."""
_REGION = 1 << 40
"""Cipher blocks of a step that belong to one stratum."""
_THINNING = _REGION // 2
"""Cipher blocks from the beginning of a stratum's region to the coins of its candidates."""
_TIES = _REGION // 4
"""Cipher blocks from a word to its further bits."""


class PoissonSampler:
    """A sampler that draws the rows of each step. The draws are secret: the accounting relies on it.

    Every record has a secret random key for the whole segment, and rows come in the order of their keys. The blocks
    that are summed together follow from them (``gradients/record_blocks.py``). Records whose ``scales`` differ in level
    never share a block.

    Formal guarantees:
      Inclusions are independent over records and steps, with probability ``rates[owner]`` rounded down to a multiple
      of 2^-64, to within 2^-192 (docs/proofs/poisson_draws.md). The draw is a function of (key, step) alone: asking
      twice gives the same rows, never a second chance.

    Examples:
      >>> import torch
      >>> from evenhand.mechanism.random_streams import Stream
      >>> sampler = PoissonSampler(torch.zeros(100, dtype=torch.long), [0.1], Stream.insecure(0, 0))
      >>> bool((sampler.rows(0) == sampler.rows(0)).all())
      True
    """

    def __init__(
        self, owner: Tensor, rates: Sequence[float], stream: Stream, scales: Sequence[float] | None = None
    ) -> None:
        self._owner, self._stream = owner.cpu().numpy().astype(np.int32), stream
        self._levels = None if scales is None else levels(scales) << np.uint64(KEY_BITS)
        by_class = np.asarray(rates, dtype=np.float64)
        if len(owner) > MOST_RECORDS or not bool(((by_class >= 0) & (by_class <= 1)).all()):
            raise UsageError(f"Rates lie between 0 and 1, and a draw is made from at most {MOST_RECORDS:,} records.")
        batch = float(np.bincount(self._owner, minlength=len(rates)) @ by_class)
        self._coins: Coins | None = None
        self._strata: tuple[Stratum, ...] = ()
        if costs_least_by_coins(len(self._owner), batch):
            self._coins = Coins.toss(self._owner, by_class, self._keys(np.arange(len(self._owner))))
        else:
            self._strata = stratify(self._owner, by_class)

    def record_seeds(self, step: int, records: Sequence[int]) -> Iterator[bytes]:
        """Yield the secret seed of each record of step ``step``."""
        return self._stream.record_seeds(step, records)

    def person_words(self, step: int, persons: Tensor) -> NDArray[np.uint64]:
        """Return the secret word of each person that chooses their record of step ``step``."""
        return self._stream.person_words(step, persons.numpy())

    def choice_words(self, step: int, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the secret word of each record by which it is chosen for step ``step`` among those of its person."""
        return self._stream.choice_words(step, records)

    def draw(self, step: int) -> tuple[Tensor, NDArray[np.uint64]]:
        """Return the numbers of the rows that step ``step`` uses, possibly none, and their keys, ascending."""
        if self._coins is not None:
            rows, keys = self._coins.draw(self._stream, step)
            return torch.from_numpy(rows), keys
        drawn = [stratum.draw(self._stream, step) for stratum in self._strata]
        rows = drawn[0] if len(drawn) == 1 else np.concatenate(drawn)
        keys = self._keys(rows)
        order = np.argsort(keys)
        return torch.from_numpy(rows[order]), keys[order]

    def _keys(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the secret keys of these records, with the level of their scale above them."""
        keys = self._stream.record_keys(records)
        return keys if self._levels is None else keys | self._levels[self._owner[records]]

    def rows(self, step: int) -> Tensor:
        """Return the numbers of the rows that step ``step`` uses."""
        return self.draw(step)[0]


@dataclass(frozen=True)
class Choice:
    """Who is drawn for a step, and with which of their records, before any of these is fetched.

    ``batch`` has no inputs and targets yet; ``numbers`` are the records to fetch, and ``counts`` how many of each
    person, if there may be several.
    """

    batch: Batch
    numbers: Tensor
    counts: Tensor | None = None

    def take(self, rows: Tensor) -> Choice:
        """Return some of the rows, in their order: the part that one of several processes fetches."""
        batch, keys = self.batch, self.batch.record_keys
        columns = {name: getattr(batch, name)[rows] for name in ("group", "owner", "record")}
        part = replace(batch, **columns, record_keys=None if keys is None else keys[rows.numpy()])
        if self.counts is None:
            return Choice(part, self.numbers[rows])
        chosen = torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, rows, True)
        return Choice(part, self.numbers[chosen.repeat_interleave(self.counts)], self.counts[rows])

    def begin(self, data: Data, sampler: PoissonSampler) -> Callable[[], Batch]:
        """Let the records be fetched, each with its own secret seed; return a function that gives the batch."""
        with seeds(partial(sampler.record_seeds, self.batch.position)):
            fetched = begun(data.by_record.fetch, self.numbers)

        def batch() -> Batch:
            inputs, targets = fetched()
            if self.counts is not None and data.persons is not None:
                inputs, targets = slotted(inputs, targets, self.counts, data.persons.most)
            return replace(self.batch, inputs=inputs, targets=targets)

        return batch


def choose(data: Data, sampler: PoissonSampler, position: int, token: int) -> Choice:
    """Return who is drawn for step ``position``.

    Of each person one record is chosen, which brings its own group; or several records of one group, see `slotted`.
    """
    rows, keys = sampler.draw(position)
    owner, numbers, counts, first = data.owner[rows], rows, None, rows
    if data.persons is not None and data.persons.most > 1:
        numbers, counts = data.persons.choose_several(rows, partial(sampler.choice_words, position))
        first = numbers[counts.cumsum(0) - counts]
    elif data.persons is not None:
        first = numbers = data.persons.choose(rows, sampler.person_words(position, rows))
    batch = Batch(None, None, data.by_record.group[first], owner, rows, position, token, keys)
    return Choice(batch, numbers, counts)


def draw(data: Data, sampler: PoissonSampler, position: int, token: int) -> Batch:
    """Return the batch of exactly the rows drawn for step ``position``, fetched with their secret seeds."""
    return choose(data, sampler, position, token).begin(data, sampler)()


def per_word(rate: float) -> int:
    """Return how many of 2^64 words draw a record of this rate; none where the rate is below ``NEVER``.

    Examples:
      >>> per_word(0.5) == 2**63, per_word(1.0) == 2**64, per_word(1e-300)
      (True, True, 0)
    """
    return int(rate * 2.0**64) if rate >= NEVER else 0


@dataclass(frozen=True)
class Coins:
    """A coin for every record that can be drawn, in the order of the records' keys; words up to ``last`` draw it."""

    order: NDArray[np.int64]
    keys: NDArray[np.uint64]
    last: NDArray[np.uint64]

    @classmethod
    def toss(cls, owner: NDArray[np.int32], rates: NDArray[np.float64], keys: NDArray[np.uint64]) -> Coins:
        """Return the coins of records with these owner classes, rates of classes, and keys of records."""
        words = [per_word(rate) for rate in rates.tolist()]
        last = np.array([max(0, count - 1) for count in words], dtype=np.uint64)
        order = np.argsort(keys)
        order = order[np.array([count > 0 for count in words])[owner[order]]]
        return cls(order, keys[order], last[owner[order]])

    def draw(self, stream: Stream, step: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the numbers of the records that step ``step`` draws, and their keys, ascending."""
        drawn = np.flatnonzero(stream.words("sampling", step, len(self.order)) <= self.last)
        return self.order[drawn], self.keys[drawn]


def costs_least_by_coins(records: int, batch: float) -> bool:
    """Return whether a coin for every record costs less than gaps and keys for the drawn ones (as measured once)."""
    return records <= min(13_500 + 32 * batch, 1 << 18)


@dataclass(frozen=True)
class Shares:
    """Coins of candidates in strata whose rates differ: ``limits`` of each class in multiples of 2^-64.

    ``owner`` is the class of every record of the data, ``rates`` and ``tops`` are those of each class and its stratum.
    ``first_bytes`` of every record's limit decide nearly all coins: they fit into the processor's cache.
    """

    owner: NDArray[np.int32]
    rates: NDArray[np.float64]
    tops: NDArray[np.float64]
    limits: NDArray[np.uint64]
    first_bytes: NDArray[np.uint8]

    @classmethod
    def of(cls, owner: NDArray[np.int32], rates: NDArray[np.float64], tops: NDArray[np.float64]) -> Shares:
        """Return the coins of all records, whose classes have these rates in strata with these largest rates."""
        most, words = [max(1, per_word(top)) for top in tops.tolist()], map(per_word, rates.tolist())
        parts = [min((word << 64) // whole, (1 << 64) - 1) for word, whole in zip(words, most, strict=True)]
        limits = np.array(parts, dtype=np.uint64)
        return cls(owner, rates, tops, limits, (limits >> np.uint64(56)).astype(np.uint8)[owner])

    def thin(self, records: NDArray[np.int64], stream: Stream, step: int, first: int) -> NDArray[np.int64]:
        """Return the candidates that pass; coins lie from cipher block ``first`` on."""
        words, bytes_of_limits = stream.words("sampling", step, len(records), first), self.first_bytes.take(records)
        first_bytes = (words >> np.uint64(56)).astype(np.uint8)
        passed, open_places = first_bytes < bytes_of_limits, np.flatnonzero(first_bytes == bytes_of_limits)
        if len(open_places):
            coins, limits = words[open_places], self.limits[self.owner[records[open_places]]]
            passed[open_places] = coins < limits
            for place in open_places[coins == limits].tolist():
                owner = self.owner[records[place]]
                share = Fraction(per_word(float(self.rates[owner])), per_word(float(self.tops[owner])))
                passed[place] = self.settles(int(words[place]), share, _more(stream, step, first, place))
        return records.compress(passed)

    @staticmethod
    def settles(word: int, share: Fraction, more: bytes) -> bool:
        """Return whether a coin that equals its limit in 64 bits is below ``share`` by its further bits.

        Examples:
          >>> Shares.settles(2**62, Fraction(1, 4), bytes(16))
          False
          >>> Shares.settles(2**64 - 1, Fraction(1), bytes([255] * 16))
          True
        """
        return Fraction((word << 128) + int.from_bytes(more, "big") + 1, 1 << 192) <= share


@dataclass(frozen=True)
class Stratum:
    """Records whose rates are near each other: candidates are drawn at the largest rate, then thinned.

    ``records`` are their numbers, ascending, or None for all ``count`` records; ``shares`` thin them, or None if all
    rates are equal; ``number`` tells which random words belong to this stratum.
    """

    number: int
    rate: float
    count: int
    records: NDArray[np.int64] | None = None
    shares: Shares | None = None

    def draw(self, stream: Stream, step: int) -> NDArray[np.int64]:
        """Return the numbers of the records that step ``step`` draws from this stratum, ascending."""
        if not per_word(self.rate):
            return np.empty(0, dtype=np.int64)
        first = self.number * _REGION
        drawn = self._by_coins(stream, step, first) if self.rate >= COINS_FROM else self._by_gaps(stream, step, first)
        if self.records is not None:
            drawn = self.records[drawn]
        return drawn if self.shares is None else self.shares.thin(drawn, stream, step, first + _THINNING)

    def _by_coins(self, stream: Stream, step: int, first: int) -> NDArray[np.int64]:
        """Return the places of the candidates by one coin for every record."""
        words = stream.words("sampling", step, self.count, first)
        return np.flatnonzero(words <= np.uint64(per_word(self.rate) - 1))

    def _by_gaps(self, stream: Stream, step: int, first: int) -> NDArray[np.int64]:
        """Return the places of the candidates by the gaps between them.

        A gap of the table's length draws nobody and goes on after it, as a coin that has no memory.
        """
        table, reached, used, places = gap_table(self.rate), -1, 0, list[NDArray[np.int64]]()
        pace = -math.expm1(len(table) * math.log1p(-self.rate)) / self.rate
        while reached < self.count - 1:
            expected = (self.count - 1 - reached) / pace
            count = 2 * math.ceil(expected / 2 + 3 * math.sqrt(expected) + 4)
            words = stream.words("sampling", step, count, first + used // 2)
            gaps = look_up(self.rate, words)
            for place in np.flatnonzero((gaps > 0) & (table[gaps - 1] == words)).tolist():
                more = _more(stream, step, first, used + place)
                gaps[place] = settle_tie(self.rate, int(words[place]), int(gaps[place]), more)
            hits = gaps < len(table)
            ends = np.cumsum(gaps + hits) + reached
            places.append(ends[hits])
            reached, used = int(ends[-1]), used + count
        candidates = places[0] if len(places) == 1 else np.concatenate(places)
        return candidates[: np.searchsorted(candidates, self.count)]


def _more(stream: Stream, step: int, first: int, place: int) -> bytes:
    """Return 128 further bits of a word, the ``place``-th from cipher block ``first`` on: a block for it alone."""
    return stream.words("sampling", step, 2, first + _TIES + place).tobytes()


@functools.lru_cache(maxsize=64)
def gap_table(rate: float) -> NDArray[np.uint64]:
    """Return floor(2^64 (1 - (1 - p)^k)) for k = 1, 2, 3 ..., where p is ``rate`` rounded down to a multiple of 2^-64.

    A word above the k-th entry skips at least k records, one below it fewer; one equal to it needs ``settle_tie``.

    Examples:
      >>> [round(float(word) / 2**64, 4) for word in gap_table(0.5)]
      [0.5, 0.75, 0.875, 0.9375, 0.9688]
    """
    length = LONGEST_GAP if rate * LONGEST_GAP < REACH else math.ceil(REACH / rate)
    stay, left, words = (1 << 64) - per_word(rate), 1 << 128, list[int]()
    for number in range(1, length + 1):
        left = left * stay >> 64
        passed = (1 << 128) - left  # at most ``number`` above 2^128 (1 - (1 - p)^number)
        surely = passed % (1 << 64) >= number
        words.append(passed >> 64 if surely else threshold(rate, number, bits=64))
    table = np.array(words, dtype=np.uint64)
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=64)
def gap_guide(rate: float) -> tuple[NDArray[np.uint16], NDArray[np.uint64], int]:
    """Return where in the gap table words with equal first bits begin, the table with largest words behind it, and how
    many entries share their first bits at most.

    Examples:
      >>> begins, table, furthest = gap_guide(0.125)
      >>> len(begins) == 2**GUIDED, len(table) == len(gap_table(0.125)) + furthest, furthest
      (True, True, 1)
    """
    table, first = gap_table(rate), np.arange(1 << GUIDED, dtype=np.uint64) << np.uint64(64 - GUIDED)
    begins = np.searchsorted(table, first, side="right")
    furthest = int(np.diff(begins, append=len(table)).max())
    return begins.astype(np.uint16), np.append(table, np.full(furthest, (1 << 64) - 1, dtype=np.uint64)), furthest


def look_up(rate: float, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many entries of the gap table are at most each word; comparisons are of whole words, so exact.

    Examples:
      >>> words = np.array([0, 2**61, 2**62, 2**64 - 1], dtype=np.uint64)
      >>> look_up(0.125, words).tolist() == np.searchsorted(gap_table(0.125), words, side="right").tolist()
      True
    """
    begins, table, furthest = gap_guide(rate)
    if furthest > FURTHEST:
        return np.searchsorted(gap_table(rate), words, side="right")
    gaps = begins[(words >> np.uint64(64 - GUIDED)).astype(np.int64)].astype(np.int64)
    for _ in range(furthest):
        gaps += table[gaps] <= words
    return np.minimum(gaps, len(table) - furthest)


def threshold(rate: float, gap: int, bits: int) -> int:
    """Return floor(2^bits (1 - (1 - p)^gap)), in whole numbers without any rounding.

    Examples:
      >>> threshold(0.125, 2, bits=6) == 64 - 49
      True
    """
    stay: int = ((1 << 64) - per_word(rate)) ** gap
    return (1 << bits) - (-(-(stay << bits) >> (64 * gap)))


def settle_tie(rate: float, word: int, gap: int, more: bytes) -> int:
    """Return how many records a word skips that equals the table's entry of ``gap``: the further bits decide.

    Examples:
      >>> word = int(gap_table(0.1)[2])
      >>> settle_tie(0.1, word, 3, bytes(16)), settle_tie(0.1, word, 3, bytes([255] * 16))
      (2, 3)
    """
    return gap if (word << 128) + int.from_bytes(more, "big") >= threshold(rate, gap, bits=192) else gap - 1


def stratify(owner: NDArray[np.int32], rates: NDArray[np.float64]) -> tuple[Stratum, ...]:
    """Return the strata of records with these owner classes: few, each with few candidates that are drawn in vain."""
    sizes = np.bincount(owner, minlength=len(rates))
    members = merge_classes(rates, sizes, np.flatnonzero(sizes))
    place, tops = np.empty(len(rates), dtype=np.int64), rates.copy()
    for number, classes in enumerate(members):
        place[classes], tops[classes] = number, rates[classes].max()
    differ = [bool(per_word(tops[classes[0]]) and np.ptp(rates[classes]) > 0) for classes in members]
    shares = Shares.of(owner, rates, tops) if any(differ) else None
    of_record, strata = place[owner] if len(members) > 1 else None, list[Stratum]()
    for number, classes in enumerate(members):
        records = None if of_record is None else np.flatnonzero(of_record == number)
        count, top = len(owner) if records is None else len(records), float(tops[classes[0]])
        strata.append(Stratum(number, top, count, records, shares if differ[number] else None))
    return tuple(strata)


def merge_classes(
    rates: NDArray[np.float64], sizes: NDArray[np.int64], present: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return the classes of each stratum: rates within a factor of two, merged where a stratum costs more.

    Examples:
      >>> rates, all_of_them = np.array([0.1, 0.001, 0.09]), np.arange(3)
      >>> [classes.tolist() for classes in merge_classes(rates, np.array([100, 10**7, 100]), all_of_them)]
      [[0, 2], [1]]
      >>> [classes.tolist() for classes in merge_classes(rates, np.array([100, 1000, 100]), all_of_them)]
      [[0, 1, 2]]
    """
    with np.errstate(divide="ignore"):
        octave = np.where(rates > 0, np.floor(np.log2(rates)), -np.inf)
    merged: list[NDArray[np.int64]] = []
    for each in np.unique(octave[present])[::-1]:
        classes = present[octave[present] == each]
        if merged:
            top = rates[merged[-1]].max()
            if float((sizes[classes] * (top - rates[classes])).sum()) < _STRATUM_COST:
                merged[-1] = np.sort(np.concatenate([merged[-1], classes]))
                continue
        merged.append(classes)
    return merged
