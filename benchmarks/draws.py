"""Time and memory of one Poisson draw: `python benchmarks/draws.py` prints a row for each size of the data.

"coins" is a coin for every record; "many" has 50,000 distinct rates, from half to one and a half times the mean.
All of a row take turns in one process; figures are medians in microseconds.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch

from evenhand.mechanism import sampling
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler

SIZES = ((10_000, 64), (10_000, 256), (10_000, 1_024), (60_000, 512), (1_000_000, 1_024), (10_000_000, 1_024))
RATES = 50_000


def samplers(records: int, batch: int) -> dict[str, PoissonSampler]:
    """Return the samplers that are compared; that of coins only where it fits into memory easily."""
    nobody, rate = torch.zeros(records, dtype=torch.long), batch / records
    shares = np.random.default_rng(0).uniform(0.5, 1.5, RATES)
    several = (shares / shares.mean() * rate).tolist()
    chosen = {"now": PoissonSampler(nobody, [rate], Stream.insecure(0, 0))}
    if records >= RATES:
        chosen["many"] = PoissonSampler(torch.arange(records) % RATES, several, Stream.insecure(0, 0))
    if records <= 1_000_000:
        before = sampling.costs_least_by_coins
        sampling.costs_least_by_coins = lambda records, batch: True
        chosen["coins"] = PoissonSampler(nobody, [rate], Stream.insecure(0, 0))
        sampling.costs_least_by_coins = before
    return chosen


def microseconds(draws: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each draw; they take turns, each after an untimed one that fills the caches."""
    times: dict[str, list[float]] = {name: [] for name in draws}
    for step in range(rounds):
        for name, draw in draws.items():
            draw(rounds + step)
            start = time.perf_counter()
            draw(step)
            times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(column) for name, column in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'records':>12} {'batch':>6} {'now':>8} {'coins':>8} {'many':>8} {'peak MB':>8}")
    for records, batch in SIZES:
        chosen = samplers(records, batch)
        times = microseconds({name: one.rows for name, one in chosen.items()}, 300)
        tracemalloc.start()
        chosen["now"].rows(1)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        shown = " ".join(f"{times[name]:8.0f}" if name in times else f"{'-':>8}" for name in ("now", "coins", "many"))
        print(f"{records:>12,} {batch:>6,} {shown} {peak:8.2f}")


if __name__ == "__main__":
    main()
