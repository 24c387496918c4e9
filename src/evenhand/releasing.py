"""A sum leaves the process only through here: rounded to a grid, with Gaussian noise on the same grid."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.normals import Desk
from evenhand.streams import Domain, Stream

CHUNK = 1 << 16
AHEAD_FROM = 1 << 15
"""Fewer numbers than this are made faster than they could be handed over by another thread."""


class Ahead:
    """The numbers of a stream, those of the next step made by another thread while this one trains.

    Noise is addressed by step and position, so working ahead cannot change it. With one core there is nothing to gain.
    What is returned is overwritten by the next call.

    >>> stream = Stream.insecure(0, 0)
    >>> bool((Ahead(stream).normals("gradient", 3, 40_000) == stream.normals("gradient", 3, 40_000)).all())
    True
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self._worker = ThreadPoolExecutor(1, "evenhand-noise") if _cores() > 1 else None
        self._next: tuple[int, int, Future[NDArray[np.float64]]] | None = None
        self._own, self._desks = Desk(), [Desk(), Desk()]  # the other thread works on desks only

    def normals(self, domain: Domain, step: int, count: int, offset: int = 0) -> NDArray[np.float64]:
        """As the stream gives them."""
        if self._worker is None or domain != "gradient" or offset or count < AHEAD_FROM:
            return self._stream.normals(domain, step, count, offset, self._own)
        ready, self._next = self._next, None
        if ready is not None and ready[:2] == (step, count):
            numbers = ready[2].result()
        else:
            numbers = self._stream.normals(domain, step, count, desk=self._own)
        self._desks.reverse()
        made = self._worker.submit(self._stream.normals, domain, step + 1, count, 0, self._desks[0])
        self._next = (step + 1, count, made)
        return numbers


def release(
    total: Tensor,
    std: float,
    spacing: float,
    source: Ahead | Stream,
    domain: Domain,
    step: int,
    offset: int = 0,
    divisor: float = 1.0,
) -> Tensor:
    """``total`` rounded to the grid plus N(0, std^2) rounded to the grid, then divided; float64.

    Both are whole multiples of ``spacing`` (a power of two) and their sum is exact in float64, so the low-order bits of
    what comes out carry no trace of the datum; the division only sees the sum.

    >>> release(torch.zeros(2), 0.0, 0.25, Stream.fresh(), "gradient", 0) + 0.0
    tensor([0., 0.], dtype=torch.float64)
    """
    flat = total.detach().reshape(-1).cpu()
    noisy = torch.empty(len(flat), dtype=torch.float64)
    normals = torch.from_numpy(source.normals(domain, step, len(flat), offset))
    for start in range(0, len(flat), CHUNK):
        part, noise = noisy[start : start + CHUNK], normals[start : start + CHUNK]
        part.copy_(flat[start : start + CHUNK]).mul_(1 / spacing).round_()
        part.add_(noise.mul_(std / spacing).round_()).mul_(spacing / divisor)
    return noisy.view(total.shape).to(total.device)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
