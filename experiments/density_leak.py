"""A membership test that breaks the claim of paper 002, drawn beside the same test on a sound release.

    python experiments/density_leak.py        # about a minute; writes docs/results/density_leak.svg and .md

Twenty records of one class around the origin, with and without one more. The attacker asks the released classifier for
its density at that record: black box, one question. The threshold is chosen on one half of the trials; the other half
gives a lower bound on epsilon (Clopper-Pearson, confidence 99.9 % each way). The projection is public, which is kinder
to the published form than the paper: there it is trained on the raw records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from evenhand.accounting.budgets import Privacy
from evenhand.density import PublishedSmoothing, RandomFeatureDensity
from evenhand.density.noisy_sums import Releases, as_data
from evenhand.density.published_smoothing import rho_of
from evenhand.mechanism.random_streams import Stream
from evenhand.reporting.charts import lines

DELTA, MISS, RECORDS, FAR = 1e-5, 1e-3, 20, 6.0
CLAIMS, DIMENSIONS, TRIALS = (0.25, 0.5, 1.0, 2.0, 4.0), (2, 16, 64), 1000
RESULTS = Path(__file__).parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Found:
    """What was claimed, and what the attack proves at the least."""

    claimed: float
    certified: float


def records(dimension: int) -> tuple[Tensor, Tensor]:
    """The other records, and the one that is attacked: it lies apart from them, as one record in many data does."""
    others = torch.randn(RECORDS, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return others, torch.full((1, dimension), FAR / math.sqrt(dimension), dtype=torch.float64)


def measured(dimension: int, claimed: float, trials: int = TRIALS) -> Found:
    """The attack on the published form (h = 1, k = 5, lambda = median)."""
    others, target = records(dimension)
    form = PublishedSmoothing(rho=rho_of(claimed, DELTA), delta=DELTA, allow_unproven=True, dimension=dimension)

    def answer(present: bool, trial: int) -> float:
        points = torch.cat([others, target]) if present else others
        generator = torch.Generator().manual_seed(2 * trial + int(present))
        made = form.smoothed(points, torch.zeros(len(points), dtype=torch.long), 1, generator)
        return float(made.log_densities(target)[0, 0])

    return Found(claimed, attack(answer, trials))


def measured_sound(claimed: float, trials: int = TRIALS) -> Found:
    """The same attack on random-feature class sums at the same epsilon, this time proved."""
    others, target = records(2)
    form = RandomFeatureDensity(private_projection=False, features=50, bandwidth=1.0)
    sets = {}
    for present in (True, False):
        rows = torch.cat([others, target]) if present else others
        sets[present] = as_data(rows, np.zeros(len(rows), int), classes=(0, 1))[0]
    plan = form.plan(sets[True].facts, Privacy(claimed, DELTA))

    def answer(present: bool, trial: int) -> float:
        stream = Stream.insecure(2 * trial + int(present), 1)
        model = form.released(sets[present], Releases(plan, stream), stream)
        return float(model(target.float())[0, 0])

    return Found(claimed, attack(answer, trials))


def attack(answer: Callable[[bool, int], float], trials: int) -> float:
    """The largest epsilon that the attacker's answers prove: threshold from even trials, proof from odd ones."""
    seen = {present: np.array([answer(present, trial) for trial in range(trials)]) for present in (True, False)}
    both = np.concatenate([seen[True][::2], seen[False][::2]])
    best = max(np.unique(np.quantile(both, np.linspace(0, 1, 101))), key=lambda t: _bound(seen, t, slice(0, None, 2)))
    return _bound(seen, float(best), slice(1, None, 2))


def _bound(seen: dict[bool, NDArray[np.float64]], threshold: float, part: slice) -> float:
    hits, alarms = (int((seen[present][part] >= threshold).sum()) for present in (True, False))
    size = len(seen[True][part])
    return max(certified(hits, alarms, size), certified(size - alarms, size - hits, size))


def certified(hits: int, alarms: int, size: int) -> float:
    """Clopper-Pearson on both rates: a lower bound on epsilon at ``DELTA``."""
    low = stats.beta.ppf(MISS, hits, size - hits + 1) if hits else 0.0
    high = stats.beta.isf(MISS, alarms + 1, size - alarms) if alarms < size else 1.0
    return max(0.0, math.log((low - DELTA) / high)) if low > DELTA else 0.0


def main() -> None:
    """Measure everything, then draw and write it down."""
    found = {f"published, p = {size}": [measured(size, claim) for claim in CLAIMS] for size in DIMENSIONS}
    found["sound: random features"] = [measured_sound(claim) for claim in CLAIMS]
    series = {name: [(each.claimed, each.certified) for each in row] for name, row in found.items()}
    series["the claim"] = [(claim, claim) for claim in CLAIMS]
    RESULTS.mkdir(parents=True, exist_ok=True)
    chart = lines(series, title="What a membership test proves", x_label="claimed epsilon", y_label="epsilon at least")
    (RESULTS / "density_leak.svg").write_text(chart)
    head = "| claimed epsilon | " + " | ".join(f"{claim:g}" for claim in CLAIMS) + " |"
    rows = [f"| {name} | " + " | ".join(f"{each.certified:.2f}" for each in row) + " |" for name, row in found.items()]
    words = (
        "# What a membership test proves\n\n"
        f"Lower bounds on epsilon at delta {DELTA:g}, each with confidence {1 - 2 * MISS:.1%}, from {TRIALS} trials "
        "with and without one record. A bound above the claim breaks it; one below proves nothing. So many trials "
        "can prove no more than "
        f"{certified(TRIALS // 2, 0, TRIALS // 2):.1f}. Made by `python experiments/density_leak.py`.\n\n"
        "![Bounds over claims](density_leak.svg)\n\n"
    )
    table = "\n".join([head, "|---" * (len(CLAIMS) + 1) + "|", *rows])
    (RESULTS / "density_leak.md").write_text(words + table + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
