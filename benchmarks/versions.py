"""Step time of two versions of evenhand, in interleaved pairs within one run: the median ratio with its interval.

    python benchmarks/versions.py OLD/src NEW/src [--models mlp,...] [--pairs 60]

Each version runs in a process of its own (one thread), from the given source folder, whose C files must be compiled
(`pip install -e` in that checkout). Both processes hold a run of the same plan and take turns: a block of steps by the
one, then by the other, the order changing from pair to pair. So what else happens on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

MODELS = {
    "MNIST CNN": ("MNIST CNN", 8),
    "MLP": ("MLP 104-256-256-2", 40),
    "transformer": ("transformer", 3),
    "logistic regression": ("logistic regression", 60),
    "LSTM": ("char-LSTM", 6),
    "CIFAR CNN": ("CIFAR tanh CNN", 2),
    "ResNet-18": ("ResNet-18 GroupNorm", 1),
    "ViT": ("ViT-tiny (6 layers)", 1),
}
"""The case of engine_models.py, and how many steps a block has."""
BATCH = {"ResNet-18 GroupNorm": 64, "ViT-tiny (6 layers)": 64}


def work(case_name: str, block: int) -> None:
    """Step whenever a line comes in, and answer with the seconds that a block took."""
    import tempfile
    import time

    import torch

    import evenhand as eh
    from engine_models import CASES

    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, batch = CASES[case_name], BATCH.get(case_name, 256)
    inputs, targets = case.data(8 * batch)
    data = eh.data.wrap(inputs, targets, labels=list(range(case.classes)))
    method = eh.Method(eh.rules.Clip())
    epochs = 100_000 if block > 8 else 600  # looks at the records before training take a share of its time
    plan = eh.plan(method, eh.Privacy(3, 1e-5), data=data.facts, epochs=epochs, batch_size=batch)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp(), compose=False) as private:
        drawn = private.batches(data)
        for _ in range(40 if block > 2 else 6):
            private.step(next(drawn))
        print("ready", flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            for _ in range(block):
                private.step(next(drawn))
            print(time.perf_counter() - started, flush=True)


class Version:
    """A process that steps with one version."""

    def __init__(self, source: Path, case: str, block: int) -> None:
        here = Path(__file__).parent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source.resolve()), str(here)]),
            "OMP_NUM_THREADS": "1",
        }
        line = [sys.executable, __file__, "--work", case, "--block", str(block)]
        self._process = subprocess.Popen(
            line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("a version could not run: see above")
        return answer

    def seconds(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of the median, by the bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[3899]


def compare(old: Path, new: Path, name: str, pairs: int) -> str:
    case, block = MODELS[name]
    versions = [Version(old, case, block), Version(new, case, block)]
    times: list[tuple[float, float]] = []
    for turn in range(pairs):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        found = {which: versions[which].seconds() for which in order}
        times.append((found[0], found[1]))
    for version in versions:
        version.close()
    ratios = [new_time / old_time for old_time, new_time in times]
    low, high = interval(ratios)
    before = statistics.median(old_time for old_time, _ in times) / block * 1000
    return f"| {name} | {before:.2f} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {pairs} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", type=Path)
    parser.add_argument("--models", default="MNIST CNN,MLP,transformer")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--work")
    parser.add_argument("--block", type=int, default=1)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.block)
        return
    old, new = given.versions
    print("| model | step before, ms | ratio | 95 % interval | pairs |\n|---|---|---|---|---|")
    for name in given.models.split(","):
        print(compare(old, new, name, given.pairs), flush=True)


if __name__ == "__main__":
    main()
