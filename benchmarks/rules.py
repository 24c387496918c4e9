"""What a step of every method costs beside one of plain clipping, on three small models where that shows most.

    python benchmarks/rules.py [--rounds 9] [--threads 1] [--check]

All methods take turns in blocks of steps, in one process per model. The records have two groups and two owners with
budgets of their own. The bar is 3 % or 0.3 ms above clipping, whichever is more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import evenhand as eh
from engine_models import CASES
from engine_peers import Step
from evenhand.attachment import attach
from evenhand.catalogue import RECIPES

MODELS = ("logistic regression", "MLP 104-256-256-2", "MNIST CNN")
BATCH, STEPS, BLOCK, PLAIN = 256, 600, 40, "dpsgd"
SHARE, MILLISECONDS = 0.03, 0.3


def steps(method: str, model: str, stack: ExitStack) -> Iterator[Step]:
    """One step after the other of a method; drawing the batch is not timed."""
    case = CASES[model]
    x, y = case.data(4 * BATCH)
    sides = ["a", "b"] * (2 * BATCH)
    data = eh.data.wrap(x, y, groups=sides, owners=sides, labels=list(range(case.classes)))
    budgets = eh.Budgets({"a": 2.0, "b": 8.0}, delta=1e-5)
    plan = eh.plan(method, None if method == "sgd" else budgets, data=data.facts, epochs=STEPS / 4, batch_size=BATCH)
    built = case.build()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    optimizer, loss = torch.optim.SGD(built.parameters(), 1e-6), nn.CrossEntropyLoss(reduction="none")
    private = stack.enter_context(attach(built, optimizer, loss, plan, out=f"{folder}/run", compose=False))
    for batch in private.batches(data):
        yield lambda batch=batch: private.step(batch)  # type: ignore[misc]


def spent(made: Iterator[Step]) -> float:
    """Milliseconds a step, the median over a block: batches are drawn, so that they differ in size."""
    times = []
    for _ in range(BLOCK):
        step = next(made)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measured(model: str, rounds: int) -> dict[str, float]:
    """Milliseconds a step of each method: the median over the rounds."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        every = {name: steps(name, model, stack) for name in RECIPES}
        for made in every.values():
            spent(made)
        times: dict[str, list[float]] = {name: [] for name in every}
        for turn in range(rounds):
            order = list(every)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                times[name].append(spent(every[name]))
    return {name: statistics.median(column) for name, column in times.items()}


def main() -> None:
    """Print a table, and say which methods are above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="status 1 if a method is above the bar")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(measured(options.worker, options.rounds)))
        return
    found: dict[str, Any] = {}
    for model in MODELS:
        again = ["--worker", model, "--rounds", str(options.rounds), "--threads", str(options.threads)]
        done = subprocess.run([sys.executable, __file__, *again], stdout=subprocess.PIPE, text=True, check=True)
        found[model] = json.loads(done.stdout.splitlines()[-1])
    print("Milliseconds of a step, and how many more than those of plain clipping.\n")
    print("| method |", " | ".join(MODELS), "|\n| --- |", " | ".join("---" for _ in MODELS), "|")
    above = []
    for name in RECIPES:
        cells = []
        for model in MODELS:
            plain, own = found[model][PLAIN], found[model][name]
            cells.append(f"{own:.3f} ({own - plain:+.3f})")
            if own - plain > max(SHARE * plain, MILLISECONDS):
                above.append(f"{name} on {model}")
        print(f"| {name} |", " | ".join(cells), "|")
    print(f"\nAbove the bar of max({SHARE:.0%}, {MILLISECONDS} ms): {', '.join(above) or 'none'}.")
    sys.exit(1 if options.check and above else 0)


if __name__ == "__main__":
    main()
