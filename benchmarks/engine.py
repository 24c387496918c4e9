"""What a private step costs beside plain SGD: time and memory of evenhand, Opacus and vmap(grad), noise included.

    python benchmarks/engine.py [--models MNIST,MLP] [--batches bar] [--threads 1] [--competitors ours,hooks] [--quick]

Each cell (model, batch, threads) is a process of its own. In it the competitors take turns in blocks of steps, so that
a busy machine slows all of them; the ratio is that of the medians over the rounds. With one thread it is of processor
time, so that helper threads count; with more, of the clock on the wall. Memory: see ``engine_memory.py``. Before
anything is timed, one step of every competitor without noise is compared with plain autograd, record by record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engine_memory import counter
from engine_models import CASES, Case
from engine_peers import LAST, Step, competitors, deviation
from engine_peers import NOISE as ALONE
from engine_report import Row, joined, machine, markdown, misses, paste

RATE, NOISE, BLOCK_SECONDS = 1e-6, 1.0, 0.2
WARM_STEPS, WARM_SECONDS = 30, 4.0
EXACT = 3e-5
"""How far a step without noise may be from plain autograd's; that of ours still lies on the grid of the noise."""


def block(seconds: float) -> int:
    """How many steps make a block: at least three, but only one of a very long step."""
    return max(3, math.ceil(BLOCK_SECONDS / seconds)) if seconds < 2 * BLOCK_SECONDS else 1


def warming(seconds: float) -> int:
    """How many steps come before those that are timed: our engine compares itself with autograd at steps 2, 4, 8 ...

    Counted from the first step on, such steps would fall into half of the rounds, although a training has few of them.
    """
    return max(1, min(WARM_STEPS, math.ceil(WARM_SECONDS / seconds)))


def spent(steps: Iterator[Step], count: int) -> tuple[float, float]:
    """Seconds per step over a block: on the wall, and of all processors, helper threads between the steps included.

    What this thread does to get a step, such as drawing the batch, is not counted.
    """
    wall = drawing = 0.0
    processor = time.process_time()
    for _ in range(count):
        start = time.thread_time()
        step = next(steps)
        drawing += time.thread_time() - start
        start = time.perf_counter()
        step()
        wall += time.perf_counter() - start
    return wall / count, (time.process_time() - processor - drawing) / count


def timed(cell: Row) -> list[Row]:
    """One row per competitor of a cell."""
    case, known = CASES[cell["model"]], competitors()
    x, y = case.data(cell["batch"])
    steps: dict[str, Iterator[Step]] = {}
    counts: dict[str, int] = {}
    rows: list[Row] = []
    for name in cell["competitors"]:
        try:
            made = known[name].steps(known[name].accept(case.build()), x, y, RATE, NOISE)
            spent(made, 2)
            seconds = spent(made, 1)[0]
            counts[name] = block(seconds)
            spent(made, warming(seconds))
            steps[name] = made
        except Exception as error:
            rows.append({"competitor": name, "error": f"{type(error).__name__}: {error}"[:300]})
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(cell["rounds"]):
        order = list(steps)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            times[name].append(spent(steps[name], counts[name]))
    clock = 1 if cell["threads"] == 1 else 0
    base = [pair[clock] for pair in times["SGD"]]
    for name, pairs in times.items():
        ratios = [pair[clock] / plain for pair, plain in zip(pairs, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        wall, processor = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(pair[clock] for pair in pairs) / statistics.median(base)
        figures = {"wall_ms": wall, "cpu_ms": processor, "ratio": ratio, "quartiles": [low, high]}
        rows.append({"competitor": name, **figures, "steps_per_round": counts[name]})
    return rows


def compared(cell: Row) -> dict[str, float | str]:
    """How far each competitor's clipped mean gradient is from the true one on four records, or why it cannot run."""
    case, known = CASES[cell["model"]], competitors()
    found: dict[str, float | str] = {}
    for name in (name for name in cell["competitors"] if known[name].private):
        for dtype in (torch.float64, torch.float32):  # torch's vmap of an LSTM takes float32 only
            torch.set_default_dtype(dtype)
            try:
                found[name] = deviation(known[name], case.build(), *case.data(4))
                break
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def worker(script: str, task: str, cell: Row, more: Mapping[str, str] | None = None) -> Any:
    """Do one task in a fresh process, with ``more`` in its environment, and read what it found."""
    threads = {name: str(cell["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, str(Path(__file__).with_name(script)), "--worker", json.dumps(cell | {"task": task})]
    done = subprocess.run(
        command, env={**os.environ, **threads, **(more or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{task} of {cell} failed with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def exact(model: str, names: list[str]) -> dict[str, float | str]:
    """What `compared` finds; nobody is timed beside one who computes something else."""
    found: dict[str, float | str] = worker("engine.py", "compare", {"model": model, "threads": 1, "competitors": names})
    wrong = {name: value for name, value in found.items() if isinstance(value, float) and not value < EXACT}
    if wrong:
        raise SystemExit(f"{model}: not the gradient that plain autograd gives, relative error {wrong}")
    return found


def measured(options: argparse.Namespace) -> Row:
    """All rows of all cells, written down after each; progress goes to stderr."""
    found: Row = {"machine": machine(), "rounds": options.rounds, "deviations": {}, "rows": []}
    for model in options.models:
        deviations = found["deviations"][model] = exact(model, options.competitors)
        failed = [{"competitor": name, "error": text} for name, text in deviations.items() if isinstance(text, str)]
        able = [name for name in options.competitors if not isinstance(deviations.get(name), str)]
        for batch, threads in itertools.product(sizes(options.batches, CASES[model]), options.threads):
            cell = {"model": model, "batch": batch, "threads": threads}
            print(f"{model}, batch {batch}, {threads} thread(s)", file=sys.stderr, flush=True)
            rows = worker("engine.py", "time", cell | {"rounds": options.rounds, "competitors": able})
            rows = [cell | row for row in [*rows, *failed]]
            weigh = options.memory and threads == options.threads[0]
            found["rows"] += [weighed(row) for row in rows] if weigh else rows
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def sizes(text: str, case: Case) -> tuple[int, ...]:
    """The batches to measure of a model."""
    named = {"all": case.batches, "bar": (case.bar_batch,)}
    return named[text] if text in named else tuple(int(size) for size in text.split(","))


def weighed(row: Row) -> Row:
    """The row with the competitor's peak memory, unless it could not run or trains nothing of its own."""
    if "error" in row or row["competitor"] in (ALONE, LAST):
        return row
    cell = {name: row[name] for name in ("model", "batch", "threads", "competitor")}
    with tempfile.TemporaryDirectory() as folder:
        return row | worker("engine_memory.py", "memory", cell, counter(Path(folder)))


def chosen(text: str, names: list[str]) -> list[str]:
    """Names that contain one of the comma-separated words."""
    words = [word.strip().lower() for word in text.split(",")]
    found = [name for name in names if any(word in name.lower() for word in words)]
    if not found:
        raise SystemExit(f"none of {', '.join(names)} contains {text!r}")
    return found


def parsed() -> argparse.Namespace:
    """The options, with names resolved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="words in the names, separated by commas; default: all")
    parser.add_argument("--batches", help="64,256 or bar (the size that the model's bar is for) or all, the default")
    parser.add_argument("--threads", help="default: 1,2")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--competitors", default="", help="words in the names, separated by commas; SGD always runs")
    parser.add_argument("--quick", action="store_true", help="SGD and ours, the bars' batches, 1 thread, 3 rounds")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out peak memory")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--page", type=Path, help="also put the tables between the marks of this page")
    parser.add_argument("--again", type=Path, nargs="+", help="measure nothing, take the figures of these JSON files")
    parser.add_argument("--check", action="store_true", help="say which cells miss the bars; status 1 if any does")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.models = chosen(options.models, list(CASES))
    words = options.competitors or ("ours" if options.quick else "")
    options.competitors = list(dict.fromkeys(["SGD", *chosen(words, list(competitors()))]))
    options.batches = options.batches or ("bar" if options.quick else "all")
    options.threads = [int(count) for count in (options.threads or ("1" if options.quick else "1,2")).split(",")]
    options.rounds = options.rounds or (3 if options.quick else 9)
    options.memory = options.memory and not options.quick
    return options


def work(cell: Row) -> Any:
    """What the started process does."""
    torch.set_num_threads(cell["threads"])
    torch.manual_seed(0)
    return {"time": timed, "compare": compared}[cell["task"]](cell)


def main() -> None:
    """Measure, print Markdown, write JSON, check."""
    options = parsed()
    if options.worker:
        print(json.dumps(work(options.worker)))
        return
    found = joined([json.loads(file.read_text()) for file in options.again]) if options.again else measured(options)
    text = markdown(found)
    print(text)
    if options.page:
        paste(text, options.page)
    if options.check:
        missed = misses(found["rows"])
        print("\n".join(["", *missed, f"{len(missed)} bars are missed."]))
        sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
