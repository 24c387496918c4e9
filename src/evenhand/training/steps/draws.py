"""Draw the batches of a run in the order of their steps, some ahead of the steps if the loop asks for it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from evenhand import _validate
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.errors import BatchReuseError
from evenhand.mechanism.processes.group import Group
from evenhand.mechanism.processes.joint_step import rows_of
from evenhand.mechanism.sampling import PoissonSampler, choose
from evenhand.runs.folder import Folder
from evenhand.runs.os_errors import boundary
from evenhand.runs.recorder import Recorder
from evenhand.training.guards.coupling_guard import Handed
from evenhand.types import Batch

AHEAD = 4
"""Batches that worker processes read ahead of the step that runs."""


class _Owned(Protocol):
    _process: int


class Alone:
    """A lock that admits one thread of the process that made the run: a fork or a race could use noise twice."""

    def __init__(self, run: _Owned) -> None:
        self._run, self._lock = run, threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._run._process:
            raise BatchReuseError(
                "This run belongs to another process: a fork would draw the same noise again. Resume it."
            )
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


@dataclass(frozen=True)
class Source:
    """The data of a run, checked, with the sampler that draws from them.

    Up to ``ahead`` further batches are read while a step runs, of steps that are charged already.
    """

    data: Data
    sampler: PoissonSampler

    @property
    def ahead(self) -> int:
        """Return how many batches are read ahead: none, unless worker processes read them."""
        return AHEAD if getattr(self.data.by_record.fetch, "reads_ahead", False) else 0


@dataclass(frozen=True)
class Drawn:
    """A batch as it was drawn, and how it was when it was given to the loop.

    Of several processes each has the rows of its own part in ``batch``; ``whole`` are those of all, without inputs.
    """

    batch: Batch
    handed: Handed
    whole: Batch


class Epoch(Iterator[Batch]):
    """The batches of one epoch of the plan that have not been stepped yet: iterate over it once.

    ``number`` counts from 0, and ``len`` is how many steps it had left when it began. An epoch is a pass over the data
    by expectation: Poisson draws leave some records out and draw others twice.
    """

    def __init__(self, number: int, steps: int, batches: Iterator[Batch]) -> None:
        self.number, self._steps, self._batches = number, steps, batches

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        return self._steps

    def __repr__(self) -> str:
        return f"Epoch({self.number}, {self._steps} steps)"


class Draws:
    """The draws of one segment of a run: each step is charged before its rows are drawn, and drawn once.

    ``position`` is the next step. Batches that were drawn and not stepped wait in the order of their steps, and are
    given again to the next pass: the draw of a step is one draw, whoever asks for it. ``block_over`` says whether the
    last step ended a block of charged ones.
    """

    def __init__(self, plan: Plan, recorder: Recorder, folder: Folder, token: int, alone: Alone, group: Group) -> None:
        self.position = recorder.ledger.reserved
        self.started, self.stepped, self.block_over = False, False, False
        self._plan, self._recorder, self._folder, self._token, self._alone = plan, recorder, folder, token, alone
        self._group = group
        self._begun: dict[int, tuple[Batch, Callable[[], Batch]]] = {}
        self._waiting: deque[Drawn] = deque()
        self._block_ends: set[int] = set()

    def deliver(self, source: Source, end: int, ahead: int) -> Iterator[Batch]:
        """Yield the batches from the next step to ``end``, at most ``ahead`` before the one to be stepped."""
        place, most = 0, _validate.whole(ahead, "ahead", low=0)
        while True:
            with self._alone:
                place = max(place, self.position)
                if place >= end:
                    return
                if place > self.position + most:
                    raise BatchReuseError(
                        f"The batch of step {self.position} was drawn but not stepped. Skipping batches changes the "
                        "sampling that is accounted: call step(batch) for every batch, also empty ones. A loop that "
                        "fetches batches before it needs them says so: batches(data, ahead=1)."
                    )
                batch = self._draw(source, place)
            place += 1
            yield batch

    def epochs(self, source: Source, ahead: int) -> Iterator[Epoch]:
        """Yield the epochs that remain."""
        while self.position < self._plan.steps:
            first, end = self.position, epoch_end(self._plan, self.position)
            yield Epoch(epoch_of(self._plan, first), end - first, self.deliver(source, end, ahead))
            if self.position == first:
                raise BatchReuseError(
                    "No batch of this epoch was stepped: iterate over each epoch before you ask for the next one, "
                    "for epoch in private.epochs(data): for batch in epoch: private.step(batch)."
                )

    def _draw(self, source: Source, place: int) -> Batch:
        """Return the batch of a step, drawn now or before; it is charged on disk before it is drawn."""
        if place < self.position + len(self._waiting):
            return self._waiting[place - self.position].batch
        ledger = self._recorder.ledger
        if place >= ledger.reserved:
            ledger.reserved = self._group.first(lambda: self._charge(source, place), place)
            self._block_ends.add(ledger.reserved)
        self.started = True
        self._begin(source, place)
        whole, read = self._begun.pop(place)
        if source.ahead:
            for later in range(place + 1, min(place + 1 + source.ahead, ledger.reserved, self._plan.steps)):
                self._begin(source, later)
        batch = read()
        self._waiting.append(Drawn(batch, Handed(batch.inputs, batch.targets), whole))
        return batch

    def _begin(self, source: Source, place: int) -> None:
        """Draw the batch of a charged step, once, and let the part of this process be read."""
        if place in self._begun:
            return
        choice = choose(source.data, source.sampler, place, self._token)
        whole = choice.batch
        if self._group.size > 1:
            choice = choice.take(rows_of(whole, self._group.size)[self._group.rank])
        self._begun[place] = whole, choice.begin(source.data, source.sampler)

    def _charge(self, source: Source, place: int) -> int:
        """Charge a block of steps from ``place`` on, durable on return, and return how many are charged by then."""
        with boundary(self._folder.path):
            self._recorder.charge(self._plan.steps - place, least=4 * source.ahead)
        return self._recorder.ledger.reserved

    def next_drawn(self, batch: Batch) -> Drawn:
        """Return the next batch to be stepped, as it was drawn; raise unless ``batch`` is that one."""
        if not isinstance(batch, Batch) or batch.token != self._token:
            raise BatchReuseError(
                "This batch was not drawn by this run: iterate over private.batches(data), since only those "
                "rows are sampled as the accountant counts them."
            )
        if batch.position < self.position:
            raise BatchReuseError(
                f"The batch of step {batch.position} was used already: every batch is stepped exactly once."
            )
        if batch.position > self.position or not self._waiting:
            raise BatchReuseError(
                f"The batch of step {batch.position} was given before that of step {self.position}: batches are "
                "stepped in the order in which they were drawn."
            )
        return self._waiting[0]

    def advance(self) -> None:
        """Go to the next step, as the noise of this one is out."""
        self.position += 1
        self.stepped = True
        self._waiting.popleft()
        self.block_over = self.position in self._block_ends
        self._block_ends.discard(self.position)


def epoch_of(plan: Plan, step: int) -> int:
    """Return the epoch in which a step lies, from 0, as schedules count them.

    Examples:
      >>> import evenhand as eh
      >>> plan = eh.plan("dpsgd", eh.Privacy(3), data=eh.data.digits()[0].facts, epochs=2, batch_size=128)
      >>> [epoch_of(plan, step) for step in (0, 9, 10, 19)], epoch_end(plan, 0), epoch_end(plan, 10), plan.steps
      ([0, 0, 1, 1], 10, 20, 20)
    """
    return int((step + 1e-9) * plan.expected_batch / plan.facts.records)


def epoch_end(plan: Plan, step: int) -> int:
    """Return the first step behind the epoch of ``step``; the plan's end, if that comes first."""
    number = epoch_of(plan, step)
    end = max(step, int((number + 1) * plan.facts.records / plan.expected_batch) - 1)
    while epoch_of(plan, end) == number:
        end += 1
    return min(end, plan.steps)
