"""One process against two on the CIFAR CNN, one thread each, taking turns: wall clock and processor time of a step.

    PYTHONPATH=src python benchmarks/several_processes.py

Wall clock means something on a machine with two free cores only. The processor time of the busier process, against that
of a single one, bounds what two processes can gain there, whatever else runs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import distributed, nn

import evenhand as eh
from evenhand.models.build import build

BATCH, ROUNDS, STEPS = 256, 6, 3


def train(rank: int, size: int, meeting: str, turns: Any, results: Any) -> None:
    """Take some steps whenever it is this group's turn; report wall clock and processor time of each round."""
    torch.set_num_threads(1)
    if size > 1:
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(10_000, 3, 32, 32, generator=draw)
    data = eh.data.wrap(inputs, torch.randint(10, (10_000,), generator=draw), labels=range(10))
    torch.manual_seed(0)
    model = build("tanh_cnn", data.facts)
    plan = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=data.facts, epochs=100 * BATCH / 10_000, batch_size=BATCH)
    loss, optimizer = nn.CrossEntropyLoss(reduction="none"), torch.optim.SGD(model.parameters(), lr=0.1)
    out = f"{tempfile.gettempdir()}/evenhand-processes-{size}-{meeting[-8:]}"
    with eh.attach(model, optimizer, loss, plan, out=out, compose=False) as private:
        batches = private.batches(data)
        for _ in range(8):
            private.step(next(batches))
        for _ in range(ROUNDS):
            turns.get()
            wall, busy = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                private.step(next(batches))
            results.put((size, rank, (time.perf_counter() - wall) / STEPS, (time.process_time() - busy) / STEPS))


def main() -> None:
    """Print medians over the rounds, and the ratios of one process to two."""
    context = multiprocessing.get_context("spawn")
    meeting, results = tempfile.mktemp(prefix="meeting-"), context.Queue()
    turns = {(size, rank): context.Queue() for size in (1, 2) for rank in range(size)}
    workers = [
        context.Process(target=train, args=(rank, size, meeting, queue, results))
        for (size, rank), queue in turns.items()
    ]
    for worker in workers:
        worker.start()
    times: dict[tuple[int, int], list[tuple[float, float]]] = {place: [] for place in turns}
    for _ in range(ROUNDS):
        for size in (1, 2):
            for rank in range(size):
                turns[size, rank].put(None)
            for _ in range(size):
                _, rank, wall, busy = results.get()
                times[size, rank].append((wall, busy))
    for worker in workers:
        worker.join()
    wall = {place: statistics.median(each[0] for each in rounds) for place, rounds in times.items()}
    busy = {place: statistics.median(each[1] for each in rounds) for place, rounds in times.items()}
    for place in turns:
        shown = f"{1e3 * wall[place]:.0f} ms a step, {1e3 * busy[place]:.0f} busy"
        print(f"{place[0]} process(es), number {place[1]}: {shown}")
    ratios = [one[0] / two[0] for one, two in zip(times[1, 0], times[2, 0], strict=True)]
    print(f"wall clock, one to two: {statistics.median(ratios):.2f}")
    print(f"processor time, one to the busier of two: {busy[1, 0] / max(busy[2, 0], busy[2, 1]):.2f}")


if __name__ == "__main__":
    main()
