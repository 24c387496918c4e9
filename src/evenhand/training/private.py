"""Train a model privately in a user's loop: draw batches, step, record, save and release. Made by ``attach``."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenhand import generators
from evenhand.data.dataset import Data, wrap
from evenhand.data.fingerprint import survey
from evenhand.data.record_checks import LeftOut, check_finite
from evenhand.errors import BatchReuseError, CoupledError, LedgerError, PlanMismatchError
from evenhand.gradients import pass_context
from evenhand.gradients.microbatches import Early
from evenhand.gradients.pass_context import seeded
from evenhand.gradients.record_blocks import Blocks
from evenhand.mechanism.release_counts import release_counts
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, early_weights, private_gradient
from evenhand.methods.priors import Prior
from evenhand.runs import checkpoints
from evenhand.runs.dataset_ledger import Counting
from evenhand.runs.folder import Folder, publish
from evenhand.runs.ledger import Ledger
from evenhand.runs.os_errors import boundary
from evenhand.runs.recorder import Recorder
from evenhand.training.guards import model_guards
from evenhand.training.guards.coupling_guard import Coupling, Handed
from evenhand.training.losses import Loss
from evenhand.training.optimizers import AdamBC
from evenhand.training.weight_average import Average
from evenhand.types import Batch, Pass, State

_tokens = itertools.count(int.from_bytes(os.urandom(6), "big"))


class Stateful(Protocol):
    """An object that is saved and restored with model and optimizer: a learning-rate schedule, an average."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of tensors and plain values only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class _Alone:
    """A lock that admits one thread of the process that made it: a fork or a race could use noise twice."""

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

    Model and optimizer stay the caller's. It belongs to one process and cannot be copied: a copy would draw the same
    noise again. ``restored_position`` is the position of the checkpoint that it began with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mechanism: Mechanism,
        loss: Loss,
        guards: Callable[[Loss], tuple[model_guards.Watch, Coupling]],
        folder: Folder,
        ledger: Ledger,
        memory: Mapping[str, Any],
        compose: bool,
        extras: Mapping[str, Stateful],
        restored_position: int = 0,
        allow_not_finite: bool = False,
    ) -> None:
        self.model, self.optimizer, self.plan, self.folder = model, optimizer, mechanism.plan, folder
        self._mechanism, self._ledger, self._recorder = mechanism, ledger, Recorder(ledger)
        self._guards = guards
        self._watch, self._coupling = guards(loss)
        self.memory: Mapping[str, Any] = memory
        self._left_out, self._rows, self._allow_not_finite = LeftOut(), 0, allow_not_finite
        self._looked: Data | None = None
        self._checked: tuple[Data, model_guards.Watch] | None = None
        self._seen: State | None = None
        self.restored_position, self._position = restored_position, ledger.reserved
        self._drawn: Batch | None = None
        self._started = False
        self._handed, self._draws = Handed(), torch.cuda.is_available()
        self._counting, self._extras = Counting(folder, mechanism.plan, compose), extras
        self._token, self._process, self._alone = next(_tokens), os.getpid(), _Alone(self)

    @property
    def segment(self) -> int:
        """Return the number of this start of the run, from 0."""
        return self._ledger.segment

    @property
    def left_out(self) -> int:
        """Return how many rows were not finite and added nothing, over all steps. NOT private."""
        return self._left_out.count

    def followed(self) -> dict[str, dict[str, float]]:
        """Return bounds and thresholds of the last step by name and group ("" for all), which may be shown.

        They are made of public numbers and noisy answers. Nothing before the first step, or without privacy.
        """
        if self._seen is None or self.plan.guarantee == "not private":
            return {}
        groups, values = self.plan.facts.groups, self._mechanism.rule.followed(self._seen)
        return {
            name: dict(zip(groups if len(column) == len(groups) > 1 else [""], column, strict=True))
            for name, column in values.items()
        }

    @property
    def position(self) -> int:
        """Return the number of the next step of the plan."""
        return self._position

    @property
    def remaining(self) -> int:
        """Return how many steps of the plan have neither run nor been lost."""
        return self.plan.steps - self._position

    @property
    def at_block_end(self) -> bool:
        """Return whether every charged step has run, so that stopping here loses nothing."""
        return self._position >= self._ledger.reserved

    def batches(self, data: Any) -> Iterator[Batch]:
        """Yield the rows of every remaining step, drawn by the plan's own sampler; give each to ``step`` exactly once.

        A step is charged, on disk, before its rows are drawn.
        """
        wrapped = wrap(data)
        self._check(wrapped)
        scales = None if self._mechanism.whole else self.plan.scales
        sampler = PoissonSampler(wrapped.owner, self.plan.rates, self._mechanism.stream, scales)
        while self.remaining:
            with self._alone:
                if self._drawn is not None:
                    raise BatchReuseError(
                        f"The batch of step {self._position} was drawn but not stepped. Skipping batches changes the "
                        "sampling that is accounted: call step(batch) for every batch, also empty ones."
                    )
                if self.at_block_end:
                    with boundary(self.folder.path):
                        self._recorder.charge(self.remaining)
                self._drawn, self._started = draw(wrapped, sampler, self._position, self._token), True
                self._handed = Handed(self._drawn.inputs, self._drawn.targets)
            yield self._drawn

    def release_prior(self, data: Any) -> Prior | None:
        """Release the noisy counts of labels that the plan names, once in a run, and return them as a prior.

        Every later call, also after a resume, returns the counts that are in the ledger. None without a prior in the
        plan, or if a crash cut the counts short: they may have been seen, and a second release is not in the plan.

        Guarantee: the plan's epsilon contains them; they are on disk before they are returned.
        """
        with self._alone:
            if self.plan.prior is not None and self._ledger.counts is None and not self._ledger.counts_lost:
                wrapped = wrap(data)
                self._check(wrapped)
                self._checked = wrapped, self._watch
                row = release_counts(self.plan, self._mechanism.stream, wrapped)
                with boundary(self.folder.path):
                    self._ledger.prior(row)
            return self.folder.prior()

    def use_loss(self, loss: Loss) -> None:
        """Take another loss than ``attach`` was given, such as one that the prior is in; before the first batch only.

        Raises:
          BatchReuseError: a batch was drawn already: one run has one loss.
        """
        if self._started:
            raise BatchReuseError("Steps were made with the loss so far: give another one before the first batch.")
        self._check_state()
        self._watch.close()
        self._watch, self._coupling = self._guards(loss)

    def step(self, batch: Batch) -> Tensor:
        """Compute the gradient, add noise, update the weights, and return the losses, which are NOT private.

        The step was charged when its batch was drawn. No epsilon holds for a stop, a checkpoint or a setting that is
        chosen by looking at these losses: choose by released values, for which the epsilon of the whole plan holds, or
        fix the choice before training.

        Inputs and targets may have been changed in place, but not at random (pass ``augment=``); who was sampled is
        taken from the draw.
        """
        with self._alone:
            drawn = self._expected(batch)
            started = time.perf_counter()
            self._handed.check(batch.inputs, batch.targets)
            if batch is not drawn:
                model_guards.check_rows(batch.inputs, batch.targets, len(drawn))
            early = early_weights(self._mechanism, drawn, self.memory)
            blocks = Blocks(len(drawn), drawn.keys, self._mechanism.summation, self._mechanism.whole)
            self._ledger.refuse_blocked()
            with self._blocking():
                looked = self._coupling.due(self._position)
                if looked:
                    self._coupling.look(self._position, batch.inputs, batch.targets)
                result = self._pass(batch, early, blocks)
                if looked:
                    self._coupling.agree(result.loss)
            self._note_foreign()
            released = private_gradient(self._mechanism, result, drawn, self.memory)
            self._position += 1  # from here on the noise of this position is out: it must never serve a second gradient
            self._drawn = None
            self.memory, self._seen = released.memory, released.state
            self._recorder.add(released.commit, time.perf_counter() - started)
            if self.at_block_end:
                with boundary(self.folder.path):
                    self._recorder.flush()
            if isinstance(self.optimizer, AdamBC):
                self.optimizer.see_noise(released.commit.std / self.plan.expected_batch)
            self._update(released.gradient)
            self._watch.updated(thorough=self.at_block_end or self._coupling.due(self._position))
            self._rows += len(drawn)
            if released.left_out:
                self._left_out.add(released.left_out, self._rows)
            return result.loss

    def _pass(self, batch: Batch, early: Early | None, blocks: Blocks) -> Pass:
        """Run one pass with all random draws from the step's secret seed, and return it.

        A pass that drew from public generators is dropped and run again. As long as no pass draws anything, no
        generator is seeded.
        """
        if not self._draws:
            before = torch.default_generator.get_state(), generators.mark()
            result = self._watch.run(batch.inputs, batch.targets, early, blocks)
            if generators.mark() == before[1] and torch.equal(torch.default_generator.get_state(), before[0]):
                return result
            torch.default_generator.set_state(before[0])
            self._draws = True
        secret = self._mechanism.stream.seed(self._position)
        with seeded(self.model, secret) as draws:
            result = self._watch.run(batch.inputs, batch.targets, early, blocks)
        if not draws.elsewhere():
            return result
        pass_context.every()
        with seeded(self.model, secret):
            return self._watch.run(batch.inputs, batch.targets, early, blocks)

    def checkpoint(self, *, keep: bool = True) -> None:
        """Save what a resume needs: weights, optimizer, memory, and the ledger's head. Only safe types.

        With ``keep`` the checkpoint stays, so that the run can go back to it when budgets are lowered.
        """
        self._check_state()
        self._recorder.flush()
        self._ledger.sync()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": dict(self.memory),
            "kept": {name: extra.state_dict() for name, extra in self._extras.items()},
            "position": self._position,
            "plan": self.plan.digest,
            "ledger_head": self._ledger.head,
        }
        with boundary(self.folder.path):
            checkpoints.save(self.folder, state, keep=keep)
            self._counting.follow()

    def told(self) -> None:
        """Record in the ledger that figures of the present weights leave the process; call it before they do."""
        self._counting.follow()
        self._ledger.told(self._position)

    def release(self, average: Average | None = None, *, stopped_independently: bool = False) -> None:
        """Write the model and its statement. The ledger records the file's hash.

        With steps of the plan left, the statement says the epsilon of the whole plan: it holds also if released values
        of this run decided the stop. If raw values decided it (what ``step`` returns), no number holds.

        Args:
          average: becomes the model's weights and is released; the last weights are released beside it.
          stopped_independently: declare that stopping here did not depend on the data in any way (a time limit that was
            fixed before, a power cut). The statement then counts the charged steps alone and names your declaration.
        """
        with boundary(self.folder.path):
            self._check_state()
            self._recorder.flush()
            self._ledger.sync()
            self._counting.follow()
            if stopped_independently:
                self._ledger.stopped()
            if average is not None:
                publish(self.model, self.folder.last_model_file, self._ledger)
                average.apply()
            publish(self.model, self.folder.model_file, self._ledger)
            self.folder.write_statement()
        self._left_out.summary(self._rows)

    def _check_state(self) -> None:
        """Raise if the run was blocked, or if its state is not the one that the last private step left."""
        self._ledger.refuse_blocked()
        self._watch.refuse_spoilt()
        with self._blocking():
            self._watch.check_state()
        self._note_foreign()

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Block the run in the ledger, for good, if a coupling of records is raised inside."""
        try:
            yield
        except CoupledError as error:
            self._ledger.blocked(self._position, error.cause)
            raise

    def _note_foreign(self) -> None:
        """Record in the ledger if other code wrote weights, or settings of model or loss, since the last step."""
        if self._watch.changed_elsewhere():
            self._ledger.foreign(self._position)

    def close(self) -> None:
        """Write the last commits, unlock the ledger and free the memory of the passes. Safe to call twice."""
        try:
            self._recorder.flush()
        finally:
            self._ledger.close()
            self._watch.close()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close. If an error is on its way already, one from closing does not replace it."""
        with nullcontext() if error is None else suppress(OSError, LedgerError), boundary(self.folder.path):
            self.close()

    def __copy__(self) -> Private:
        raise BatchReuseError("A private run cannot be copied: the copy would draw the same noise again.")

    def __deepcopy__(self, _: object) -> Private:
        return self.__copy__()

    def __reduce__(self) -> str:
        raise BatchReuseError("A private run cannot be pickled: the copy would draw the same noise again.")

    def _expected(self, batch: Batch) -> Batch:
        """Return the batch as it was drawn; raise unless this one is the next to be stepped."""
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
        """Raise unless data and model fit the plan, then enter the run into the dataset ledger."""
        if data.facts != self.plan.facts:
            raise PlanMismatchError(
                "The plan was made for data with other public facts (records, owners, groups, labels or "
                "input shape): make the plan from these data's .facts, nothing was spent."
            )
        if self._looked is not data:
            check_finite(survey(data), self._allow_not_finite)
            self._looked = data
        checked, self._checked = self._checked, None
        if checked is None or checked[0] is not data or checked[1] is not self._watch or not self._watch.probed:
            self._watch.probe(data.fetch(torch.arange(min(4, len(data)))))
            if self.plan.guarantee != "not private":
                self._coupling.prepare(data)
        with boundary(self.folder.path):
            self._ledger.sync()
            self._counting.begin(data)

    def _update(self, gradient: Mapping[str, Tensor]) -> None:
        """Let the optimizer take one step along the private gradient."""
        trainable = self._watch.trainable
        for name, value in gradient.items():
            parameter = trainable[name]
            parameter.grad = value if value.dtype == parameter.dtype else value.to(parameter.dtype)
        self.optimizer.step()
        for parameter in trainable.values():
            parameter.grad = None
