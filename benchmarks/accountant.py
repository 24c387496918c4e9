"""The accountant against dp-accounting's PLD (grid 1e-4), in one process.

    python benchmarks/accountant.py [--json FILE] [--skip-peer]

Times are the best of three for evenhand and one run for the peer; the first call of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from evenhand.accounting.accountant import epsilon
from evenhand.accounting.calibration import calibrate, owner_bounds, owner_rates

DELTA = 1e-5
Events = list[tuple[float, float, int]]


def timed(call: Callable[[], Any], repeat: int = 3) -> tuple[Any, float]:
    best, value = math.inf, None
    for _ in range(repeat):
        start = time.perf_counter()
        value = call()
        best = min(best, time.perf_counter() - start)
    return value, best


def peer(events: Events) -> float:
    from dp_accounting.pld import privacy_loss_distribution as dpa

    total = None
    for q, s, n in events:
        part = dpa.from_gaussian_mechanism(s, sampling_prob=q, value_discretization_interval=1e-4).self_compose(n)
        total = part if total is None else total.compose(part)
    assert total is not None
    return float(total.get_epsilon_for_delta(DELTA))


def levels(count: int, steps: int = 2000) -> Events:
    """Noise rising from .8 to 1.2 over the steps, in so many levels."""
    return [(0.01, 0.8 + 0.4 * i / max(1, count - 1), steps // count) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--skip-peer", action="store_true", help="leave dp-accounting out (it takes over a minute)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(
        case: str, ours: float, seconds: float, target: str, theirs: float | None = None, took: float | None = None
    ) -> None:
        rows.append(
            {"case": case, "value": ours, "seconds": seconds, "peer": theirs, "peer_seconds": took, "target": target}
        )

    epsilon([(0.01, 1.0, 10)], DELTA)
    if not options.skip_peer:
        peer([(0.01, 1.0, 10)])
    for count, target in ((1, ""), (10, ">= 20x"), (100, ">= 100x")):
        events = levels(count)
        value, seconds = timed(lambda events=events: epsilon(events, DELTA))  # type: ignore[misc]
        theirs, took = (None, None) if options.skip_peer else timed(lambda events=events: peer(events), 1)  # type: ignore[misc]
        add(f"epsilon, {count} levels", value, seconds, target, theirs, took)
    value, seconds = timed(lambda: epsilon(levels(10_000, 10_000), DELTA))
    add("epsilon, 10,000 levels", value, seconds, "< 1 s")
    value, seconds = timed(lambda: calibrate([(64 / 60_000, 1.0, 93_750)], 3.0, DELTA))
    add("calibrate, constant, 93,750 steps", value, seconds, "< 0.2 s")
    budgets = np.exp(np.random.default_rng(0).uniform(0, math.log(10), 50_000)).tolist()
    sizes = [1] * 50_000
    value, seconds = timed(lambda: owner_rates(sizes, budgets, 512, [(1.0, 3516)], DELTA), 1)
    add("50,000 owners, rates, planned and verified", value[0], seconds, "< 5 s")
    value, seconds = timed(lambda: owner_bounds(sizes, budgets, 512 / 60_000, [(1.0, 3516)], DELTA), 1)
    add("50,000 owners, bounds, planned and verified", value[0], seconds, "< 5 s")

    print("| case | evenhand | seconds | dp-accounting | seconds | factor | target |\n|---|---|---|---|---|---|---|")
    for row in rows:
        theirs, took = row["peer"], row["peer_seconds"]
        tail = f"{theirs:.4f} | {took:.2f} | {took / row['seconds']:.0f}x" if theirs is not None else "- | - | -"
        print(f"| {row['case']} | {row['value']:.4f} | {row['seconds']:.3f} | {tail} | {row['target']} |")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
