"""Release sums: round to a grid, add Gaussian noise, round again. No sum leaves the process in another way."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.errors import UnsupportedModelError
from evenhand.mechanism import noise_native
from evenhand.mechanism.noise_native import BLOCK, Loops, Parts
from evenhand.mechanism.random_streams import AT_ONCE, Cipher, Desk, Domain, Stream

CHUNK = 1 << 16
SMALL_CHUNK = 1 << 15
"""Numbers of a gradient that are made and added at a time: they stay in the cache."""
AHEAD_FROM = 1 << 15
"""Fewer numbers than this are made faster than they could be handed over by another thread."""
FEW = AT_ONCE * BLOCK // 2
"""Up to so many numbers a step, those of several steps are made together, which costs little more than for one."""


class Ahead:
    """A source of normals from a stream that may compute those of later steps ahead of time, perhaps in a thread.

    Noise is addressed by step and position, so working ahead cannot change it. The thread is started only if a core is
    free. The source owns the arrays that it returns: the next call overwrites them.

    >>> stream = Stream.insecure(0, 0)
    >>> bool((Ahead(stream).normals("gradient", 3, 40_000) == stream.normals("gradient", 3, 40_000)).all())
    True
    """

    def __init__(self, stream: Stream):
        self.stream = stream
        self._worker = ThreadPoolExecutor(1, "evenhand-noise") if _spare() else None
        self._next: tuple[int, int, Future[NDArray[np.float64]]] | None = None
        self.desk, self._desks = Desk(), [Desk(), Desk()]  # the other thread works on desks only
        self._several, self._ready = Desk(), dict[tuple[int, int], NDArray[np.float64]]()
        self._expected: tuple[int, int] | None = None

    def parts(self, domain: Domain, step: int, count: int) -> Iterator[NDArray[np.float64]]:
        """Yield the first ``count`` normals of a step in parts, as ``in_parts`` does."""
        if not self._works(count):
            yield from in_parts(self.stream, domain, step, count, self.desk)
            return
        whole = self.normals(domain, step, count)
        for start in range(0, count, SMALL_CHUNK):
            yield whole[start : start + SMALL_CHUNK]

    def _works(self, count: int) -> bool:
        """Return whether so many numbers are computed ahead of their step."""
        return count <= FEW or (self._worker is not None and count >= AHEAD_FROM)

    def normals(self, domain: Domain, step: int, count: int, offset: int = 0) -> NDArray[np.float64]:
        """Return the normals that ``Stream.normals`` returns for this address."""
        if domain != "gradient" or offset or not self._works(count):
            return self.stream.normals(domain, step, count, offset, self.desk)
        if count <= FEW or self._worker is None:
            return self._few(step, count)
        ready, self._next = self._next, None
        if ready is not None and ready[:2] == (step, count):
            numbers = ready[2].result()
        else:
            numbers = self.stream.normals(domain, step, count, desk=self.desk)
        self._desks.reverse()
        future = self._worker.submit(self.stream.normals, domain, step + 1, count, 0, self._desks[0])
        self._next = (step + 1, count, future)
        return numbers

    def _few(self, step: int, count: int) -> NDArray[np.float64]:
        """Return the normals of a small gradient. Callers may write over a row, so each row is handed out once.

        Those of later steps are made only where this step follows the one before it: a single step is not worth them.
        """
        follows, self._expected = self._expected == (step, count), (step + 1, count)
        if (step, count) not in self._ready:
            steps = AT_ONCE // max(1, -(-count // BLOCK)) if follows else 1
            self._ready = {}
            rows = self.stream.normals_of("gradient", step, steps, count, self._several)
            self._ready = {(step + i, count): row for i, row in enumerate(rows)}
        return self._ready.pop((step, count))


def in_parts(
    stream: Stream, domain: Domain, step: int, count: int, desk: Desk | None = None
) -> Iterator[NDArray[np.float64]]:
    """Yield the first ``count`` normals of a step, ``SMALL_CHUNK`` at a time. The next part overwrites the last one.

    >>> [len(part) for part in in_parts(Stream.insecure(0, 0), "gradient", 0, 40_000)]
    [32768, 7232]
    """
    desk = desk or Desk()
    for start in range(0, count, SMALL_CHUNK):
        yield stream.normals(domain, step, min(SMALL_CHUNK, count - start), start, desk)


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
    """Return ``total`` rounded to the grid, plus N(0, std^2), rounded to the grid again, then divided; in float64.

    Guarantee:
      The noisy sum is a whole multiple of ``spacing`` (a power of two), so its low-order bits carry no trace of a
      record. The second rounding and the division see the noisy sum only. ``total`` is not written.

    >>> release(torch.zeros(2), 0.0, 0.25, Stream.fresh(), "gradient", 0) + 0.0
    tensor([0., 0.], dtype=torch.float64)
    """
    flat = total.detach().reshape(-1).cpu()
    samples = source.normals(domain, step, len(flat), offset)
    noisy, normals = torch.empty(len(flat), dtype=torch.float64), torch.from_numpy(samples)
    for start in range(0, len(flat), CHUNK):
        noise = normals[start : start + CHUNK]
        _add(flat[start : start + CHUNK], noise, std, spacing, divisor, out=noisy[start : start + CHUNK])
    return noisy.view(total.shape).to(total.device)


def release_few(
    total: NDArray[np.float64], std: float, spacing: float, source: Ahead, domain: Domain, step: int, offset: int
) -> NDArray[np.float64]:
    """Return what ``release`` returns, for a few numbers such as the answer of a query: quicker, since without torch.

    >>> source = Ahead(Stream.insecure(0, 0))
    >>> few = release_few(np.ones(3), 1.0, 2**-20, source, "queries", 5, 1)
    >>> bool((torch.from_numpy(few) == release(torch.ones(3), 1.0, 2**-20, source, "queries", 5, 1)).all())
    True
    """
    normals = source.normals(domain, step, len(total), offset)
    return np.rint(np.rint(total * (1 / spacing)) + normals * (std / spacing)) * spacing


def release_parts(
    totals: Sequence[Tensor],
    std: float,
    spacing: float,
    source: Ahead,
    step: int,
    divisor: float,
    lean: bool = False,
    in_place: bool = False,
) -> list[Tensor]:
    """Return the noisy gradient, one tensor per tensor of ``totals``; the noise is that of ``release`` on all in a row.

    Shapes and devices are those of ``totals``, and one precision for all. The caller owns the result.

    Args:
      totals: the bounded sum, one tensor per parameter.
      std: standard deviation of the noise.
      spacing: of the grid.
      source: of the normals.
      step: of the plan; its noise must serve once.
      divisor: the noisy sum is divided by it.
      lean: compute no normals before they are needed.
      in_place: whether ``totals`` may be overwritten with the result; otherwise they stay as they are.

    Raises:
      UnsupportedModelError: the sum is not finite. Nothing is released then.

    >>> ones = [torch.ones(2), torch.ones(1, 3)]
    >>> [part.tolist() for part in release_parts(ones, 0.0, 0.25, Ahead(Stream.fresh()), 0, 2.0)]
    [[0.5, 0.5], [[0.5, 0.5, 0.5]]]
    """
    loops = noise_native.loops()
    if loops is not None and all(total.dtype == torch.float32 for total in totals):
        return _by_loops(loops, totals, std, spacing, source, step, divisor, in_place)
    flat = torch.cat([total.reshape(-1) for total in totals])
    if not math.isfinite(float(flat.sum())):
        raise _not_finite()
    parts = in_parts(source.stream, "gradient", step, len(flat)) if lean else source.parts("gradient", step, len(flat))
    noisy = release_within(flat.cpu(), std, spacing, parts, divisor).to(flat.device)
    split = torch.split(noisy, [total.numel() for total in totals])
    return [part.view(total.shape) for part, total in zip(split, totals, strict=True)]


def release_rows(
    totals: Tensor,
    stds: Sequence[float],
    spacings: Sequence[float],
    sources: Sequence[Ahead],
    step: int,
    divisors: Sequence[float],
) -> None:
    """Write over each row of ``totals`` (float64) the noisy gradient that ``release`` makes of it, for its own run.

    Args:
      totals: the bounded sums of several runs, one row each.
      stds: standard deviation of each run's noise.
      spacings: of the runs' grids.
      sources: of the runs' normals.
      step: of the plans; its noise must serve once.
      divisors: each noisy sum is divided by its own.

    Raises:
      UnsupportedModelError: a sum is not finite. Nothing is released then.

    >>> totals, source = torch.zeros(2, 3, dtype=torch.float64), Ahead(Stream.insecure(0, 0))
    >>> release_rows(totals, [1.0, 0.0], [2**-20, 0.25], [source, Ahead(Stream.fresh())], 5, [2.0, 1.0])
    >>> one = release(torch.zeros(3), 1.0, 2**-20, Stream.insecure(0, 0), "gradient", 5, divisor=2.0)
    >>> bool((totals[0] == one).all()), (totals[1] + 0.0).tolist()
    (True, [0.0, 0.0, 0.0])
    """
    if not math.isfinite(float(totals.sum())):
        raise _not_finite()
    rows, spacing, std = totals.numpy(), np.asarray(spacings)[:, None], np.asarray(stds)[:, None]
    np.rint(np.multiply(rows, 1 / spacing, out=rows), out=rows)
    scale = std / spacing
    loops = noise_native.loops()
    several = rows.shape[1] <= FEW and (loops is None or not loops.encrypts)
    for place, source in enumerate(sources):
        # those of several steps at once where each would set up a cipher; of many, a thread per run would work ahead
        normals = (source if several else source.stream).normals("gradient", step, rows.shape[1])
        rows[place] += normals * scale[place]
    np.rint(rows, out=rows)
    rows *= spacing / np.asarray(divisors)[:, None]


def _by_loops(
    loops: Loops,
    totals: Sequence[Tensor],
    std: float,
    spacing: float,
    source: Ahead,
    step: int,
    divisor: float,
    in_place: bool,
) -> list[Tensor]:
    """Release float32 sums with the compiled loops, over them if ``in_place``."""
    sums = [_plain(total) for total in totals]
    outs = sums if in_place and _apart(sums) else [torch.empty_like(total) for total in sums]
    counts = [total.numel() for total in sums]
    parts = Parts([total.data_ptr() for total in sums], [out.data_ptr() for out in outs], counts)
    if loops.encrypts:
        stream = source.stream
        counter, threads = stream.counter("gradient", step), torch.get_num_threads()
        odd = loops.encrypted(stream.key, counter, parts, std, spacing, divisor, threads)
    else:
        odd = _release_with_openssl(
            loops, parts, source.desk, source.stream.cipher("gradient", step), std, spacing, divisor
        )
    if odd:
        raise _not_finite()
    return [out if total.is_cpu else out.to(total.device) for out, total in zip(outs, totals, strict=True)]


def _release_with_openssl(
    loops: Loops, parts: Parts, desk: Desk, cipher: Cipher, std: float, spacing: float, divisor: float
) -> int:
    """Release with random bits from OpenSSL, a chunk at a time; return how many numbers were not finite."""
    odd = 0
    for first in range(0, parts.count, SMALL_CHUNK):
        last = min(first + SMALL_CHUNK, parts.count)
        desk.fill(-(-(last - first) // BLOCK), cipher)
        odd += loops.release(desk.address, first, last, parts, std, spacing, divisor)
    return odd


def _plain(total: Tensor) -> Tensor:
    """Return ``total`` as one contiguous piece of CPU memory: itself if it is one already."""
    if total.is_cpu and total.is_contiguous() and not total.requires_grad and not total.is_neg():
        return total
    return total.detach().cpu().contiguous().resolve_neg()


def _apart(parts: Sequence[Tensor]) -> bool:
    """Return whether each tensor fills a storage of its own, so that writing noise over one cannot reach another.

    >>> both = torch.zeros(2, 3)
    >>> _apart([both, torch.zeros(3)]), _apart([both, both]), _apart([both[0], torch.zeros(3)])
    (True, False, False)
    """
    memories = [part.untyped_storage() for part in parts]
    whole = all(memory.nbytes() == part.nbytes for memory, part in zip(memories, parts, strict=True))
    places = [memory.data_ptr() for memory in memories if memory.nbytes()]
    return whole and len(set(places)) == len(places)


def _not_finite() -> UnsupportedModelError:
    """Return the error for a sum that is not finite."""
    return UnsupportedModelError("The bounded sum of gradients is not finite: nothing was released.")


def release_within(
    total: Tensor, std: float, spacing: float, parts: Iterator[NDArray[np.float64]], divisor: float
) -> Tensor:
    """Overwrite ``total`` (one dimension) with what ``release`` returns, and return it; ``parts`` are the normals.

    The numbers are rounded once more, to the precision of ``total``. Beside it a small chunk of memory is needed.

    >>> parts = in_parts(Stream.insecure(0, 0), "gradient", 5, 3)
    >>> noisy = release_within(torch.zeros(3), 1.0, 2**-20, parts, 2.0)
    >>> same = release(torch.zeros(3), 1.0, 2**-20, Stream.insecure(0, 0), "gradient", 5, divisor=2.0)
    >>> noisy.dtype, bool((noisy == same.float()).all())
    (torch.float32, True)
    """
    room = torch.empty(min(len(total), SMALL_CHUNK), dtype=torch.float64)
    for part, numbers in zip(torch.split(total, SMALL_CHUNK), parts, strict=True):
        if len(numbers) != len(part):  # one number would serve for all
            raise RuntimeError("Noise and sum differ in size: nothing was released.")
        part.copy_(_add(part, torch.from_numpy(numbers), std, spacing, divisor, out=room[: len(part)]))
    return total


def _add(total: Tensor, noise: Tensor, std: float, spacing: float, divisor: float, out: Tensor) -> Tensor:
    """Write into ``out`` (float64) the sum rounded to the grid, plus noise, rounded again, then divided; return it."""
    out.copy_(total).mul_(1 / spacing).round_()
    return out.add_(noise, alpha=std / spacing).round_().mul_(spacing / divisor)


def _spare() -> bool:
    """Return whether there is a core that torch does not use; without one, a further thread slows all others down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > torch.get_num_threads()
