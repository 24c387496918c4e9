"""Time of one training step: plain SGD beside per-record norms, clipping and the weighted sum, in one process.

    python benchmarks/engine.py [--batch 256] [--rounds 9] [--threads 1] [--json]

Both sides take turns in blocks, so that a busy machine slows both; the ratio is that of the medians over the rounds.
Noise is not part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from evenhand.gradients import Engine

LOSS = nn.CrossEntropyLoss(reduction="none")


def mnist_cnn() -> nn.Module:
    """The small tanh-free network of the DP-SGD papers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """104-256-256-2, the size of a network for census data."""
    return nn.Sequential(nn.Linear(104, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MNIST CNN": (mnist_cnn, (1, 28, 28), 10),
    "MLP 104-256-256-2": (mlp, (104,), 2),
    "logistic regression": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (1, 28, 28), 10),
}


def sgd_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, backward, update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        LOSS(model(x), y).mean().backward()
        optimizer.step()

    return step


def private_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The same with every record's gradient clipped, without the noise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    engine = Engine(model, LOSS)

    def step() -> None:
        result = engine.run(x, y)
        sums = result.weighted_sum((1.0 / result.norm.clamp(min=1e-12)).clamp(max=1.0))
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].div_(len(y))
        optimizer.step()

    return step


def seconds(step: Callable[[], None], count: int) -> float:
    """Time per step over a block of steps: processor time with one thread, else by the clock on the wall."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(count):
        step()
    return (clock() - start) / count


def compare(name: str, batch: int, rounds: int) -> dict[str, float | str]:
    """Medians of both sides over interleaved rounds, in milliseconds, and their ratio."""
    make, shape, classes = MODELS[name]
    x, y = torch.randn(batch, *shape), torch.randint(classes, (batch,))
    steps = sgd_step(make(), x, y), private_step(make(), x, y)
    once = [seconds(step, 3) for step in steps]
    count = max(3, int(0.1 / once[0]))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for step, column in zip(steps, times, strict=True):
            column.append(seconds(step, count))
    plain, private = (1e3 * statistics.median(column) for column in times)
    return {
        "model": name,
        "sgd_ms": round(plain, 3),
        "private_ms": round(private, 3),
        "ratio": round(private / plain, 3),
    }


def main() -> None:
    """Print a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [compare(name, options.batch, options.rounds) for name in MODELS]
    if options.json:
        print(json.dumps({"batch": options.batch, "threads": options.threads, "rows": rows}))
        return
    print(f"| model, batch {options.batch} | SGD ms | private ms | ratio |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['model']} | {row['sgd_ms']} | {row['private_ms']} | {row['ratio']} |")


if __name__ == "__main__":
    main()
