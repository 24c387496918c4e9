"""Simulated studies that draw fresh data sets: people in groups, trainings that serve them, and two methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from evenhand.reporting.uncertainty import Split

STUDIES = 400
MOST = int(binom.ppf(0.99, STUDIES, 0.05))
"""False findings in 400 studies at 5 %: 99 % of honest methods have at most so many."""


@dataclass(frozen=True)
class Study:
    """One simulated study: a population of people in groups, and trainings that serve each with some probability."""

    records: tuple[int, ...]
    replicas: int
    resampled: bool
    shares: tuple[float, ...]
    between: float
    seed: int

    def run(self) -> tuple[dict[str, list[float]], dict[str, int], Split]:
        """Return every group's accuracy by replica, its distinct held-out records, and how splits were drawn.

        A record has a difficulty of its own that all trainings share; every training moves all groups together and
        each by itself. Half of all records are held out; resampled splits hold out another half each time.
        """
        rng = np.random.default_rng(self.seed)
        values: dict[str, list[float]] = {}
        together = rng.normal(0, self.between, self.replicas)
        for place, (size, share) in enumerate(zip(self.records, self.shares, strict=True)):
            strength = 4.0
            easy = rng.beta(share * strength, (1 - share) * strength, 2 * size)
            alone = rng.normal(0, self.between, self.replicas)
            first = rng.permutation(2 * size)[:size]
            group = []
            for replica in range(self.replicas):
                rows = rng.permutation(2 * size)[:size] if self.resampled else first
                likely = np.clip(easy[rows] + together[replica] + alone[replica], 0, 1)
                group.append(float((rng.random(size) < likely).mean()))
            values[f"group {place}"] = group
        sizes = {f"group {place}": size * (2 if self.resampled else 1) for place, size in enumerate(self.records)}
        return values, sizes, Split(1.0 if self.resampled else None)


def studies(*, gap: float = 0.0) -> Iterator[Study]:
    """Four hundred studies of 2 to 20 groups with 5 to 2,000 records each and 2 to 50 seeds."""
    rng = np.random.default_rng(7)
    for number in range(STUDIES):
        groups = int(rng.integers(2, 21))
        records = tuple(np.exp(rng.uniform(np.log(5), np.log(2000), groups)).astype(int).tolist())
        share = float(rng.uniform(0.55, 0.95))
        shares = (share - gap, *([share] * (groups - 1)))
        replicas = int(np.exp(rng.uniform(np.log(2), np.log(50.99))))
        yield Study(records, replicas, bool(number % 2), shares, float(rng.uniform(0.0, 0.03)), number)


@dataclass(frozen=True)
class Methods:
    """Two methods on the same records: one is better by ``gain``."""

    gain: float
    replicas: int
    seed: int

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        easy = rng.beta(3, 1, 4000)
        left, right = np.empty(self.replicas), np.empty(self.replicas)
        for replica in range(self.replicas):
            rows = rng.permutation(4000)[:1000]
            noise = rng.normal(0, 0.02, 2)
            left[replica] = (rng.random(1000) < np.clip(easy[rows] + self.gain + noise[0], 0, 1)).mean()
            right[replica] = (rng.random(1000) < np.clip(easy[rows] + noise[1], 0, 1)).mean()
        return left, right
