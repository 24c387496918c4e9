"""Computes how sure a mean over replicas is: training, split and held-out records all vary, and groups are many.

A replica is one training with its own noise, start, samples and, where splits are resampled, its own split. Two things
make the textbook interval ``s^2 / R`` too narrow. Where all replicas share one split, their spread does not hold the
chance of the held-out records, so that is added. Where splits are resampled, replicas share training and held-out
records, so the variance is ``s^2 (1/R + n_test/n_train)`` (Nadeau and Bengio 2003).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenhand.reporting.group_metrics import Estimate

LEVEL = 0.95
_NORMAL = 100
"""Replicas above which the normal distribution stands for the noncentral t, which scipy loses there."""
FEWEST = 20
"""Held-out records that a group needs to be named in a headline; below it stands "too few to tell"."""


@dataclass(frozen=True)
class Split:
    """How replicas were split: ``ratio`` is held-out over training records if splits were resampled, None if fixed."""

    ratio: float | None = None


class _Spread(NamedTuple):
    """A mean with its variance and the degrees of freedom of that variance."""

    mean: float
    variance: float
    freedom: float


def over_replicas(
    values: Sequence[float],
    records: int,
    split: Split,
    *,
    level: float = LEVEL,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Estimate:
    """Return the mean of a share over replicas, with an interval that holds training and held-out randomness.

    Args:
        values: the share in each replica, for example accuracy.
        records: distinct held-out records behind all values.
        split: whether every replica had a split of its own.
        level: how often such intervals hold the truth.
        bounds: values beyond these are not possible.

    Returns:
        The estimate; ``count`` is the number of records. The interval never has width zero: four records that were all
        right say little. One replica on its own says nothing about other trainings: its interval is of this model.

    Examples:
        >>> four = over_replicas([1.0, 1.0, 1.0], records=4, split=Split())
        >>> round(four.low, 2), four.high
        (0.33, 1.0)
        >>> many = over_replicas([0.80, 0.82, 0.78], records=1000, split=Split(0.25))
        >>> round(many.low, 3), round(many.high, 3)
        (0.733, 0.865)
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known or records < 1:
        return Estimate(math.nan, math.nan, math.nan, 0)
    spread = _spread(known, share_variance(_mean(known), records), split)
    half = _quantile((1 + level) / 2, spread.freedom) * math.sqrt(spread.variance)
    centre, (low, high) = _shrunk(spread.mean, records), bounds
    return Estimate(spread.mean, max(low, centre - half), min(high, max(spread.mean, centre + half)), records)


def of_values(
    values: Sequence[float],
    chance: float,
    records: int,
    split: Split,
    *,
    level: float = LEVEL,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return the mean of any measure over replicas, with its interval, where the variance by records is given.

    Args:
        values: the measure in each replica, in any unit; values that are not finite are left out.
        chance: the variance that the held-out records alone give the mean, in the unit of ``values`` squared.
        records: held-out records, for ``count`` of the estimate.
        split: whether every replica had a split of its own.
        level: how often such intervals hold the truth.
        bounds: values beyond these are not possible.

    Returns:
        The estimate; its ends are NaN where nothing is known about how sure it is, never an interval of width zero.

    Examples:
        >>> cost = of_values([4.0, 5.0, 6.0], chance=1.0, records=500, split=Split())
        >>> cost.value, round(cost.low, 1), round(cost.high, 1)
        (5.0, 2.6, 7.4)
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Estimate(math.nan, math.nan, math.nan, 0)
    spread = _spread(known, chance, split)
    if spread.variance == 0:
        return Estimate(spread.mean, math.nan, math.nan, records)
    half = _quantile((1 + level) / 2, spread.freedom) * math.sqrt(spread.variance)
    return Estimate(spread.mean, max(bounds[0], spread.mean - half), min(bounds[1], spread.mean + half), records)


def difference(
    left: Sequence[float],
    right: Sequence[float],
    records: int,
    split: Split,
    *,
    level: float = LEVEL,
    right_records: int | None = None,
) -> Estimate:
    """Return the mean of ``left - right``, paired by replica, with its interval.

    Args:
        left: the share in each replica.
        right: the share to compare with, in the same order.
        records: distinct held-out records behind ``left``, and behind ``right`` if both saw the same ones.
        split: whether every replica had a split of its own.
        level: how often such intervals hold the truth.
        right_records: the records behind ``right`` if they are others, as between two groups.

    Examples:
        >>> better = difference([0.9, 0.92, 0.91], [0.8, 0.83, 0.8], records=2000, split=Split())
        >>> round(better.value, 3), better.low > 0
        (0.1, True)
    """
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not pairs or min(records, right_records or records) < 1:
        return Estimate(math.nan, math.nan, math.nan, 0)
    spread = _difference([a for a, _ in pairs], [b for _, b in pairs], records, right_records, split)
    half = _quantile((1 + level) / 2, spread.freedom) * math.sqrt(spread.variance)
    return Estimate(spread.mean, spread.mean - half, spread.mean + half, min(records, right_records or records))


def named_group(
    values: Mapping[str, Sequence[float]],
    records: Mapping[str, int],
    split: Split,
    *,
    lowest: bool = True,
    level: float = LEVEL,
    fewest: int = FEWEST,
    chances: Mapping[str, float] | None = None,
) -> str | None:
    """Return the group that may be called worst (or highest): the one that differs from every other; None if none does.

    Guarantee:
        Where no group differs from the others, some group is named with probability at most ``1 - level``: each of G
        groups is compared at ``(1 - level) / G``, and must be told apart from all others. Groups with fewer than
        ``fewest`` records are neither named nor compared with.

    A replica in which a group has no value is NaN. ``chances`` is the variance by records where values are no shares.

    Examples:
        >>> shares = {"a": [0.9, 0.91, 0.9], "b": [0.9, 0.9, 0.92], "c": [0.6, 0.62, 0.58]}
        >>> named_group(shares, {"a": 500, "b": 400, "c": 300}, Split())
        'c'
        >>> named_group(shares, {"a": 500, "b": 400, "c": 10}, Split()) is None
        True
    """
    large = [name for name in values if records.get(name, 0) >= fewest]
    if len(large) < 2:
        return None
    sign = 1 if lowest else -1
    means = {name: _mean([value for value in values[name] if math.isfinite(value)] or [math.nan]) for name in large}
    if not all(map(math.isfinite, means.values())):
        return None
    candidate = min(large, key=lambda name: sign * means[name])
    alone = 1 - (1 - level) / len(large)
    known = chances or {name: share_variance(means[name], records[name]) for name in large}
    for other in large:
        if other == candidate:
            continue
        pairs = zip(values[other], values[candidate], strict=True)
        apart = [a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        if not apart:
            return None
        spread = _spread(apart, known[other] + known[candidate], split)
        if sign * spread.mean <= _quantile(alone, spread.freedom) * math.sqrt(spread.variance):
            return None
    return candidate


def power(
    effect: float, deviation: float, replicas: int, split: Split, *, level: float = LEVEL, chance: float = 0.0
) -> float:
    """Return how likely ``replicas`` trainings tell an effect of this size from zero.

    Args:
        effect: the true difference, in the unit of ``deviation``.
        deviation: standard deviation over replicas of what is compared, for example of paired differences.
        replicas: trainings, at least 2.
        split: whether every replica had a split of its own.
        level: of the two-sided interval that must not hold zero.
        chance: the variance that the held-out records alone give the mean.

    Examples:
        >>> round(power(1.0, 2.0, 40, Split()), 2), round(power(1.0, 2.0, 40, Split(), chance=1.0), 2)
        (0.87, 0.16)
    """
    from scipy.special import ndtr
    from scipy.stats import nct

    variance, freedom = _variance(deviation**2, replicas, chance, split)
    if variance == 0:
        return 1.0 if effect else 1 - level
    needed = _quantile((1 + level) / 2, freedom)
    shift = abs(effect) / math.sqrt(variance)
    if freedom >= _NORMAL:
        return float(ndtr(shift - needed) + ndtr(-shift - needed))
    return float(nct.sf(needed, freedom, shift) + nct.cdf(-needed, freedom, shift))


def replicas_for(
    effect: float,
    deviation: float,
    split: Split,
    *,
    wanted: float = 0.85,
    level: float = LEVEL,
    most: int = 10_000,
    chance: float = 0.0,
) -> int | None:
    """Return the fewest trainings that find the effect with probability ``wanted``; None if ``most`` do not.

    The variance has a floor that no number of replicas lowers, by ``chance`` or by resampled splits: more data are
    needed then.

    Examples:
        >>> replicas_for(1.0, 2.0, Split()), replicas_for(0.1, 2.0, Split(0.25))
        (38, None)
    """
    if power(effect, deviation, most, split, level=level, chance=chance) < wanted:
        return None
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        enough = power(effect, deviation, middle, split, level=level, chance=chance) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def verdict(low: float, high: float, margin: float) -> str:
    """Return what an interval of a claimed gain says, where ``margin`` is the smallest gain that matters.

    Examples:
        >>> [verdict(*ends, 1.0) for ends in ((0.2, 3.0), (-0.5, 0.5), (-3.0, 0.5), (-1.0, 2.0))]
        ['holds', 'too small to matter', 'does not hold', 'not decided']
    """
    if not math.isfinite(low) or not math.isfinite(high):
        return "not decided"
    if -margin < low and high < margin:
        return "too small to matter"
    if high < margin:
        return "does not hold"
    return "holds" if low > 0 else "not decided"


def share_variance(share: float, records: int) -> float:
    """Return the variance that so many held-out records give a share; it is never zero.

    Examples:
        >>> round(share_variance(1.0, 4), 4), round(share_variance(0.8, 1000), 6)
        (0.0469, 0.000161)
    """
    likely = _shrunk(min(1.0, max(0.0, share)), records)
    return likely * (1 - likely) / records


def distinct(held_out: float, replicas: int, split: Split) -> int:
    """Return how many different records are behind all replicas, each of which holds out about ``held_out``.

    Examples:
        >>> distinct(100, 5, Split()), distinct(100, 2, Split(1.0)), distinct(100, 50, Split(0.25))
        (100, 150, 500)
    """
    if split.ratio is None:
        return round(held_out)
    share = split.ratio / (1 + split.ratio)
    return round(held_out / share * (1 - (1 - share) ** replicas))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _shrunk(share: float, records: int) -> float:
    """Return the share after two records of each kind were added (Agresti and Coull 1998)."""
    return (share * records + 2) / (records + 4)


def _difference(
    left: Sequence[float], right: Sequence[float], records: int, right_records: int | None, split: Split
) -> _Spread:
    """Return the spread of paired differences; the chances of both sides' records add up, an upper bound if shared."""
    both = share_variance(_mean(left), records) + share_variance(_mean(right), right_records or records)
    return _spread([a - b for a, b in zip(left, right, strict=True)], both, split)


def _spread(values: Sequence[float], chance: float, split: Split) -> _Spread:
    """Return mean and variance of replicas whose held-out records alone would give the variance ``chance``.

    With one split the variances of training and of records add up (degrees of freedom by Welch and Satterthwaite). With
    resampled splits the corrected variance holds both; it is held to at least ``chance``, which a spread of zero or of
    two values may miss.
    """
    mean, count = _mean(values), len(values)
    if count == 1:
        return _Spread(mean, chance, math.inf)
    sample = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return _Spread(mean, *_variance(sample, count, chance, split))


def _variance(sample: float, count: int, chance: float, split: Split) -> tuple[float, float]:
    """Return the variance of a mean of ``count`` replicas that vary by ``sample``, and its degrees of freedom."""
    if split.ratio is None:
        training = sample / count
        total = training + chance
        return total, math.inf if training == 0 else (count - 1) * (total / training) ** 2
    corrected = sample * (1 / count + split.ratio)
    return (chance, math.inf) if corrected < chance else (corrected, count - 1)


def _quantile(probability: float, freedom: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(freedom) else stdtrit(freedom, probability))
