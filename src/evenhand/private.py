"""A model in private training: it draws batches, steps, records, saves and releases. Made by ``attach``."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenhand import checkpoints, guards
from evenhand.averaging import Average
from evenhand.counting import Counting
from evenhand.coupling import Coupling
from evenhand.data.sampling import PoissonSampler, draw
from evenhand.data.wrapping import Data, wrap
from evenhand.errors import BatchReuseError, CoupledError, PlanMismatchError
from evenhand.gradients.randomness import seeded
from evenhand.mechanism import Mechanism
from evenhand.privacy.ledger import Ledger
from evenhand.publishing import publish
from evenhand.recording import Recorder
from evenhand.runs import Folder
from evenhand.step import early_weights, private_gradient
from evenhand.types import Batch

_tokens = itertools.count(int.from_bytes(os.urandom(6), "big"))


class Kept(Protocol):
    """What is saved and restored with a run beside model and optimizer: a learning-rate schedule, an average."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class _Alone:
    """One thread of the process that made it: a fork or a race would let noise serve twice."""

    def __init__(self, run: Private) -> None:
        self._run, self._lock = run, threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._run._process:
            raise BatchReuseError(
                "This run belongs to another process: a fork would draw the same noise again. Resume it."
            )
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


class Private:
    """A model in private training: draws batches, steps, records. Made by ``attach``; close it, or use ``with``.

    It belongs to one process and cannot be copied: a copy would draw the same noise again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mechanism: Mechanism,
        watch: guards.Watch,
        coupling: Coupling,
        folder: Folder,
        ledger: Ledger,
        memory: Mapping[str, Any],
        compose: bool,
        kept: Mapping[str, Kept],
    ) -> None:
        self.model, self.optimizer, self.plan, self.folder = model, optimizer, mechanism.plan, folder
        self._mechanism, self._watch, self._ledger, self._recorder = mechanism, watch, ledger, Recorder(ledger)
        self._coupling = coupling
        self.memory: Mapping[str, Any] = memory
        self.left_out = 0
        self._position = ledger.reserved
        self._drawn: Batch | None = None
        self._counting, self._kept = Counting(folder, mechanism.plan, compose), kept
        self._token, self._process, self._alone = next(_tokens), os.getpid(), _Alone(self)

    @property
    def position(self) -> int:
        """Number of the next step of the plan."""
        return self._position

    @property
    def remaining(self) -> int:
        """Steps of the plan that have neither run nor been lost."""
        return self.plan.steps - self._position

    @property
    def at_block_end(self) -> bool:
        """Whether every charged step has run, so that stopping here loses nothing."""
        return self._position >= self._ledger.reserved

    def batches(self, data: Any) -> Iterator[Batch]:
        """The rows of every remaining step, drawn by the plan's own sampler; feed each to ``step`` exactly once.

        A step is charged, on disk, before its rows are drawn.
        """
        wrapped = wrap(data)
        self._check(wrapped)
        sampler = PoissonSampler(wrapped.owner, self.plan.rates, self._mechanism.stream)
        while self.remaining:
            with self._alone:
                if self._drawn is not None:
                    raise BatchReuseError(
                        f"The batch of step {self._position} was drawn but not stepped. Skipping batches changes the "
                        "sampling that is accounted: call step(batch) for every batch, also empty ones."
                    )
                if self.at_block_end:
                    self._recorder.charge(self.remaining)
                self._drawn = draw(wrapped, sampler, self._position, self._token)
            yield self._drawn

    def step(self, batch: Batch) -> Tensor:
        """Compute, add noise, update; the step was charged when its batch was drawn. Returns losses: NOT private.

        Inputs and targets may have been augmented in place; who was sampled is taken from the draw.
        """
        with self._alone:
            drawn = self._expected(batch)
            started = time.perf_counter()
            if batch is not drawn:
                guards.check_rows(batch.inputs, batch.targets, len(drawn))
            early = early_weights(self._mechanism, drawn, self.memory)
            self._ledger.refuse_blocked()
            with self._blocking():
                if self._coupling.due(self._position):
                    self._coupling.look(self._position, batch.inputs, batch.targets)
                with seeded(self.model, self._mechanism.stream.seed(self._position)):
                    result = self._watch.run(batch.inputs, batch.targets, early)
                self._coupling.agree(result.loss)
            self._note_foreign()
            released = private_gradient(self._mechanism, result, drawn, self.memory)
            self._position += 1  # from here on the noise of this position is out: it must never serve a second gradient
            self._drawn = None
            self.memory = released.memory
            self._recorder.add(released.commit, time.perf_counter() - started)
            if self.at_block_end:
                self._recorder.flush()
            self._update(released.gradient)
            self._watch.updated(thorough=self.at_block_end or self._coupling.due(self._position))
            self.left_out += released.left_out
            return result.loss

    def checkpoint(self) -> None:
        """Save what a resume needs: weights, optimizer, memory, and the ledger's head. Only safe types."""
        self._check_state()
        self._recorder.flush()
        self._ledger.sync()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": dict(self.memory),
            "kept": {name: kept.state_dict() for name, kept in self._kept.items()},
            "position": self._position,
            "plan": self.plan.digest,
            "ledger_head": self._ledger.head,
        }
        checkpoints.save(self.folder, state)
        self._counting.follow()

    def told(self) -> None:
        """Record that figures of the present weights leave the process: to a logger, before it gets them."""
        self._counting.follow()
        self._ledger.told(self._position)

    def release(self, average: Average | None = None) -> None:
        """Write the model and its statement. The ledger records the file's hash.

        With an average that is the model from here on, and the last weights are released beside it.
        """
        self._check_state()
        self._recorder.flush()
        self._ledger.sync()
        self._counting.follow()
        if average is not None:
            publish(self.model, self.folder.last_model_file, self.folder, self._ledger)
            average.apply()
        publish(self.model, self.folder.model_file, self.folder, self._ledger)
        self.folder.write_statement()

    def _check_state(self) -> None:
        """Refuse to let anything out of a run that was blocked, or whose state no private step left."""
        self._ledger.refuse_blocked()
        self._watch.refuse_spoilt()
        with self._blocking():
            self._watch.check_state()
        self._note_foreign()

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """What is found to be coupled is written into the ledger, for good."""
        try:
            yield
        except CoupledError as error:
            self._ledger.blocked(self._position, error.cause)
            raise

    def _note_foreign(self) -> None:
        """Tell the ledger if somebody else wrote weights, or settings of model or loss, since the last step."""
        if self._watch.changed_elsewhere():
            self._ledger.foreign(self._position)

    def close(self) -> None:
        """Write the last commits, let go of the ledger and of the memory for passes. Safe to call twice."""
        try:
            self._recorder.flush()
        finally:
            self._ledger.close()
            self._watch.close()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __copy__(self) -> Private:
        raise BatchReuseError("A private run cannot be copied: the copy would draw the same noise again.")

    def __deepcopy__(self, _: object) -> Private:
        return self.__copy__()

    def __reduce__(self) -> str:
        raise BatchReuseError("A private run cannot be pickled: the copy would draw the same noise again.")

    def _expected(self, batch: Batch) -> Batch:
        if not isinstance(batch, Batch) or batch.token != self._token:
            raise BatchReuseError(
                "This batch was not drawn by this run: iterate over private.batches(data), since only those "
                "rows are sampled as the accountant counts them."
            )
        if self._drawn is None or batch.position != self._position:
            raise BatchReuseError(
                f"The batch of step {batch.position} was used already: every batch is stepped exactly once."
            )
        return self._drawn

    def _check(self, data: Data) -> None:
        if data.facts != self.plan.facts:
            raise PlanMismatchError(
                "The plan was made for data with other public facts (records, owners, groups, labels or "
                "input shape): make the plan from these data's .facts, nothing was spent."
            )
        self._watch.probe(data.fetch(torch.arange(min(4, len(data)))))
        if self.plan.guarantee != "not private":
            self._coupling.prepare(data)
        self._ledger.sync()
        self._counting.begin(data)

    def _update(self, gradient: Mapping[str, Tensor]) -> None:
        trainable = self._watch.trainable
        for name, value in gradient.items():
            parameter = trainable[name]
            parameter.grad = value if value.dtype == parameter.dtype else value.to(parameter.dtype)
        self.optimizer.step()
        for parameter in trainable.values():
            parameter.grad = None
