"""Peak memory of a competitor on one cell, measured in a process of its own, in two ways.

The baseline is what the process holds with libraries, model and data loaded; before it is read, the same competitor has
trained a copy of the model on a few records, so that imports, compiled kernels and what libraries keep for themselves
are in it, and the heap was trimmed. The peak is the highest from then on, over setting up and three steps. What the
same competitor needs for a model of six numbers and four records, measured in the same way, is the cost of its code: it
grows with neither model nor batch, and is taken off, but for live bytes of setting up, where the two peaks of code and
model need not be at the same place.

Resident memory is what the machine gives, in pages; below a few MB it says more about pages than about the competitor.
Live bytes are what was asked of malloc and not freed (``live_bytes.c``), exact to the byte, the same in every run;
they are read apart for setting up with the first step, and for the steps after it. Linux only.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_models import CASES
from engine_peers import Competitor, Step, competitors

NO_HUGE_PAGES = 41
"""prctl's PR_SET_THP_DISABLE: pages of 2 MB would blur the small cells."""
FEW = 8
C = ctypes.CDLL(None)


@dataclass(frozen=True)
class Peaks:
    """MB above the baseline: resident ones, and live bytes until the first step is done and later."""

    resident: float
    setup: float
    steps: float


def status(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def counted(name: str) -> float:
    """What ``live_bytes.c`` has counted, in MB; nothing if it is not there."""
    if not hasattr(C, name):
        return 0.0
    getattr(C, name).restype = ctypes.c_long
    return float(getattr(C, name)()) / 2**20


def trim() -> None:
    """Give freed memory back, and let the peaks start from here."""
    gc.collect()
    C.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    counted("live_restart")


def run(steps: Iterator[Step], count: int) -> None:
    """Some steps."""
    for _ in range(count):
        next(steps)()


def peaks(competitor: Competitor, model: nn.Module, x: Tensor, y: Tensor) -> Peaks:
    """Above what the process holds now, over setting up and three steps."""
    trim()
    resident, live = status("VmRSS"), counted("live_bytes")
    steps = competitor.steps(model, x, y, 1e-6, 1.0)
    run(steps, 1)
    setup = counted("live_peak") - live
    counted("live_restart")
    run(steps, 2)
    return Peaks(status("VmHWM") - resident, setup, counted("live_peak") - live)


def peak(cell: dict[str, Any]) -> dict[str, float]:
    """What model and batch need, in MB."""
    C.prctl(NO_HUGE_PAGES, 1, 0, 0, 0)
    torch.set_num_threads(cell["threads"])
    torch.manual_seed(0)
    case, competitor = CASES[cell["model"]], competitors()[cell["competitor"]]
    model = competitor.accept(case.build())
    x, y = case.data(cell["batch"])
    run(competitor.steps(copy.deepcopy(model), x[:FEW], y[:FEW], 1e-6, 1.0), 2)
    code = peaks(competitor, nn.Linear(2, 2), torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    found = peaks(competitor, model, x, y)
    # A small model may need less at its peak than setting up does; nothing is then left.
    resident = {"peak_mb": max(0.0, found.resident - code.resident), "code_mb": code.resident}
    if not hasattr(C, "live_bytes"):
        return resident
    return {**resident, "live_mb": max(0.0, found.steps - code.steps), "live_setup_mb": found.setup}


def counter(folder: Path) -> dict[str, str]:
    """The environment in which live bytes are counted; empty without a compiler."""
    library = folder / "live_bytes.so"
    source = Path(__file__).with_name("live_bytes.c")
    command = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"LD_PRELOAD": " ".join([str(library), *os.environ.get("LD_PRELOAD", "").split()])}


if __name__ == "__main__":
    print(json.dumps(peak(json.loads(sys.argv[2]))))
