"""Chooses how many threads torch uses for a run: one for a small model, where more only wait for each other.

Threads of OpenMP spin while they wait. On a core that other work uses too, each short operation then takes as long as
the other work's turn, and small models are made of short operations. Nothing private depends on the number.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SMALL = 10**8
"""Products per step, estimated from above, that one thread computes about as fast as several: some milliseconds."""
_ASKED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SHAPE = re.compile(r"\((\d+(?:, \d+)*),?\) (\w+)")


@contextmanager
def suited(model: nn.Module, inputs: str, records: float) -> Iterator[None]:
    """Use one torch thread inside the block if the model is small; restore their number after it.

    Whoever chose a number keeps it: by ``OMP_NUM_THREADS``, or by ``torch.set_num_threads`` if it is another one than
    torch chooses itself.

    Args:
      model: what is trained; only on the processor its size counts.
      inputs: shape and type of one record's inputs, as in ``Facts.inputs``.
      records: records of a step.
    """
    before = torch.get_num_threads()
    if before == 1 or _chosen(before) or not small(model, inputs, records):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small(model: nn.Module, inputs: str, records: float) -> bool:
    """Return whether one thread is enough: few parameters, each used in few places of a record, for few records.

    A parameter is taken to be used once for every number of a record, unless all are matrices of plain layers.

    Examples:
      >>> small(nn.Linear(64, 10), "(64,) float32", 64), small(nn.Conv2d(3, 64, 3), "(3, 224, 224) float32", 64)
      (True, False)
    """
    shape = _SHAPE.fullmatch(inputs)
    if shape is None:
        return False
    sizes = [int(size) for size in shape[1].split(", ")]
    flat = len(sizes) == 1 and "float" in shape[2] and all(parameter.dim() <= 2 for parameter in model.parameters())
    again = any(isinstance(part, nn.RNNBase) for part in model.modules())
    places = 1 if flat and not again else math.prod(sizes)
    return records * places * sum(parameter.numel() for parameter in model.parameters()) <= SMALL


def _chosen(threads: int) -> bool:
    """Return whether the user chose this number; torch's defaults are the cores of the process or of the machine."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    machine = os.cpu_count() or 1
    return any(os.environ.get(name) for name in _ASKED) or threads not in (mine, machine, machine // 2)
