"""Data that do not fit or are slow: rows of Parquet mapped against rows in memory, and workers against a DataLoader.

    PYTHONPATH=src python benchmarks/large_data.py [--rows 10000000]

Ratios are of medians over rounds that take turns. Anonymous memory is what the kernel says of this process, which maps
the rows, after its first hundred steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import evenhand as eh
from evenhand.data import Category, Data, Declaration, Number

FEATURES, ROUNDS, STEPS = 8, 8, 15
DECLARED = Declaration(
    {**{f"x{i}": Number(0, 1) for i in range(FEATURES)}, "sex": Category(("f", "m"))},
    label="ill",
    labels=("no", "yes"),
    groups="sex",
)


class Slow(torch.utils.data.Dataset[Any]):
    """Records of which each takes two milliseconds to read."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, number: int) -> Any:
        time.sleep(0.002)
        return torch.full((FEATURES,), float(number % 3)), number % 3


def write_parquet(path: Path, rows: int) -> None:
    """Write made-up people in row groups of a quarter of a million."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, writer = np.random.default_rng(0), None
    for start in range(0, rows, 1 << 18):
        count = min(1 << 18, rows - start)
        columns: dict[str, Any] = {f"x{i}": draw.random(count, dtype=np.float32) for i in range(FEATURES)}
        columns["ill"] = np.where(columns["x0"] > 0.5, "yes", "no")
        columns["sex"] = np.array(["f", "m"])[draw.integers(0, 2, count)]
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def anonymous() -> float:
    """Return the gigabytes of this process that no file holds."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1e6


def training(data: Data, batch: int, labels: int) -> Iterator[None]:
    """Take a private step each time it is asked."""
    width = data.fetch(torch.arange(1))[0].shape[1]
    model = nn.Sequential(nn.Linear(width, 256), nn.Tanh(), nn.Linear(256, labels))
    plan = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-8), data=data.facts, epochs=400 * batch / len(data), batch_size=batch)
    loss, optimizer = nn.CrossEntropyLoss(reduction="none"), torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp(), compose=False) as private:
        for drawn in private.batches(data):
            private.step(drawn)
            yield


def ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Return the median of the time of the first over that of the second, which take turns."""
    ratios = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        one()
        middle = time.perf_counter()
        other()
        ratios.append((middle - started) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def steps(run: Iterator[None], count: int = STEPS) -> None:
    """Take some steps."""
    for _ in range(count):
        next(run)


def main() -> None:
    """Print one line per figure."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--rows", type=int, default=10_000_000)
    rows = asked.parse_args().rows
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "people.parquet")
        write_parquet(path, rows)
        for what in ("converted and mapped", "mapped again"):
            started = time.perf_counter()
            data = eh.data.read(path, DECLARED, mapped=True, cache=folder)
            print(f"{rows} rows {what}: {time.perf_counter() - started:.1f} s")
        mapped = training(data, 1024, 2)
        steps(mapped, 100)
        print(f"anonymous memory after 100 steps: {anonymous():.2f} GB")
        parts = [data.fetch(part) for part in torch.split(torch.arange(rows), 1 << 20)]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        memory = training(eh.data.wrap(inputs, targets, labels=(0, 1)), 1024, 2)
        steps(memory, 20)
        print(
            f"speed of mapped rows over rows in memory: {1 / ratio(lambda: steps(mapped), lambda: steps(memory)):.2f}"
        )
    with eh.data.in_workers(4, eh.data.wrap(Slow(), labels=(0, 1, 2))) as (slow, _):
        private = training(slow, 400, 3)
        steps(private, 24)
        loader = torch.utils.data.DataLoader(Slow(), 400, shuffle=True, num_workers=4, persistent_workers=True)
        model = nn.Linear(FEATURES, 3)

        def plain() -> None:
            for _ in range(2):
                for given, wanted in loader:
                    nn.functional.cross_entropy(model(given), wanted).backward()

        plain()
        print(f"four workers over a DataLoader with four: {ratio(lambda: steps(private, 20), plain):.2f}")


if __name__ == "__main__":
    main()
