"""How far epsilon may lie above the truth at tiny sampling rates: a table beside what an attack needs.

    python benchmarks/tiny_rates.py

The attack says "in" if any one release is larger than a threshold. What it achieves is a lower bound on the exact
epsilon, almost exact where single large outputs decide (small rate, little noise); so the ratio bounds the looseness
from above.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from evenhand.accounting import accountant

CASES = [
    (rate, noise, count, delta)
    for rate in (1e-4, 1e-5, 1e-6, 3e-7, 1e-8)
    for noise, count, delta in ((0.5, 1_000, 1e-7), (0.5, 1_000, 1e-9), (0.5, 100_000, 1e-9), (0.5, 10_000_000, 1e-9))
    if rate * count < 500
]


def attacked(rate: float, noise: float, count: int, delta: float) -> float:
    """Epsilon that the attack proves to be spent at least, at its best threshold."""
    t = np.linspace(0.5 / noise - 1, 1 / noise + 12, 20_001)
    out, within = ndtr(-t), (1 - rate) * ndtr(-t) + rate * ndtr(1 / noise - t)
    none, fewer = count * np.log1p(-out), count * np.log1p(-within)
    more, alarms = -np.exp(none) * np.expm1(fewer - none), -np.expm1(none)
    seen = (more > delta) & (alarms > 0)
    return float(np.log1p((more - delta)[seen] / alarms[seen]).max(initial=0.0))


def main() -> None:
    print("| rate | noise | releases | delta | epsilon | an attack needs | ratio |")
    print("|---|---|---|---|---|---|---|")
    for rate, noise, count, delta in CASES:
        found = accountant.epsilon([(rate, noise, count)], delta)
        least = attacked(rate, noise, count, delta)
        ratio = f"{found / least:.4f}" if least > 0 else ""
        shown = f"{found:.5g} | {least:.5g} | {ratio}"
        print(f"| {rate:g} | {noise:g} | {count:,} | {delta:g} | {shown} |")
        assert not least > found or math.isclose(least, found, rel_tol=1e-9), "an epsilon is too low"


if __name__ == "__main__":
    main()
