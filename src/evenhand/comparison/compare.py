"""``compare``: plan every cell, run what is missing in worker processes, read the folders, write tables and report."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import _validate, durable, untrusted
from evenhand.comparison import executors, summary
from evenhand.comparison import summary as tuning_results
from evenhand.comparison import write_results as files
from evenhand.comparison.run_cell import Task, Validation, finished, perform, plan_task
from evenhand.comparison.sweep import Chosen, Sweep
from evenhand.errors import UsageError, VerificationError
from evenhand.reporting.comparison_sections import Entry
from evenhand.terminal import plain, shows_progress
from evenhand.training.loop import Interrupted, stopping

Watch = Callable[[Iterable[str], int], None]
EXECUTORS: dict[str, Callable[..., dict[str, executors.Failure]]] = {
    "processes": executors.run_in_processes,
    "ray": executors.run_on_ray,
    "here": executors.run_here,
}


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: entries by method and promise, every run, paths of the files, number of reused runs."""

    entries: tuple[Entry, ...]
    results: tuple[summary.Result, ...]
    files: dict[str, Path]
    reused: int

    @property
    def failed(self) -> list[str]:
        """Return why runs failed."""
        return [reason for entry in self.entries for reason in entry.failures]


def compare(
    sweep: Sweep,
    out: str | Path,
    *,
    jobs: int | None = None,
    progress: bool | None = None,
    executor: str = "processes",
) -> Comparison:
    """Run methods x promises x seeds at the same true epsilon and compare them.

    Runs that are finished in ``out`` are read, not repeated; runs that were cut short are continued. With a grid to
    tune over, its trials come first, and the final runs take what won.

    Args:
      sweep: what to run.
      out: folder of the comparison; every run gets its own folder in it.
      jobs: worker processes; default one per core. Each uses its share of the cores.
      progress: show a bar; default only in a terminal.
      executor: "processes" on this machine, or "ray": tasks on a Ray cluster whose machines share ``out``.

    Raises:
      Interrupted: after SIGINT, SIGTERM or SIGHUP, when every worker has written a checkpoint; the same call goes on.
    """
    folder = Path(out)
    _validate.known(executor, EXECUTORS, "executor")
    sweep.cells()
    crew = _Crew(executor, None if jobs is None else _validate.whole(jobs, "jobs"), progress, sweep.replicas)
    with _locked(folder):
        done, winners = _run_trials(sweep, folder, crew)
        missing = {trial.key for trial in sweep.trials()} - set(winners)
        tasks = [
            plan_task(cell, folder, research=sweep.research, tuned=sweep.tune is not None)
            for cell in sweep.cells(winners)
            if (cell.method, cell.epsilon) not in missing
        ]
        failed, reused = crew.run(tasks)
        _note(folder, failed)
        results = [summary.result(task, failed.get(task.path.name)) for task in tasks]
        if not results:
            raise UsageError("No trial of any method finished, so there is nothing to run: see private/failures.txt.")
        entries = summary.entries(
            results,
            baseline=sweep.baseline,
            efforts=tuning_results.efforts(done, winners),
            asked=sweep.metrics,
        )
        written = files.write(folder, sweep, entries, results)
    return Comparison(tuple(entries), tuple(results), written, reused)


def _run_trials(sweep: Sweep, folder: Path, crew: _Crew) -> tuple[list[tuning_results.Tried], Chosen]:
    """Run the trials that are missing; return all trials and the winners."""
    trials, tune = sweep.trials(), sweep.tune
    if tune is None:
        return [], {}
    part = Validation(tune.share, tune.split_seed)
    tasks = [plan_task(trial.cell, folder, validation=part) for trial in trials]
    failed, _ = crew.run(tasks)
    _note(folder, failed)
    done = tuning_results.read_trials(trials, tasks, failed, tune.score)
    tuning_results.write(folder, tune, done, sweep.public)
    return done, tuning_results.choose_winners(done)


@dataclass(frozen=True)
class _Crew:
    """The executor of the tasks: worker processes here, or a Ray cluster."""

    executor: str
    jobs: int | None
    progress: bool | None
    replicas: str

    def run(self, tasks: Sequence[Task]) -> tuple[dict[str, executors.Failure], int]:
        """Run the tasks that are not finished; return the failures by name, and how many were finished before.

        One seed of all methods comes after the other: what is finished when somebody stops is whole replicas.
        """
        missing = sorted((task for task in tasks if not finished(task)), key=lambda task: task.cell.seed)
        before = len(tasks) - len(missing)
        stacks, alone = ({}, missing) if self.replicas == "off" else _stacks(missing, self.replicas)
        with _interruptible(before, len(tasks), bool(stacks)), _bar(tasks, len(missing), self.progress) as watch:
            failed = self._run_stacks(stacks, watch)
            trained = len(missing) - len(alone)
            failed |= self._execute(
                {task.path.name: task for task in alone}, perform, lambda busy, done: watch(busy, trained + done)
            )
        return failed, before

    def _run_stacks(self, stacks: Mapping[str, tuple[Task, ...]], watch: Watch) -> dict[str, executors.Failure]:
        """Train stacks of replicas; return the failures by the name of each run."""
        if not stacks:
            return {}
        from evenhand.comparison.replica_runs import perform_together

        sizes = [len(stack) for stack in stacks.values()]
        failed = self._execute(
            stacks,
            perform_together,
            lambda busy, done: watch([stacks[name][0].path.name for name in busy], sum(sizes[:done])),
        )
        return {task.path.name: why for name, why in failed.items() for task in stacks[name] if not finished(task)}

    def _execute(
        self, tasks: Mapping[str, Any], work: Callable[[Any], None], watch: Watch
    ) -> dict[str, executors.Failure]:
        cores = _cores()
        workers = max(1, min(cores, len(tasks))) if self.jobs is None else self.jobs
        threads = max(1, cores // workers)
        return EXECUTORS[self.executor](tasks, work, jobs=workers, threads=threads, watch=watch)


def _stacks(tasks: Sequence[Task], mode: str) -> tuple[dict[str, tuple[Task, ...]], list[Task]]:
    """Return the runs to train together and those to train alone. Imports torch only here."""
    from evenhand.comparison.replica_runs import grouped

    return grouped(tasks, mode)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: two comparisons in one folder would run the same cells twice."""
    from filelock import Timeout

    try:
        durable.make_folder(folder, parents=True)
        durable.make_folder(folder / "private", private=True)
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be written ({error.strerror}). Choose another --out.") from None
    lock = durable.lock(folder / "private" / "compare.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        raise UsageError(f"Another comparison is writing {folder}: wait for it, or choose another --out.") from None
    try:
        durable.clean(folder, folder / "private")
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _interruptible(before: int, total: int, together: bool) -> Iterator[None]:
    """Stop the workers after their checkpoints when a signal comes, and raise an error that says how to go on."""
    received: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, stop) for number in stopping()}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            received[0] if received else signal.SIGINT,
            (
                "Stopped; replicas that were in training begin anew, and what they charged stays charged "
                if together
                else "Stopped; nothing is lost "
            )
            + f"({before} of {total} runs were finished before this start). Continue with the same command.",
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _bar(tasks: Sequence[Task], missing: int, progress: bool | None) -> Iterator[Watch]:
    """Yield a callback that moves one bar over all runs; a run counts by its evaluations, so it moves meanwhile."""
    if not shows_progress(progress) or not missing:
        yield lambda busy, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    known = {task.path.name: task for task in tasks}
    columns = (
        TextColumn("{task.fields[done]} of {task.fields[runs]} runs"),
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        ready = len(tasks) - missing
        entry = shown.add_task("starting", total=float(missing), done=ready, runs=len(tasks))

        def watch(busy: Iterable[str], done: int) -> None:
            running = [known[name] for name in busy]
            partly = sum(_share(task) for task in running)
            words = plain(", ".join(task.cell.name for task in running[:3])) or "writing tables and report"
            with contextlib.suppress(OSError):
                shown.update(entry, completed=done + partly, description=words, done=ready + done)

        yield watch


def _share(task: Task) -> float:
    """Return how far a run is, by the evaluations it has written."""
    try:
        lines = sum(1 for _ in untrusted.lines(task.folder.metrics_file))
    except VerificationError:
        return 0.0
    return min(0.99, lines / max(1.0, task.cell.config.epochs))


def _note(folder: Path, failed: dict[str, executors.Failure]) -> None:
    """Append failures to the private folder, since their details may hold data values."""
    if failed:
        texts = [f"{name}: {why.reason}\n{why.details}" for name, why in failed.items()]
        durable.append(folder / "private" / "failures.txt", "\n\n".join([*texts, ""]).encode("utf-8", "replace"))
