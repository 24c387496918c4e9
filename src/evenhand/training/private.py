"""Train a model privately in a user's loop: draw batches, step, record, save and release. Made by ``attach``."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.data.dataset import Data, wrap
from evenhand.data.fingerprint import survey
from evenhand.data.record_checks import LeftOut, check_finite
from evenhand.errors import BatchReuseError, CoupledError, EvenhandError, LedgerError, PlanMismatchError, UsageError
from evenhand.gradients.record_blocks import Blocks
from evenhand.mechanism.processes.group import Group
from evenhand.mechanism.processes.joint_step import Outcome, follow, hand_out, lead
from evenhand.mechanism.release_counts import release_counts
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.mechanism.step import Mechanism, early_weights, private_gradient
from evenhand.methods.priors import Prior
from evenhand.runs import checkpoints
from evenhand.runs.dataset_ledger import Counting
from evenhand.runs.folder import Folder, publish
from evenhand.runs.ledger import Ledger
from evenhand.runs.os_errors import boundary
from evenhand.runs.recorder import Recorder
from evenhand.terminal import say
from evenhand.training.guards import model_guards
from evenhand.training.guards.coupling_guard import Coupling
from evenhand.training.guards.model_guards import SecretDraws
from evenhand.training.losses import Loss
from evenhand.training.optimizers import AdamBC
from evenhand.training.steps.draws import Alone, Draws, Epoch, Source
from evenhand.training.steps.raw_losses import RawLosses
from evenhand.training.steps.spent import Spent, how_to_go_on, largest
from evenhand.training.steps.stateful import Stateful
from evenhand.training.steps.together import facts_of_data
from evenhand.training.weight_average import Average
from evenhand.types import Batch, Pass, State

_tokens = itertools.count(int.from_bytes(os.urandom(6), "big"))


class Private:
    """A model in private training: draws batches, steps, records. Made by ``attach``; close it, or use ``with``.

    Model and optimizer stay the caller's. It belongs to one process and cannot be copied: a copy would draw the same
    noise again. ``restored_position`` is the position of the checkpoint that it began with, ``drawn`` how many records
    all processes together drew for the last step (secret), ``group`` these processes.
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
        group: Group,
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
        self.restored_position, self.drawn = restored_position, 0
        self._secret = SecretDraws(model, mechanism.stream, group.rank)
        self._counting, self._extras = Counting(folder, mechanism.plan, compose), extras
        self._process, self._alone = os.getpid(), Alone(self)
        self.group = group
        group.advice = partial(how_to_go_on, self.plan, ledger, folder)
        self._draws = Draws(self.plan, self._recorder, folder, next(_tokens), self._alone, group)

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
        return self._draws.position

    @property
    def remaining(self) -> int:
        """Return how many steps of the plan have neither run nor been lost."""
        return self.plan.steps - self._draws.position

    @property
    def at_block_end(self) -> bool:
        """Return whether every charged step has run, so that stopping here loses nothing."""
        return self._draws.position >= self._ledger.reserved

    @cached_property
    def _spent(self) -> Spent:
        return Spent(self.plan, self._ledger)

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon that the steps charged so far have spent for the dearest owner; see ``epsilons``."""
        return largest(self.epsilons.values())

    @property
    def epsilons(self) -> dict[str, float | None]:
        """Return the epsilon that the steps charged so far have spent, by owner; None where no epsilon holds.

        It contains the prior that the plan names, and steps that were charged and lost. It is computed once for every
        charge, so that a loop may ask in every step. It is NOT the promise: whoever stops by looking at this run has
        what ``planned`` says, and so says the statement. Other runs on the same data come on top.
        """
        return self._spent.by_owner()

    @property
    def planned(self) -> dict[str, float | None]:
        """Return the epsilon of the whole plan by owner: what the statement says, wherever the run is stopped."""
        return self._spent.planned()

    def batches(self, data: Any, *, ahead: int = 0) -> Iterator[Batch]:
        """Yield the rows of every remaining step, drawn by the plan's own sampler; give each to ``step`` exactly once.

        One pass is the whole plan, not one epoch: for those see ``epochs``. A step is charged, on disk, before its rows
        are drawn. If the loop is left, the next pass goes on where it was, with the batches that were drawn already.

        Args:
          data: that the plan was made for.
          ahead: how many batches may be drawn before the one to be stepped next is; their order stays. Those that are
            never stepped are lost, and stay charged.
        """
        source = self._source(data)
        if self._draws.stepped and not self.remaining:
            say(
                f"All {self.plan.steps} steps of the plan have been taken, so this pass has no batches: one pass over "
                "private.batches(data) runs the whole plan. For one epoch at a time: for epoch in private.epochs(data)."
            )
        yield from self._draws.deliver(source, self.plan.steps, ahead)

    def epochs(self, data: Any, *, ahead: int = 0) -> Iterator[Epoch]:
        """Yield the epochs of the plan that remain, each an iterator of batches, until all steps are taken.

        An epoch that is left early goes on as the next one: no step is skipped. Arguments are those of ``batches``.
        """
        return self._draws.epochs(self._source(data), ahead)

    def release_prior(self, data: Any) -> Prior | None:
        """Release the noisy counts of labels that the plan names, once in a run, and return them as a prior.

        Every later call, also after a resume, returns the counts that are in the ledger. None without a prior in the
        plan, or if a crash cut the counts short: they may have been seen, and a second release is not in the plan.

        Guarantee: the plan's epsilon contains them; they are on disk before they are returned.
        """
        with self._alone, boundary(self.folder.path):
            if self.plan.prior is None:
                return None
            if self.group.first(lambda: self._ledger.counts is None and not self._ledger.counts_lost):
                wrapped = wrap(data)
                self._check(wrapped)
                self._checked = wrapped, self._watch
                release = partial(release_counts, self.plan, self._mechanism.stream, wrapped)
                self.group.first(lambda: self._ledger.prior(release()))
            fields = self.group.first(lambda: [astuple(prior) for prior in [self.folder.prior()] if prior])
            return Prior(*fields[0]) if fields else None

    def use_loss(self, loss: Loss) -> None:
        """Take another loss than ``attach`` was given, such as one that the prior is in; before the first batch only.

        Raises:
          BatchReuseError: a batch was drawn already: one run has one loss.
        """
        if self._draws.started:
            raise BatchReuseError("Steps were made with the loss so far: give another one before the first batch.")
        self._check_state()
        self._watch.close()
        self._watch, self._coupling = self._guards(loss)

    def step(self, batch: Batch) -> RawLosses:
        """Compute the gradient, add noise, update the weights, and return the raw losses, which are NOT private.

        The step was charged when its batch was drawn. No epsilon holds for a stop, a checkpoint or a setting that is
        chosen by looking at these losses: choose by released values, for which the epsilon of the whole plan holds, or
        fix the choice before training.

        The batch must hold the values that were drawn; another device or precision is no change. Changes belong into
        the dataset, ``augment=`` or the model, where it is looked at whether records stay apart.
        """
        with self._alone:
            pending = self._draws.next_drawn(batch)
            drawn, started = pending.batch, time.perf_counter()
            if batch is not drawn:
                model_guards.check_rows(batch.inputs, batch.targets, len(drawn))
            pending.handed.check(batch.inputs, batch.targets)
            self._ledger.refuse_blocked()
            passes: list[Pass] = []

            def run() -> Pass:
                passes.append(self._passed(batch, drawn))
                return passes[0]

            if self.group.leads:
                outcome = self._lead(pending.whole, run, started)
            else:
                outcome = follow(self.group, pending.whole, run, self._watch.trainable)
                self._draws.advance()
            self.memory, block_over = outcome.memory, self._draws.block_over
            if isinstance(self.optimizer, AdamBC):
                self.optimizer.see_noise(outcome.std / self.plan.expected_batch)
            self._update(outcome.gradient)
            self._watch.updated(thorough=block_over or self._coupling.due(self._draws.position))
            return passes[0].loss.as_subclass(RawLosses)

    def _passed(self, batch: Batch, drawn: Batch) -> Pass:
        """Return the pass over the rows of this process, which are looked at before it where that is due."""
        early = early_weights(self._mechanism, drawn, self.memory)
        summation, part = self._mechanism.summation, self.group.size > 1
        blocks = Blocks(len(drawn), drawn.record_keys, summation, self._mechanism.whole, part)
        looked = self._coupling.due(self._draws.position)
        if looked:
            self._coupling.look(self._draws.position, batch.inputs, batch.targets)
        run = partial(self._watch.run, batch.inputs, batch.targets, early, blocks)
        result = self._secret.run(self._draws.position, run)
        if looked:
            self._coupling.agree(result.loss)
        return result

    def _lead(self, whole: Batch, run: Callable[[], Pass], started: float) -> Outcome:
        """Return what is released of a step, by the process that weighs, adds noise and records."""
        with self._blocking():
            joint = self.group, whole, run, self._mechanism, self._watch.trainable
            result = run() if self.group.size == 1 else lead(*joint)
        with nullcontext() if self.group.size == 1 else self.group.answering(whole.position):
            self._note_foreign()
            released = private_gradient(self._mechanism, result, whole, self.memory)
            self._draws.advance()  # its noise is out from here on: it must never serve a second gradient
            self._seen = released.state
            self._recorder.add(released.commit, time.perf_counter() - started)
            if self._draws.block_over:
                with boundary(self.folder.path):
                    self._recorder.flush()
            self.drawn = len(whole)
            self._rows += len(whole)
            if released.left_out:
                self._left_out.add(released.left_out, self._rows)
        outcome = Outcome(released.gradient, released.memory, released.commit.std)
        if self.group.size > 1:
            hand_out(self.group, whole.position, outcome)
        return outcome

    def checkpoint(self, *, keep: bool = True) -> None:
        """Save what a resume needs: weights, optimizer, memory, and the ledger's head. Only safe types.

        With ``keep`` the checkpoint stays, so that the run can go back to it when budgets are lowered.
        """
        self._check_state()
        if not self.group.leads:
            return
        self._recorder.flush()
        self._ledger.sync()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": dict(self.memory),
            "kept": {name: extra.state_dict() for name, extra in self._extras.items()},
            "position": self._draws.position,
            "plan": self.plan.digest,
            "ledger_head": self._ledger.head,
        }
        with boundary(self.folder.path):
            checkpoints.save(self.folder, state, keep=keep)
            self._counting.follow()

    def told(self) -> None:
        """Record in the ledger that figures of the present weights leave the process; call it before they do."""
        self._counting.follow()
        self._ledger.told(self._draws.position)

    def release(self, average: Average | None = None, *, stopped_independently: bool = False) -> None:
        """Write the model and its statement. The ledger records the file's hash.

        With steps of the plan left, the statement says the epsilon of the whole plan: it holds also if released values
        of this run decided the stop. If raw values decided it (what ``step`` returns), no number holds.

        Args:
          average: becomes the model's weights and is released; the last weights are released beside it.
          stopped_independently: declare that stopping here did not depend on the data in any way (a time limit that was
            fixed before, a power cut). The statement then counts the charged steps alone and names your declaration.
        """
        if self._ledger.closed:
            raise UsageError(
                "The run is closed, so nothing can be released any more: call release() inside the with block. To do "
                f"it now: with eh.attach(..., resume={str(self.folder.path)!r}) as private: private.release()."
            )
        if not self.group.leads:
            self._check_state()
            if average is not None:
                average.apply()
            return
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
            self._ledger.blocked(self._draws.position, error.cause)
            raise

    def _note_foreign(self) -> None:
        """Record in the ledger if other code wrote weights, or settings of model or loss, since the last step."""
        if self._watch.changed_elsewhere():
            self._ledger.foreign(self._draws.position)

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
        """Close. If an error is on its way already, one from closing does not replace it.

        What was paid for is not lost where nothing was released after the last step: the weights are checkpointed.
        """
        if isinstance(error, BaseException):
            self.group.fail(error)
        all_taken = error is None and self._draws.started and not self.remaining
        if all_taken and self.group.leads and not self.folder.finished():
            with suppress(EvenhandError):  # weights that something else changed are not kept; who changed them was told
                self.checkpoint()
                say(
                    "All steps are taken, and nothing was released: call private.release() inside the with block. "
                    f"Nothing is lost: open the run with eh.attach(..., resume={str(self.folder.path)!r}) and call "
                    "release()."
                )
        with nullcontext() if error is None else suppress(OSError, LedgerError), boundary(self.folder.path):
            self.close()

    def __copy__(self) -> Private:
        raise BatchReuseError("A private run cannot be copied: the copy would draw the same noise again.")

    def __deepcopy__(self, _: object) -> Private:
        return self.__copy__()

    def __reduce__(self) -> str:
        raise BatchReuseError("A private run cannot be pickled: the copy would draw the same noise again.")

    def _source(self, data: Any) -> Source:
        """Return the data with their sampler; raise unless they are those of the plan."""
        wrapped = wrap(data)
        self._check(wrapped)
        scales = None if self._mechanism.whole else self.plan.scales
        return Source(wrapped, PoissonSampler(wrapped.owner, self.plan.rates, self._mechanism.stream, scales))

    def _check(self, data: Data) -> None:
        """Raise unless data and model fit the plan, then enter the run into the dataset ledger."""
        if data.facts != self.plan.facts:
            raise PlanMismatchError(
                "The plan was made for data with other public facts (records, owners, groups, labels or "
                "input shape): make the plan from these data's .facts, nothing was spent."
            )
        self.group.agree(lambda: self._check_here(data))
        with boundary(self.folder.path):
            self._ledger.sync()
            self.group.first(lambda: self._counting.begin(data))

    def _check_here(self, data: Data) -> dict[str, str]:
        """Check data and model in this process; return what tells whether all processes have these data."""
        if self._looked is not data:
            check_finite(survey(data), self._allow_not_finite)
            self._looked = data
        checked, self._checked = self._checked, None
        if checked is None or checked[0] is not data or checked[1] is not self._watch or not self._watch.probed:
            self._watch.probe(data.as_drawn.fetch(torch.arange(min(4, len(data)))))
            if self.plan.guarantee != "not private":
                self._coupling.prepare(data.as_drawn)
        return {} if self.group.size == 1 else facts_of_data(data)

    def _update(self, gradient: Mapping[str, Tensor]) -> None:
        """Let the optimizer take one step along the private gradient, and along no other that a parameter may hold."""
        trainable = self._watch.trainable
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            parameter.grad = None
        for name, value in gradient.items():
            parameter = trainable[name]
            parameter.grad = value if value.dtype == parameter.dtype else value.to(parameter.dtype)
        self.optimizer.step()
        for parameter in trainable.values():
            parameter.grad = None
