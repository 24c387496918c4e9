"""The same list of runs as tasks of a Ray cluster, whose machines see the same folder (``pip install evenhand[ray]``).

Every task is an ordinary run that writes its own folder, so a machine that goes away costs one retry: the next attempt
continues from the run's checkpoint. Nothing about the data travels through Ray; each machine reads them itself.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evenhand.comparison.pool import ATTEMPTS, THREADS, Failure, outcome
from evenhand.errors import UsageError

_TICK = 0.5


def run_all(
    tasks: Mapping[str, Any],
    work: Callable[[Any], None],
    *,
    jobs: int,
    threads: int,
    watch: Callable[[Iterable[str], int], None] = lambda busy, done: None,
) -> dict[str, Failure]:
    """Run ``work(task)`` for every task on the cluster; returns those that failed, by key. As ``pool.run_all``.

    The cluster is the one that ``RAY_ADDRESS`` names, or one on this machine with ``jobs`` tasks at once. Each task
    reserves ``threads`` processors; a task whose machine dies is tried once more.

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
    waiting = {remote.remote(work, task, threads): key for key, task in tasks.items()}
    failed: dict[str, Failure] = {}
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_TICK)
            for reference in ready:
                key = waiting.pop(reference)
                found = _fetched(ray, reference)
                if found is not None:
                    failed[key] = found
            watch(list(waiting.values())[:jobs], len(tasks) - len(waiting))
    finally:
        for reference in waiting:
            ray.cancel(reference)
        if started:
            _ended(ray, list(waiting))
            ray.shutdown()
    return failed


def _perform(work: Callable[[Any], None], task: Any, threads: int) -> Failure | None:
    """One task on a machine of the cluster."""
    for name in THREADS:
        os.environ[name] = str(threads)
    return outcome(work, task)


def _fetched(ray: Any, reference: Any) -> Failure | None:
    try:
        found: Failure | None = ray.get(reference)
    except ray.exceptions.RayError as error:
        return Failure(
            f"its worker on the cluster died, {ATTEMPTS} times ({type(error).__name__}): often the memory was full"
        )
    return found


def _ended(ray: Any, references: list[Any], seconds: float = 30.0) -> None:
    """Give cancelled tasks the time to write a checkpoint."""
    end = time.monotonic() + seconds
    while references and time.monotonic() < end:
        _, references = ray.wait(references, num_returns=len(references), timeout=_TICK)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UsageError(
            'A comparison on a cluster needs Ray, which is not installed: pip install "evenhand[ray]", or leave out '
            "--ray to use the processes of this machine."
        ) from None
