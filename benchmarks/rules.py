"""What a step of every method costs beside one of plain clipping, on three small models where that shows most.

    python benchmarks/rules.py [--rounds 18] [--threads 1] [--check] [--page docs/explanation/speed.md]

All methods take turns in blocks of steps, in one process per model. The records have two groups and two owners with
budgets of their own. A method's time is the median over all its steps. The bar is 3 % or 0.3 ms above clipping,
whichever is more.
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
from pathlib import Path

import torch
from torch import nn

import evenhand as eh
from engine_models import CASES
from engine_peers import Step
from engine_report import paste
from evenhand.methods.catalogue import RECIPES
from evenhand.training.attach import attach

MODELS = ("logistic regression", "MLP 104-256-256-2", "MNIST CNN")
BATCH, STEPS, BLOCK, PLAIN = 256, 600, 20, "dpsgd"
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


def spent(made: Iterator[Step]) -> list[float]:
    """Milliseconds of each step of a block."""
    times = []
    for _ in range(BLOCK):
        step = next(made)
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measured(model: str, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of each method, over all rounds; batches are drawn, so that they differ in size."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        every = {name: steps(name, model, stack) for name in RECIPES}
        for made in every.values():
            spent(made)
        times: dict[str, list[float]] = {name: [] for name in every}
        for turn in range(rounds):
            order = list(every)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                times[name] += spent(every[name])
    return {name: statistics.median(column) for name, column in times.items()}


def markdown(found: dict[str, dict[str, float]]) -> tuple[str, list[str]]:
    """A table of all methods and models, and which of them are above the bar."""
    lines = [["method", *found], ["---"] * (1 + len(found))]
    above = []
    for name in found[next(iter(found))]:
        cells = []
        for model, times in found.items():
            plain, own = times[PLAIN], times[name]
            cells.append(f"{own:.2f} ({own - plain:+.2f})")
            if own - plain > max(SHARE * plain, MILLISECONDS):
                above.append(f"{name} on {model}")
        lines.append([name, *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    bar = f"Above the bar of {SHARE} steps or {MILLISECONDS} ms, whichever is more: {', '.join(above) or 'none'}."
    said = "Milliseconds of a step, and how many more than those of plain clipping (`dpsgd`)."
    return "\n\n".join([said, table, bar]), above


def main() -> None:
    """Print a table, and say which methods are above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="status 1 if a method is above the bar")
    parser.add_argument("--page", type=Path, help="also put the table between the marks of this page")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(measured(options.worker, options.rounds)))
        return
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        again = ["--worker", model, "--rounds", str(options.rounds), "--threads", str(options.threads)]
        done = subprocess.run([sys.executable, __file__, *again], stdout=subprocess.PIPE, text=True, check=True)
        found[model] = json.loads(done.stdout.splitlines()[-1])
    text, above = markdown(found)
    print(text)
    if options.page:
        paste(text, options.page, "rules")
    sys.exit(1 if options.check and above else 0)


if __name__ == "__main__":
    main()
