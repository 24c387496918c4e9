"""Draws by gaps: exact against rational arithmetic where words leave a choice open, and by statistics elsewhere."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from evenhand.errors import UsageError
from evenhand.mechanism import sampling
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import (
    COINS_FROM,
    FURTHEST,
    LONGEST_GAP,
    NEVER,
    Coins,
    PoissonSampler,
    Shares,
    Stratum,
    costs_least_by_coins,
    gap_guide,
    gap_table,
    look_up,
    per_word,
    settle_tie,
    stratify,
    threshold,
)

STREAM = Stream.insecure(seed=2, segment=0)
WORDS = 1 << 64


class Scripted:
    """A stream whose words of a draw are given, and whose further bits are all zeros or all ones."""

    def __init__(self, words: Sequence[int], more: int = 0) -> None:
        self._words, self._more = np.array(words, dtype=np.uint64), more

    def words(self, domain: str, step: int, count: int, first: int = 0) -> np.ndarray:
        if first >= 1 << 38:
            return np.full(count, self._more, dtype=np.uint64)
        return np.resize(self._words, count)


def exact_gap(rate: float, word: int, more: int) -> int:
    """Return how many records a uniform number of 192 bits skips, by rational arithmetic alone."""
    uniform, stay, skipped = Fraction((word << 128) + more, 1 << 192), 1 - Fraction(per_word(rate), WORDS), 0
    left = stay
    while uniform >= 1 - left and skipped < len(gap_table(rate)):
        skipped, left = skipped + 1, left * stay
    return skipped


@pytest.mark.parametrize("rate", [0.1249, 0.1, 1 / 3 / 64, 1e-3, 1e-4, 1e-9, 2.0**-40, 4e-19])
def test_the_table_holds_the_exact_distribution_of_gaps(rate: float) -> None:
    table = gap_table(rate)
    assert 1 <= len(table) <= LONGEST_GAP
    assert (np.diff(table.astype(object)) > 0).all()
    for gap in {1, 2, 3, len(table) // 2, len(table)} - {0}:
        assert int(table[gap - 1]) == threshold(rate, gap, bits=64)
        exact = (1 - (1 - Fraction(per_word(rate), WORDS)) ** gap) * WORDS
        assert int(table[gap - 1]) == exact.numerator // exact.denominator


@pytest.mark.parametrize("rate", [0.1, 1 / 3 / 64, 0.003])
def test_words_at_the_edge_of_a_gap_are_settled_by_further_bits_exactly(rate: float) -> None:
    table, random = gap_table(rate), np.random.default_rng(0)
    for gap in (1, 2, 5, len(table)):
        edge = threshold(rate, gap, bits=192) & ((1 << 128) - 1)
        around = [0, edge - 1, edge, edge + 1, (1 << 128) - 1, int.from_bytes(random.bytes(16), "big")]
        for more in {min(max(bits, 0), (1 << 128) - 1) for bits in around}:
            word, settled = int(table[gap - 1]), settle_tie(rate, int(table[gap - 1]), gap, more.to_bytes(16, "big"))
            if more != edge or gap <= 3:  # beyond, 192 bits do not hold the edge: the larger gap is taken
                assert settled == exact_gap(rate, word, more)
            else:
                assert settled == gap == exact_gap(rate, word, more) + 1


@pytest.mark.parametrize("rate", [0.124, 0.01, 1e-3, 1e-4, 1e-7])
def test_looking_up_a_gap_by_first_bits_gives_what_a_binary_search_does(rate: float) -> None:
    table, random = gap_table(rate), np.random.default_rng(1)
    edges = np.concatenate([table - np.uint64(1), table, table + np.uint64(1)])
    few = np.array([0, 1, WORDS - 2, WORDS - 1], dtype=np.uint64)
    words = np.concatenate([edges, few, random.integers(0, WORDS, 20_000, dtype=np.uint64)])
    assert np.array_equal(look_up(rate, words), np.searchsorted(table, words, side="right"))
    assert gap_guide(rate)[2] <= FURTHEST or rate == 1e-7


def test_a_word_of_a_draw_that_equals_the_table_asks_for_further_bits() -> None:
    table = gap_table(0.1)
    for word, low, high in ((int(table[0]), 1, 1), (int(table[1]), 1, 2), (int(table[2]), 2, 3)):
        first = [
            int(Stratum(0, 0.1, 50).draw(Scripted([word], more), 0)[0])
            for more in (0, WORDS - 1)  # type: ignore[arg-type]
        ]
        assert first == [low, high]


def test_every_word_has_further_bits_of_its_own_also_where_a_draw_asks_for_more_words() -> None:
    asked = list[int]()

    class Open(Scripted):
        """A stream all of whose words are ties that skip one record, so that a draw asks for more and more words."""

        def words(self, domain: str, step: int, count: int, first: int = 0) -> np.ndarray:
            asked.extend([first] * (first >= 1 << 38))
            return super().words(domain, step, count, first)

    drawn = Stratum(0, 0.01, 3_000).draw(Open([int(gap_table(0.01)[1])]), 0)  # type: ignore[arg-type]
    assert drawn.tolist() == list(range(1, 3_000, 2))
    assert len(asked) > 1_500 > 10 * 0.01 * 3_000, "several rounds"
    assert len(set(asked)) == len(asked)


def test_classes_without_records_and_rates_outside_of_0_and_1() -> None:
    owner = torch.ones(200_000, dtype=torch.long)
    assert 100 < len(PoissonSampler(owner, [0.1, 0.001], STREAM).rows(0)) < 300
    for rate in (1.5, -0.1, float("nan")):
        with pytest.raises(UsageError, match="between 0 and 1"):
            PoissonSampler(owner, [0.1, rate], STREAM)


def test_writing_into_the_owners_later_changes_no_draw() -> None:
    owner = torch.zeros(200_000, dtype=torch.long)
    sampler = PoissonSampler(owner, [0.001, 0.002], STREAM)
    before = sampler.rows(3).tolist()
    owner.fill_(1)
    assert sampler.rows(3).tolist() == before


def test_a_coin_that_equals_its_limit_asks_for_further_bits() -> None:
    owner, rates = np.array([0, 1]), np.array([0.3, 0.9])
    shares = Shares.of(owner, rates, np.array([0.9, 0.9]))
    limit = int(shares.limits[0])
    assert limit == per_word(0.3) * WORDS // per_word(0.9)
    for words, more, passed in (([limit], 0, [0]), ([limit], WORDS - 1, []), ([limit - 1], WORDS - 1, [0])):
        assert shares.thin(np.array([0]), Scripted(words, more), 0, 0).tolist() == passed  # type: ignore[arg-type]
    assert shares.thin(np.array([1]), Scripted([WORDS - 1], WORDS - 1), 0, 0).tolist() == [1]  # type: ignore[arg-type]


def test_words_decide_by_gaps_what_a_coin_for_every_record_would() -> None:
    """Rebuild a draw from its words with plain loops: places are sums of gaps, and the longest gap draws nobody."""
    rate, count = 0.01, 5_000
    stratum, table = Stratum(3, rate, count), gap_table(rate)
    drawn, reached, block = list[int](), -1, 3 << 40
    while reached < count - 1:
        words = STREAM.words("sampling", 7, 2, block)
        for word in words.tolist():
            gap = sum(word >= int(entry) for entry in table)
            reached += gap if gap == len(table) else gap + 1
            if gap < len(table) and reached < count:
                drawn.append(reached)
        block += 1
    assert stratum.draw(STREAM, 7).tolist() == drawn


def by_gaps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampling, "costs_least_by_coins", lambda records, batch: False)


def drawn_often(owner: torch.Tensor, rates: Sequence[float], steps: int) -> np.ndarray:
    sampler, table = PoissonSampler(owner, rates, STREAM), np.zeros((steps, len(owner)), dtype=bool)
    for step in range(steps):
        table[step, sampler.rows(step).numpy()] = True
    return table


def test_gaps_draw_each_record_and_each_pair_at_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    by_gaps(monkeypatch)
    rates = [0.04, 0.06, 0.11, 0.4]
    owner = torch.arange(24) % 4
    table = drawn_often(owner, rates, 20_000)
    of_record = np.array(rates)[owner.numpy()]
    for column, rate in zip(table.T, of_record, strict=True):
        assert stats.binomtest(int(column.sum()), len(table), rate).pvalue > 1e-6
    for one in range(24):
        for two in range(one):
            both = int((table[:, one] & table[:, two]).sum())
            assert stats.binomtest(both, len(table), of_record[one] * of_record[two]).pvalue > 1e-7
    after = int((table[1:] & table[:-1]).sum())
    assert stats.binomtest(after, (len(table) - 1) * 24, float((of_record**2).mean())).pvalue > 1e-6


def test_strata_hold_every_record_once_and_no_rate_above_their_own() -> None:
    owner, rates = np.arange(60_000) % 5_000, np.geomspace(1e-6, 0.9, 5_000)
    rates[17] = 0.0
    strata = stratify(owner, rates)
    assert 1 < len(strata) < 30
    assert sorted(np.concatenate([stratum.records for stratum in strata if stratum.records is not None])) == [
        *range(60_000)
    ]
    for stratum in strata:
        assert stratum.records is not None
        assert rates[owner[stratum.records]].max() == stratum.rate
    drawn = [np.concatenate([stratum.draw(STREAM, step) for stratum in strata]) for step in range(200)]
    counts = np.bincount(owner[np.concatenate(drawn)], minlength=5_000)
    assert counts[17] == 0
    expected = 200 * 12 * rates
    deciles = np.array_split(np.arange(5_000), 10)
    observed, wanted = [counts[part].sum() for part in deciles], [expected[part].sum() for part in deciles]
    assert all(stats.poisson.sf(seen - 1, mean) > 1e-6 for seen, mean in zip(observed, wanted, strict=True))
    assert all(stats.poisson.cdf(seen, 1.01 * mean) > 1e-6 for seen, mean in zip(observed[:8], wanted[:8], strict=True))


def test_candidates_pass_by_their_whole_words_whatever_their_first_bytes() -> None:
    """The first byte decides nearly all coins; words close to their limits, and limits of one byte, must not differ."""
    random, count = np.random.default_rng(4), 4_000
    rates = random.choice(np.concatenate([random.uniform(0.5, 1, 50), [0.5, 1 - 2.0**-30, 1.0, 1e-9]]), 300) * 1e-3
    owner = random.integers(0, 300, count).astype(np.int32)
    shares = Shares.of(owner, rates, np.full(300, rates.max()))
    limits = [int(limit) for limit in shares.limits[owner]]
    near = [int(random.choice([-1, 1])) * int(random.integers(1, 1 << int(random.integers(1, 60)))) for _ in limits]
    words = [min(max(limit + by, 0), WORDS - 1) for limit, by in zip(limits, near, strict=True)]
    passed = shares.thin(np.arange(count), Scripted(words), 0, 0)  # type: ignore[arg-type]
    wanted = [place for place in range(count) if words[place] < limits[place]]
    assert 1_000 < len(wanted) < 3_500
    assert sum(word >> 56 == limit >> 56 for word, limit in zip(words, limits, strict=True)) > 1_000
    assert [place for place in passed.tolist() if words[place] != limits[place]] == wanted


def test_strata_share_what_they_keep_of_every_record() -> None:
    random, rates = np.random.default_rng(5), np.array([0.1, 0.09, 0.01, 0.009, 0.001, 0.001])
    owner = random.choice(6, 300_000).astype(np.int32)
    shares = [stratum.shares for stratum in stratify(owner, rates)]
    assert shares[0] is shares[1] is not None
    assert shares[2] is None


def test_coins_and_gaps_use_one_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's probability must not depend on how many others there are, so all ways share one rounding."""
    for rate in (0.3, 1 / 3, 0.01, 1e-12):
        coins = Coins.toss(np.zeros(3, dtype=np.int64), np.array([rate]), np.arange(3, dtype=np.uint64))
        assert {int(last) + 1 for last in coins.last} == {per_word(rate)} == {threshold(rate, 1, bits=64)}
        assert 0 <= Fraction(rate) - Fraction(per_word(rate), WORDS) < Fraction(1, WORDS)
    owner = np.array([0, 1])
    shares = Shares.of(owner, np.array([1 / 3, 0.9]), np.array([0.9, 0.9]))
    thinned = Fraction(int(shares.limits[0]), WORDS) * Fraction(per_word(0.9), WORDS)
    assert 0 <= Fraction(per_word(1 / 3), WORDS) - thinned < Fraction(1, WORDS)


@pytest.mark.parametrize("gaps", [False, True])
def test_the_ends_of_the_rates(gaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if gaps:
        by_gaps(monkeypatch)
    owner = torch.arange(3_000) % 4
    sampler = PoissonSampler(owner, [0.0, 1.0, 5e-324, NEVER / 2], STREAM)
    for step in range(5):
        assert sorted(sampler.rows(step).tolist()) == [*range(1, 3_000, 4)]


def test_a_draw_costs_memory_of_the_batch() -> None:
    sampler = PoissonSampler(torch.zeros(1_000_000, dtype=torch.long), [1e-3], STREAM)
    sampler.rows(0)
    tracemalloc.start()
    rows = sampler.rows(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 800 < len(rows) < 1_200
    assert peak < 300_000


def test_few_records_and_large_shares_are_drawn_by_coins() -> None:
    assert all(costs_least_by_coins(10_000, batch) for batch in (1, 64, 256, 1_024))
    assert not costs_least_by_coins(60_000, 512)
    assert not costs_least_by_coins(10_000_000, 1_000_000)
    assert COINS_FROM < 1


@pytest.mark.slow
def test_a_hundred_million_drawn_records_are_uniform_and_uncorrelated() -> None:
    """Chi-square over places and over gaps, and autocorrelation of counts, over 10^8 drawn records."""
    count, rate, parts = 10_000_000, 0.01, 1_000
    sampler, places, batch_sizes = (
        PoissonSampler(torch.zeros(count, dtype=torch.long), [rate], STREAM),
        np.zeros(parts),
        [],
    )
    gap_counts, lagged = np.zeros(400), 0.0
    for step in range(1_000):
        rows = np.sort(sampler.rows(step).numpy())
        by_part = np.bincount(rows * parts // count, minlength=parts)
        places += by_part
        batch_sizes.append(len(rows))
        gap_counts += np.bincount(np.minimum(np.diff(rows) - 1, 399), minlength=400)
        centred = by_part - count / parts * rate
        lagged += float((centred[1:] * centred[:-1]).sum())
    assert places.sum() > 99_000_000
    assert stats.chisquare(places).pvalue > 1e-6
    expected = np.append(rate * (1 - rate) ** np.arange(399), (1 - rate) ** 399) * gap_counts.sum()
    assert stats.chisquare(gap_counts, expected).pvalue > 1e-6
    variance = count / parts * rate * (1 - rate)
    assert abs(lagged) < 5 * variance * np.sqrt(1_000 * (parts - 1))
    sizes = (np.array(batch_sizes) - count * rate) / np.sqrt(count * rate * (1 - rate))
    assert stats.kstest(sizes, "norm").pvalue > 1e-6
    assert abs(float((sizes[1:] * sizes[:-1]).mean())) < 5 / np.sqrt(999)
