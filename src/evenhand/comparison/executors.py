"""Run tasks in worker processes that may die: each runs many tasks, a death costs one retry, the others go on.

Workers are spawned, so they inherit no threads; each has its own share of the cores. They leave the terminal's process
group: Ctrl-C reaches the parent only, which asks them to stop after a checkpoint. When the parent is gone they end.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from evenhand.errors import EvenhandError, UsageError
from evenhand.runs.os_errors import boundary
from evenhand.training.steps.surroundings import Surroundings

ATTEMPTS = 2
GRACE_SECONDS = 30.0
_POLL_SECONDS = 0.25
START = "spawn"
"""How workers are started: with nothing of this process."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Failure:
    """Reason why a task did not finish. ``details`` may contain data values: it belongs into a private file."""

    reason: str
    details: str = ""


@dataclass
class _Worker:
    process: Any
    pipe: Any
    key: str | None = None


def run_in_processes(
    tasks: Mapping[str, Any],
    work: Callable[[Any], None],
    *,
    jobs: int,
    threads: int,
    watch: Callable[[Iterable[str], int], None] = lambda busy, done: None,
) -> dict[str, Failure]:
    """Run ``work(task)`` for every task in ``jobs`` processes; return those that failed, by key.

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
    context = multiprocessing.get_context(START)
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.key is not None for worker in workers):
            while waiting:
                idle = next((worker for worker in workers if worker.key is None), None)
                if idle is None:
                    if len(workers) >= jobs:
                        break
                    idle = _start_worker(context, work, threads)
                    workers.append(idle)
                idle.key = waiting.pop(0)
                _send(idle, tasks[idle.key])
            watch([worker.key for worker in workers if worker.key is not None], done)
            pipes: dict[Any, _Worker] = {worker.pipe: worker for worker in workers if worker.key is not None}
            for pipe in connection.wait(list(pipes), timeout=_POLL_SECONDS):
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


def _start_worker(context: Any, work: Callable[[Any], None], threads: int) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, threads), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _send(worker: _Worker, task: Any) -> None:
    with contextlib.suppress(OSError):  # a dead worker: its pipe says so when it is read
        worker.pipe.send(task)


def _stop(workers: Iterable[_Worker]) -> None:
    """Ask the workers to write a checkpoint and end; workers without a task end at once."""
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
    """Do one task after the other in a worker process until the pipe closes."""
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
    """Do one task; return what it raises as a failure, whose details may contain data values."""
    try:
        with boundary():
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


_RAY_POLL_SECONDS = 0.5


def run_on_ray(
    tasks: Mapping[str, Any],
    work: Callable[[Any], None],
    *,
    jobs: int,
    threads: int,
    watch: Callable[[Iterable[str], int], None] = lambda busy, done: None,
) -> dict[str, Failure]:
    """Run ``work(task)`` for every task on a Ray cluster, with the arguments of ``run_in_processes``.

    Return the tasks that failed, by key. The cluster is the one that ``RAY_ADDRESS`` names, or one on this machine with
    ``jobs`` tasks at once. Each task reserves ``threads`` processors; a task whose machine dies is tried once more.

    Raises:
        UsageError: Ray is not installed.
        KeyboardInterrupt: passed on after the tasks were cancelled; checkpoints of their runs stay.
    """
    if not tasks:
        watch([], 0)
        return {}
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": jobs * threads, "include_dashboard": False}
        ray.init(log_to_driver=False, **local)
    remote = ray.remote(num_cpus=threads, max_retries=ATTEMPTS - 1, retry_exceptions=False)(_perform)
    waiting: dict[Any, str] = {}
    failed: dict[str, Failure] = {}
    shared = contextlib.ExitStack()
    try:
        surroundings = shared.enter_context(Surroundings.shared())
        waiting |= {remote.remote(work, task, threads, surroundings): key for key, task in tasks.items()}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_RAY_POLL_SECONDS)
            for reference in ready:
                key = waiting.pop(reference)
                failure = _fetch_outcome(ray, reference)
                if failure is not None:
                    failed[key] = failure
            watch(list(waiting.values())[:jobs], len(tasks) - len(waiting))
    finally:
        for reference in waiting:
            ray.cancel(reference)
        shared.close()
        if started:
            _await_cancelled(ray, list(waiting))
            ray.shutdown()
    return failed


def _perform(work: Callable[[Any], None], task: Any, threads: int, surroundings: Surroundings) -> Failure | None:
    """Do one task on a machine of the cluster, with the state, data and folder of the process that asks for it."""
    for name in THREADS:
        os.environ[name] = str(threads)

    def there(given: Any) -> None:
        surroundings.take()
        work(given)

    return outcome(there, task)


def _fetch_outcome(ray: Any, reference: Any) -> Failure | None:
    try:
        failure: Failure | None = ray.get(reference)
    except ray.exceptions.RayError as error:
        return Failure(
            f"its worker on the cluster died, {ATTEMPTS} times ({type(error).__name__}): often the memory was full"
        )
    return failure


def _await_cancelled(ray: Any, references: list[Any], seconds: float = 30.0) -> None:
    """Give cancelled tasks the time to write a checkpoint."""
    end = time.monotonic() + seconds
    while references and time.monotonic() < end:
        _, references = ray.wait(references, num_returns=len(references), timeout=_RAY_POLL_SECONDS)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UsageError(
            'A comparison on a cluster needs Ray, which is not installed: pip install "evenhand[ray]", or leave out '
            "--ray to use the processes of this machine."
        ) from None


def run_here(
    tasks: Mapping[str, Any],
    work: Callable[[Any], None],
    *,
    jobs: int,
    threads: int,
    watch: Callable[[Iterable[str], int], None] = lambda busy, done: None,
) -> dict[str, Failure]:
    """Run the tasks one after the other in this process, which has data in memory or rules that others have not.

    Arguments are those of ``run_in_processes``; ``jobs`` and ``threads`` are not used.
    """
    import torch

    before, failed = torch.get_num_threads(), {}
    try:
        for done, (key, task) in enumerate(tasks.items()):
            watch([key], done)
            try:
                work(task)
            except EvenhandError as error:
                failed[key] = Failure(str(error), traceback.format_exc())
    finally:
        torch.set_num_threads(before)
    return failed
