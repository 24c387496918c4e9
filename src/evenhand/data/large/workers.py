"""Read records in worker processes, ahead of their step, each with the secret seed of its own step and number.

A worker gets numbers of records and, where reading them draws at random, the seeds of exactly these. It holds neither
the key nor the ledger: workers are started before a run has either. They end with the process that started them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenhand import _validate
from evenhand.data.dataset import Data
from evenhand.data.record_seeds import Fetch, Guarded, Quiet, join_batches, seeds, seeds_of
from evenhand.errors import ProcessError

Rows = tuple[Any, Any]
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of Linux."""
_fetches: list[Fetch] = []
"""The fetches of the pool that is being started: workers are forked with them, or get them pickled."""


class _SeedsNeeded(Exception):  # noqa: N818 - it asks for something
    """Reading these records draws at random, and no seeds came with their numbers."""


@contextmanager
def in_workers(count: int, train: Data, test: Data | None = None) -> Iterator[tuple[Data, Data | None]]:
    """Yield data whose records are read by ``count`` worker processes, for the time inside.

    Data that are in memory or mapped are returned as they are: a worker would only copy their rows. What is read, and
    what is drawn while it is read, is the same with any number of workers. Enter it before a run is attached or
    resumed, so that workers know neither its key nor its ledger.

    Args:
      count: worker processes; 0 reads in this process.
      train: of a map-style Dataset, or with a fetch of one's own.
      test: held-out data, likewise.

    Examples:
      >>> from evenhand.data import wrap
      >>> dataset = [(torch.tensor([float(i)]), i % 2) for i in range(6)]
      >>> with in_workers(2, wrap(dataset)) as (data, _):
      ...     data.fetch(torch.tensor([4, 1]))[0].tolist()
      [[4.0], [1.0]]
    """
    _validate.whole(count, "workers", low=0)
    slow = [data for data in (train, test) if data is not None and isinstance(data.by_record.fetch, Guarded)]
    if not count or not slow:
        yield train, test
        return
    pool = _started(count, [data.by_record.fetch for data in slow])
    try:
        by_workers = {id(data): _read_by(pool, count, place, data) for place, data in enumerate(slow)}
        yield by_workers.get(id(train), train), test if test is None else by_workers.get(id(test), test)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read_by(pool: ProcessPoolExecutor, count: int, place: int, data: Data) -> Data:
    """Return data whose records a pool reads."""
    fetch = Pooled(data.by_record.fetch, pool, count, place)
    if data.persons is None:
        return replace(data, fetch=fetch)
    return replace(data, persons=replace(data.persons, records=replace(data.persons.records, fetch=fetch)))


@dataclass(frozen=True, eq=False)
class Pooled(Quiet):
    """A fetch by worker processes, which may begin before its result is wanted.

    ``pool`` runs ``count`` workers; ``place`` says which of their fetches is meant.
    """

    pool: ProcessPoolExecutor
    count: int
    place: int
    reads_ahead = True

    def __call__(self, rows: Tensor) -> Rows:
        """Return inputs and targets of these rows, in this order."""
        return self.begin(rows)()

    def begin(self, rows: Tensor) -> Callable[[], Rows]:
        """Let the workers begin to read these rows; return a function that waits for them."""
        numbers = rows.tolist()
        if not numbers:
            empty = self.read(rows)
            return lambda: empty
        given = seeds_of()
        size = -(-len(numbers) // self.count)
        parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        waiting = [self._submit(part, given(part) if self._draws() else None) for part in parts]

        def result() -> Rows:
            batches: list[Rows] = []
            for part, future in zip(parts, waiting, strict=True):
                batch = _result(future)
                if batch is None:
                    self._note_draws()
                    batch = _result(self._submit(part, given(part)))
                assert batch is not None
                batches.append(batch)
            return join_batches(batches) if len(batches) > 1 else batches[0]

        return result

    def _draws(self) -> bool:
        """Return whether it is known that reading records draws at random."""
        return isinstance(self.read, Guarded) and self.read.draws

    def _note_draws(self) -> None:
        if isinstance(self.read, Guarded):
            self.read.draws = True

    def _submit(self, numbers: list[int], given: Any) -> Future[Rows | None]:
        try:
            return self.pool.submit(_work, self.place, numbers, None if given is None else list(given))
        except BrokenProcessPool as error:
            raise _died() from error


def _result(future: Future[Rows | None]) -> Rows | None:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _died() from error


def _died() -> ProcessError:
    return ProcessError(
        "A worker process that reads records died, perhaps for lack of memory. What is charged stays charged; resume "
        "the run, with fewer workers."
    )


def _started(count: int, fetches: list[Fetch]) -> ProcessPoolExecutor:
    """Return a pool whose workers have these fetches; all are running on return."""
    start = "fork" if sys.platform == "linux" else "spawn"
    given = () if start == "fork" else (fetches,)
    _fetches[:] = fetches
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on forks beside threads
            context = multiprocessing.get_context(start)
            pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(os.getpid(), *given))
            for future in [pool.submit(os.getpid) for _ in range(count)]:
                future.result()
    finally:
        _fetches.clear()
    return pool


def _begin(parent: int, fetches: Sequence[Fetch] = ()) -> None:
    """Prepare a worker: one thread, no reaction to signals meant for the run, and an end with its parent."""
    torch.set_num_threads(1)
    _fetches.extend(fetches)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _work(place: int, numbers: list[int], given: list[bytes | int] | None) -> Rows | None:
    """Return a batch of these records, in a worker; None if their seeds are needed and did not come."""

    def none(_: Sequence[int]) -> list[bytes | int]:
        raise _SeedsNeeded

    def chosen(asked: Sequence[int]) -> list[bytes | int]:
        assert given is not None
        by_number = dict(zip(numbers, given, strict=True))
        return [by_number[number] for number in asked]

    try:
        with seeds(none if given is None else chosen):
            return _fetches[place](torch.tensor(numbers))
    except _SeedsNeeded:
        return None
