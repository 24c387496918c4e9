"""Long runs, many runs and runs side by side: memory and processor time per step must not grow.

    python -m faults.endurance steps 100000
    python -m faults.endurance runs 200
    python -m faults.endurance beside 8

Time is that of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PARTS = 10
"""Pieces in which a long run is measured; the first is a warm-up."""


@dataclass(frozen=True)
class Measured:
    """Megabytes that are held, and processor microseconds per step, after each piece; and what was spent."""

    megabytes: list[float]
    microseconds: list[float]
    epsilon: float
    seconds: float

    def growth(self) -> tuple[float, float]:
        """Return by how many megabytes memory grew, and by which factor time per step, from the second piece on."""
        half = len(self.microseconds) // 2
        early, late = self.microseconds[1 : half + 1], self.microseconds[half:]
        return self.megabytes[-1] - self.megabytes[1], statistics.median(late) / statistics.median(early)


def held() -> float:
    """Return the megabytes of memory that this process needs now.

    A run leaves about half a megabyte in cycles, which Python frees once in some hundred runs: they are freed first.
    """
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _records() -> Any:
    import torch

    import evenhand as eh

    inputs = torch.randn(600, 8, generator=torch.Generator().manual_seed(1))
    return eh.data.wrap(inputs, [i % 2 for i in range(600)], labels=(0, 1), groups=["a", "b", "b"] * 200)


def steps(count: int, out: Path) -> Measured:
    """Take so many steps in one run."""
    import torch
    from torch import nn

    import evenhand as eh

    data, model = _records(), nn.Linear(8, 2)
    plan = eh.plan("dpsgd", eh.Privacy(8, 1e-5), data=data.facts, epochs=count * 20 / 600, batch_size=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss(reduction="none")
    megabytes, microseconds, size = [], [], plan.steps // PARTS
    began = time.monotonic()
    with eh.attach(model, optimizer, loss, plan, out=out) as private:
        spent = time.process_time()
        for number, batch in enumerate(private.batches(data), start=1):
            private.step(batch)
            if number % size == 0:
                private.checkpoint()
                megabytes.append(held())
                microseconds.append(1e6 * (time.process_time() - spent) / size)
                spent = time.process_time()
        private.release()
    found = eh.verify(out)
    assert found["ok"], found["problems"]
    return Measured(megabytes, microseconds, float(found["epsilon"]), time.monotonic() - began)


def runs(count: int, out: Path) -> Measured:
    """Make so many short runs on the same data in one process."""
    from torch import nn

    import evenhand as eh

    data, megabytes, microseconds, size = _records(), [], [], max(1, count // PARTS)
    began, spent, epsilon = time.monotonic(), time.process_time(), 0.0
    for number in range(1, count + 1):
        options: dict[str, Any] = {"epochs": 1, "batch_size": 20, "progress": False}
        run = eh.fit(nn.Linear(8, 2), data, epsilon=1.0, delta=1e-5, out=out / str(number), **options)
        if number % size == 0:
            megabytes.append(held())
            microseconds.append(1e6 * (time.process_time() - spent) / size / run.plan.steps)
            spent = time.process_time()
        epsilon = float(eh.verify(run.path)["epsilon"]) if number == count else epsilon
    return Measured(megabytes, microseconds, epsilon, time.monotonic() - began)


def beside(count: int, out: Path, each: int = 2000) -> list[Measured]:
    """Run so many processes at once, each with a run of its own on the same data."""
    begun = [_started("steps", each, out / str(number)) for number in range(count)]
    return [_ended(process) for process in begun]


def alone(what: str, count: int, out: Path) -> Measured:
    """Return what one process measures that does nothing else."""
    return _ended(_started(what, count, out))


def _started(what: str, count: int, out: Path) -> subprocess.Popen[str]:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "faults.endurance", what, str(count), str(out)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _ended(process: subprocess.Popen[str]) -> Measured:
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return Measured(**json.loads(text.splitlines()[-1]))


if __name__ == "__main__":
    kind, number = sys.argv[1], int(sys.argv[2])
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp())
    if kind == "beside":
        print(json.dumps([asdict(measured) for measured in beside(number, folder)]))
    else:
        print(json.dumps(asdict({"steps": steps, "runs": runs}[kind](number, folder / "run"))))
