"""Worker processes that may die: each runs many tasks, a death costs one retry, the others go on.

Workers are spawned, so they inherit no threads; each has its own share of the cores. They leave the terminal's process
group: Ctrl-C reaches the parent only, which asks them to stop after a checkpoint. When the parent is gone they end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from evenhand.errors import EvenhandError

ATTEMPTS = 2
GRACE_SECONDS = 30.0
_TICK = 0.25
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Failure:
    """Why a task did not finish. ``details`` may contain data values: it belongs into a private file."""

    reason: str
    details: str = ""


@dataclass
class _Worker:
    process: Any
    pipe: Any
    key: str | None = None


def run_all(
    tasks: Mapping[str, Any],
    work: Callable[[Any], None],
    *,
    jobs: int,
    threads: int,
    watch: Callable[[Iterable[str], int], None] = lambda busy, done: None,
) -> dict[str, Failure]:
    """Run ``work(task)`` for every task in ``jobs`` processes; returns those that failed, by key.

    Args:
        tasks: what to run, by name; must be picklable, like ``work``, a function at the top of a module.
        work: does one task; what it raises makes that task fail, without a second attempt.
        jobs: number of processes.
        threads: threads that each may use.
        watch: called a few times a second with the names being run and the number that are done.

    Raises:
        KeyboardInterrupt: passed on after the workers were asked to stop and have stopped.
    """
    waiting, deaths, failed, done = list(tasks), dict.fromkeys(tasks, 0), {}, 0
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.key is not None for worker in workers):
            while waiting:
                idle = next((worker for worker in workers if worker.key is None), None)
                if idle is None:
                    if len(workers) >= jobs:
                        break
                    idle = _started(context, work, threads)
                    workers.append(idle)
                idle.key = waiting.pop(0)
                _send(idle, tasks[idle.key])
            watch([worker.key for worker in workers if worker.key is not None], done)
            pipes: dict[Any, _Worker] = {worker.pipe: worker for worker in workers if worker.key is not None}
            for pipe in connection.wait(list(pipes), timeout=_TICK):
                worker = pipes[pipe]
                key, worker.key = worker.key, None
                assert key is not None
                try:
                    outcome: Failure | None = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    worker.process.join()
                    deaths[key] += 1
                    if deaths[key] < ATTEMPTS:
                        waiting.insert(0, key)
                        continue
                    outcome = Failure(_death(worker.process.exitcode))
                done += 1
                if outcome is not None:
                    failed[key] = outcome
        watch([], done)
    finally:
        _stop(workers)
    return failed


def _started(context: Any, work: Callable[[Any], None], threads: int) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, threads), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _send(worker: _Worker, task: Any) -> None:
    with contextlib.suppress(OSError):  # a dead worker: its pipe says so when it is read
        worker.pipe.send(task)


def _stop(workers: Iterable[_Worker]) -> None:
    """Ask for a checkpoint and an end; workers without a task end at once."""
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.process.join(GRACE_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()


def _death(code: int | None) -> str:
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    return f"its worker process {how}, {ATTEMPTS} times: often the memory was full, try --jobs 1"


def _serve(pipe: Any, work: Callable[[Any], None], threads: int) -> None:
    """The worker: one task after the other until the pipe closes."""
    os.setpgrp()
    for name in THREADS:
        os.environ[name] = str(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            pipe.send(outcome(work, pipe.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def outcome(work: Callable[[Any], None], task: Any) -> Failure | None:
    """Do one task; what it raises becomes a failure, whose details may contain data values."""
    try:
        work(task)
    except EvenhandError as error:
        return Failure(str(error), traceback.format_exc())
    except Exception as error:
        return Failure(f"{type(error).__name__} in the run: see private/failures.txt", traceback.format_exc())
    return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
