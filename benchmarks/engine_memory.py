"""Peak memory of a competitor on one cell, measured in a process of its own.

The baseline is the resident memory with libraries, model and data loaded; before it is read, the same competitor has
trained a copy of the model on two records, so that imports and compiled kernels are in it, and the heap was trimmed.
The peak is the highest resident memory from then on, over setting up and three steps. What the same competitor needs
for a model of six numbers and four records, measured in the same way, is the cost of its code: it grows with neither
model nor batch, and is taken off and reported on its own. Linux only.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_models import CASES
from engine_peers import Competitor, Step, competitors

NO_HUGE_PAGES = 41
"""prctl's PR_SET_THP_DISABLE: pages of 2 MB would blur the small cells."""


def status(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def trim() -> None:
    """Give freed memory back, and let the peak start from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def run(steps: Iterator[Step], count: int) -> None:
    """Some steps."""
    for _ in range(count):
        next(steps)()


def above(competitor: Competitor, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """MB above what the process holds now, over setting up and three steps: until the first is done, and later."""
    trim()
    baseline = status("VmRSS")
    steps = competitor.steps(model, x, y, 1e-6, 1.0)
    run(steps, 1)
    first = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    run(steps, 2)
    return first - baseline, status("VmHWM") - baseline


def peak(cell: dict[str, Any]) -> dict[str, float]:
    """MB that model and batch need: at most, and once the first step is done; and MB that the code needs."""
    ctypes.CDLL(None).prctl(NO_HUGE_PAGES, 1, 0, 0, 0)
    torch.set_num_threads(cell["threads"])
    torch.manual_seed(0)
    case, competitor = CASES[cell["model"]], competitors()[cell["competitor"]]
    model = competitor.accept(case.build())
    x, y = case.data(cell["batch"])
    run(competitor.steps(copy.deepcopy(model), x[:2], y[:2], 1e-6, 1.0), 2)
    code = max(above(competitor, nn.Linear(2, 2), torch.randn(4, 2), torch.tensor([0, 1, 0, 1])))
    first, later = above(competitor, model, x, y)
    # A small model may need less at its peak than setting up does; nothing is then left.
    return {"peak_mb": max(0.0, max(first, later) - code), "later_peak_mb": max(0.0, later - code), "code_mb": code}


if __name__ == "__main__":
    print(json.dumps(peak(json.loads(sys.argv[2]))))
