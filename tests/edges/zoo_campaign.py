"""How trainings of every case ended: ``python tests/edges/zoo_campaign.py coupled 50`` prints a line per seed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from coupled_zoo import ZOO
from innocent_zoo import INNOCENTS
from zoo_training import Case, training

STEPS = {"coupled": 200, "innocent": 40}
"""An innocent case is looked at as often in 40 steps as in 200."""
CASES: Mapping[str, Mapping[str, Callable[[], Case]]] = {"coupled": ZOO, "innocent": INNOCENTS}


def counts(kind: str, seeds: range) -> Iterator[tuple[str, Counter[str]]]:
    """Name of every case and how its trainings ended, one case after the other."""
    for name, make in CASES[kind].items():
        yield name, Counter(training(make, seed, STEPS[kind]) for seed in seeds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    total: dict[str, Counter[str]] = {}
    for seed in range(int(sys.argv[2])):
        for case, ended in counts(sys.argv[1], range(seed, seed + 1)):
            total[case] = total.get(case, Counter()) + ended
        print(seed, {case: dict(ended) for case, ended in total.items()}, flush=True)
