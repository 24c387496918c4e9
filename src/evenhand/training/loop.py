"""Run the loop around the private step: learning rates, evaluation, checkpoints, stop by signal, and the release."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from evenhand import durable
from evenhand.data.dataset import Data
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.runs import released_weights
from evenhand.runs.folder import write_durably
from evenhand.runs.ledger import BLOCK
from evenhand.runs.recorder import LOST
from evenhand.training import evaluate
from evenhand.training.goals.serve import Serving, Settled, settle
from evenhand.training.loggers import Broadcast, collect_released
from evenhand.training.optimizers import Schedule
from evenhand.training.private import Private
from evenhand.training.progress import Progress
from evenhand.training.run import Run
from evenhand.training.steps.callbacks import Callbacks
from evenhand.training.steps.spent import largest
from evenhand.training.steps.stateful import Stateful
from evenhand.training.weight_average import Average

CHECKPOINT_SECONDS = 5.0
CHECKPOINT_SHARE = 0.01
"""Checkpoints that time alone asks for take at most this share of it."""


@dataclass(frozen=True)
class Companions:
    """The learning-rate schedule and the average of the weights: they follow the steps and are saved with them."""

    schedule: Schedule | None = None
    average: Average | None = None

    @property
    def by_name(self) -> dict[str, Stateful]:
        """Return those that there are, by the names of ``fit``'s arguments."""
        parts = {"scheduler": self.schedule, "average": self.average}
        return {name: part for name, part in parts.items() if part is not None}

    def catch_up(self, position: int) -> None:
        """Move the schedule past steps that were lost."""
        if self.schedule is not None:
            self.schedule.catch_up(position)

    def before(self, position: int) -> None:
        """Set the learning rate for this position of the plan."""
        if self.schedule is not None:
            self.schedule.go_to(position)

    def after(self) -> None:
        """Add the weights after a step to the average."""
        if self.average is not None:
            self.average.update()

    def shown(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that will be released."""
        return nullcontext() if self.average is None else self.average.shown()


def run(
    private: Private,
    data: Data,
    test: Data | None,
    companions: Companions,
    telling: Broadcast,
    progress: bool | None,
    before: Callable[[], Serving] = Serving,
    training_records: bool = False,
    least: int = LEAST,
    callbacks: Callbacks | None = None,
) -> Run:
    """Run all remaining steps with evaluation and checkpoints, release the model, and return the run.

    ``before`` is called before a step is charged, and returns the goal that decisions serve. With ``training_records``
    everything that is measured on ``test`` stays in the folder's ``private`` part; so do figures of groups with fewer
    records in it than ``least``. When one of the ``callbacks`` asks to stop, the charged steps are finished first.
    """
    hooks, group, folder = callbacks or Callbacks((), None, evaluates=False), private.group, private.folder
    output = partial(_tell, private, telling, hooks)
    data = data.on(next(private.model.parameters()).device)
    with (
        private,
        Progress(private.plan, private.position, enabled=progress if group.leads else False) as shown,
        signals() as received,
        telling.training(private.plan) if group.leads else nullcontext(),
    ):
        group.first(lambda: hooks.start(private.plan))
        serving = replace(before(), least=least)
        record = partial(folder.add_metrics, least=least, training_records=training_records)
        group.first(lambda: folder.drop_metrics(private.restored_position))
        saving = Saving(private)
        shown.started(lost=private.position - private.restored_position)
        companions.catch_up(private.position)
        for batch in private.batches(data):
            companions.before(private.position)
            losses = private.step(batch)
            companions.after()
            shown.step(private.position, losses)
            if group.leads and _epoch_ends(private):
                _log(private, losses)
                if test is not None and private.remaining:
                    _evaluate(private, test, companions, output, record, serving)
            if not private.at_block_end:
                continue
            number, stopped = group.largest(private.position, received[0] if received else 0, int(hooks.stopped))
            if number:
                private.checkpoint()
                raise Interrupted(
                    number,
                    f"Stopped after step {private.position} of {private.plan.steps}; nothing is lost. "
                    "Until it ends, every promise counts the whole plan. "
                    f"Continue with: evenhand resume {private.folder.path}",
                )
            if stopped:
                break
            saving.save_if_due()
        private.checkpoint()

        def conclude() -> None:
            """Settle the decision, and measure what is released."""
            if test is None and (decision := serving.decision) is not None:
                decision.write(folder)
            if test is not None and not _measured(private, companions, training_records):
                _evaluate(private, test, companions, output, record, serving, last=True)

        group.first(conclude)
        private.release(companions.average)
    finished = Run(private.folder, private.model)

    def write_pages() -> None:
        """Write report and model card, and tell loggers and callbacks that the run is over."""
        page = folder.private / "report-full.html" if training_records else folder.path / "report.html"
        if test is not None or page.exists():
            finished.report(training_records=training_records).save(page)
        write_durably(folder.path / "model-card.md", finished.card().encode())
        hooks.end(finished)
        telling.finish(finished.folder)

    group.first(write_pages)
    return finished


class Saving:
    """The decision when to write a checkpoint: a crash must lose at most a ``LOST``th of the plan, or a few seconds.

    If writing takes long, checkpoints because of the time are rarer. One in every few seconds is kept for good, so that
    the run can go back to it.
    """

    def __init__(self, private: Private) -> None:
        self._private = private
        self._position, self._time, self._cost = private.position, time.monotonic(), 0.0
        self._kept = self._time
        self._most = max(1, private.plan.steps // LOST)

    def save_if_due(self) -> None:
        """Write a checkpoint if a crash in the next block would lose too many steps, or if enough time has passed."""
        ahead = self._private.position - self._position + min(BLOCK, max(1, self._most // 2))
        started = time.monotonic()
        late = started - self._time > max(CHECKPOINT_SECONDS, self._cost / CHECKPOINT_SHARE)
        if late or ahead > self._most:
            keep = started - self._kept > CHECKPOINT_SECONDS
            self._private.checkpoint(keep=keep)
            self._kept = started if keep else self._kept
            self._position, self._time = self._private.position, time.monotonic()
            self._cost = self._time - started


def _measured(private: Private, companions: Companions, training_records: bool) -> bool:
    """Return whether the last evaluation measured the weights that are about to be released."""
    last: dict[str, Any] = next(reversed(private.folder.metrics(training_records=training_records)), {})
    with companions.shown():
        return bool(last.get("weights") == released_weights.digest(private.model))


def _epoch(private: Private) -> float:
    """Return the expected passes over the data so far."""
    return private.position * private.plan.expected_batch / private.plan.facts.records


def _epoch_ends(private: Private) -> bool:
    """Return whether the last step ended an epoch, or the plan."""
    per_step = private.plan.expected_batch / private.plan.facts.records
    return int(_epoch(private) + 1e-9) > int(_epoch(private) - per_step + 1e-9) or private.remaining == 0


def _evaluate(
    private: Private,
    test: Data,
    companions: Companions,
    output: Callable[[dict[str, Any]], None],
    record: Callable[[dict[str, Any]], dict[str, Any]],
    serving: Serving,
    last: bool = False,
) -> None:
    """Measure the weights that would be released, write a line of metrics, and give what may be shared to ``output``.

    ``record`` writes the line and returns what of it may be shared. The ``last`` evaluation settles the decision,
    writes it, and measures every other strength of the offset too.
    """
    with companions.shown():
        settled = settle(private.folder, private.model, test, serving) if last else Settled(serving.decision)
        line = evaluate.row(private.model, test, private.position, _epoch(private), settled.answering) | settled.line
        line |= {"segment": private.segment, "weights": released_weights.digest(private.model)}
        line |= {"followed": private.followed()}
    output(record(line))


def _tell(private: Private, telling: Broadcast, hooks: Callbacks, line: dict[str, Any]) -> None:
    """Give the released values of an evaluation to loggers and callbacks, once the ledger says so."""
    if telling or hooks:
        private.told()
        values = collect_released(line, largest(private.planned.values()), private.epsilon)
        telling.log(private.position, values)
        if hooks:
            measured = {name: value for name, value in line["metrics"].items() if value is not None}
            hooks.evaluated(private.position, {**measured, **values})


def _log(private: Private, losses: Tensor) -> None:
    """Write raw training values to the private log. No epsilon holds for a stop or a choice that depends on them.

    Of several processes the loss is that of the first one's records.
    """
    line = {
        "step": private.position,
        "loss": losses.mean().item() if len(losses) else None,
        "records": private.drawn,
        "left_out": private.left_out,
    }
    durable.append(private.folder.private / "training.jsonl", json.dumps(line).encode() + b"\n", durable.PRIVATE)


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal after a checkpoint; ``number`` is the signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def stopping() -> list[signal.Signals]:
    """Return the signals that stop a run; SIGHUP is not one of them where it is ignored, as under ``nohup``.

    Examples:
      >>> signal.SIGTERM in stopping()
      True
    """
    hangup: list[signal.Signals] = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
    heard = [number for number in hangup if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *heard]


@contextmanager
def signals() -> Iterator[list[int]]:
    """Yield a list that collects signals to stop, so that charged steps can be finished; a second one stops at once."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with _handled(note):
        yield received


@contextmanager
def stopped_at_once(advice: Callable[[], str]) -> Iterator[None]:
    """Raise `Interrupted` as soon as a signal asks to stop: for work without blocks of steps to finish.

    ``advice`` returns the message: how to go on. Signals arrive in the main thread only.

    Examples:
      >>> try:
      ...     with stopped_at_once(lambda: "Type it again."): signal.raise_signal(signal.SIGTERM)
      ... except Interrupted as stop: print(stop, stop.number == signal.SIGTERM)
      Type it again. True
    """

    def stop(number: int, _frame: Any) -> None:
        raise Interrupted(number, advice())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(stop):
        yield


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install ``handler`` for the signals that stop a run, and restore the handlers before it afterwards."""
    before = {number: signal.signal(number, handler) for number in stopping()}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
