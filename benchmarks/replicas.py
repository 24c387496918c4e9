"""How much quicker R replicas are than R calls of ``eh.fit``, one after the other in one process: a ratio in one run.

    python benchmarks/replicas.py [--replicas 100] [--fits 5] [--json FILE]

Both train the same models on the same 2,000 records in memory, for ten epochs, and leave verified
run folders. ``eh.fit`` is called a few times and its median is extrapolated to R calls; the first call of both sides is
not counted. Seconds are those of the processor, so that other programs on the machine hardly matter; the wall clock is
shown beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import evenhand as eh
from evenhand.data.dataset import Data

RECORDS, HELD_OUT, WIDTH, CLASSES = 2000, 500, 64, 10
SETTINGS: dict[str, Any] = {"epochs": 10, "delta": 1e-5}
MODELS = {
    "linear 64-10": "torch.nn.Linear(64, 10)",
    "MLP 64-32-10": "torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))",
}


def records() -> tuple[Data, Data]:
    """Return training and held-out records whose labels a linear model can learn."""
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS + HELD_OUT, WIDTH, generator=drawn)
    labels = (inputs @ torch.randn(WIDTH, CLASSES, generator=drawn)).argmax(1)
    return eh.data.wrap(inputs[:RECORDS], labels[:RECORDS]), eh.data.wrap(inputs[RECORDS:], labels[RECORDS:])


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the processor and the wall seconds of a call."""
    processor, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - processor, time.perf_counter() - wall


def measure(name: str, code: str, replicas: int, fits: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of both ways for one model, and their ratio."""
    train, test = records()
    file = folder / "net.py"
    file.write_text(f"import torch\n\n\ndef net(facts):\n    return {code}\n")
    space = {"torch": torch}

    def single() -> None:
        eh.fit(eval(code, space), train, epsilon=3.0, test=test, out=tempfile.mkdtemp(dir=folder), **SETTINGS)

    def stacked(count: int) -> None:
        out = tempfile.mkdtemp(dir=folder)
        options = {**SETTINGS, "model": f"{file}:net", "test": test, "out": out}
        compared = eh.compare(train, ["dpsgd"], [3.0], seeds=count, replicas="on", **options)
        assert set(compared.table["n"]) == {count}

    single()
    stacked(2)
    singles = [timed(single) for _ in range(fits)]
    processor, wall = timed(lambda: stacked(replicas))
    one, one_wall = (statistics.median(column) for column in zip(*singles, strict=True))
    return {
        "model": name,
        "replicas": replicas,
        "fit_seconds": round(one, 3),
        "replicas_seconds": round(processor, 2),
        "ratio": round(replicas * one / processor, 1),
        "fit_wall": round(one_wall, 3),
        "replicas_wall": round(wall, 2),
        "ratio_wall": round(replicas * one_wall / wall, 1),
    }


def main() -> None:
    """Print a row for every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--fits", type=int, default=5, help="calls of eh.fit whose median is extrapolated")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    rows = []
    for name, code in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EVENHAND_STATE"] = str(Path(folder).resolve() / "state")
            rows.append(measure(name, code, options.replicas, options.fits, Path(folder).resolve()))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
