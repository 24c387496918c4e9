"""``attach``: the private step inside a user's own loop, on their own model and optimizer."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import checkpoints, registry
from evenhand.data.fingerprint import fingerprint
from evenhand.data.sampling import PoissonSampler, draw
from evenhand.data.wrapping import Data, wrap
from evenhand.datasets import DatasetLedger
from evenhand.errors import BatchReuseError, DataError, PlanMismatchError, UsageError
from evenhand.gradients import Engine, probe
from evenhand.planning import Plan
from evenhand.privacy.ledger import BLOCK, Commit, Ledger
from evenhand.runs import Folder, sha256, write_json
from evenhand.step import Mechanism, private_gradient
from evenhand.streams import Stream
from evenhand.types import Batch

Loss = Callable[[Any, Any], Tensor]
BLOCK_SECONDS = 0.3
"""Reserved blocks cover about this much work: an interrupt waits for the block, a crash loses at most this."""
_tokens = itertools.count(int.from_bytes(os.urandom(6), "big"))


class Private:
    """A model in private training: draws batches, steps, records. Made by ``attach``; close it, or use ``with``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        mechanism: Mechanism,
        engine: Engine,
        folder: Folder,
        ledger: Ledger,
        memory: Mapping[str, Any],
        compose: bool,
    ) -> None:
        self.model, self.optimizer, self.plan, self.folder = model, optimizer, mechanism.plan, folder
        self._loss, self._ledger, self._mechanism, self._engine = loss, ledger, mechanism, engine
        self.memory: Mapping[str, Any] = memory
        self.left_out = 0
        self.position = ledger.reserved
        self._token = next(_tokens)
        self._drawn: int | None = None
        self._compose, self._probed = compose, False
        self._pace = 0.0
        self._commits: list[Commit] = []

    @property
    def remaining(self) -> int:
        """Steps of the plan that are not charged yet or are charged and about to run."""
        return self.plan.steps - self.position

    @property
    def at_block_end(self) -> bool:
        """Whether every charged step has run, so that stopping here loses nothing."""
        return self.position == self._ledger.reserved

    def batches(self, data: Any) -> Iterator[Batch]:
        """The rows of every remaining step, drawn by the plan's own sampler; feed each to ``step`` exactly once."""
        wrapped = wrap(data)
        self._check(wrapped)
        sampler = PoissonSampler(wrapped.owner, self.plan.rates, self._mechanism.stream)
        while self.remaining:
            if self._drawn == self.position:
                raise BatchReuseError(
                    f"The batch of step {self.position} was drawn but not stepped. Skipping batches changes "
                    "the sampling that is accounted: call step(batch) for every batch, also empty ones."
                )
            self._drawn = self.position
            yield draw(wrapped, sampler, self.position, self._token)

    def step(self, batch: Batch) -> Tensor:
        """Charge, compute, add noise, update. Returns the batch's losses, which are NOT private."""
        if not isinstance(batch, Batch) or batch.token != self._token:
            raise BatchReuseError(
                "This batch was not drawn by this run: iterate over private.batches(data), since only those "
                "rows are sampled as the accountant counts them."
            )
        if batch.position != self.position or self._drawn != self.position:
            raise BatchReuseError(
                f"The batch of step {batch.position} was used already: every batch is stepped exactly once."
            )
        started = time.perf_counter()
        if self.at_block_end:
            self._ledger.reserve(self._block())
        result = self._engine.run(batch.inputs, batch.targets)
        if result.norm.shape[0] != len(batch):
            raise DataError(
                "The batch does not hold one input per sampled record: augment rows in place, never add any."
            )
        released = private_gradient(self._mechanism, result, batch, self.memory)
        self.position += 1  # from here on the noise of this position is out: it must never serve a second gradient
        self.memory = released.memory
        self._record(released.commit)
        self._update(released.gradient)
        self.left_out += released.left_out
        elapsed = time.perf_counter() - started
        self._pace = 0.7 * self._pace + 0.3 * elapsed if self._pace else elapsed
        return result.loss

    def checkpoint(self) -> None:
        """Save what a resume needs: weights, optimizer, memory, and the ledger's head. Only safe types."""
        self._flush()
        self._ledger.sync()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": dict(self.memory),
            "position": self.position,
            "plan": self.plan.digest,
        }
        checkpoints.save(self.folder, state, self._ledger.head)

    def release(self) -> None:
        """Write the model and its statement. The ledger records the file's hash."""
        from safetensors.torch import save_model

        beside = self.folder.model_file.with_suffix(".part")
        save_model(self.model, str(beside))
        os.replace(beside, self.folder.model_file)
        self._flush()
        self._ledger.release(sha256(self.folder.model_file))
        self.folder.write_statement()

    def close(self) -> None:
        """Write the last commits and let go of the ledger. Safe to call twice."""
        self._flush()
        self._ledger.close()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self, data: Data) -> None:
        if data.facts != self.plan.facts:
            raise PlanMismatchError(
                "The plan was made for data with other public facts (records, owners, groups, labels or "
                "input shape): make the plan from these data's .facts, nothing was spent."
            )
        if not self._probed:
            inputs, targets = data.fetch(torch.arange(min(4, len(data))))
            probe(self.model, self._loss, inputs, targets)
            self._probed = True
        if not self.folder.composition_file.exists():
            counted = DatasetLedger(fingerprint(data)).enter(self.plan) if self._compose else {"runs": None}
            write_json(self.folder.composition_file, counted)

    def _update(self, gradient: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        self.optimizer.zero_grad(set_to_none=True)
        for name, value in gradient.items():
            parameters[name].grad = value.to(parameters[name].dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _block(self) -> int:
        wanted = int(BLOCK_SECONDS / self._pace) if self._pace else 1
        return max(1, min(BLOCK, wanted, self.remaining))

    def _record(self, commit: Commit) -> None:
        last = self._commits[-1] if self._commits else None
        if last is not None and replace(commit, first=last.first, count=last.count) == last:
            self._commits[-1] = replace(last, count=last.count + 1)
        else:
            self._commits.append(commit)
        if self.at_block_end:
            self._flush()

    def _flush(self) -> None:
        if self._commits:
            self._ledger.commit(self._commits)
            self._commits = []


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan,
    *,
    out: str | Path,
    insecure_seed: int | None = None,
    compose: bool = True,
) -> Private:
    """Start private training inside your own loop; model and optimizer stay yours.

    Args:
      model: any module whose records do not influence each other (checked before the first step).
      optimizer: any torch.optim optimizer over parameters of ``model``.
      loss: ``loss(outputs, targets)`` giving one loss per record.
      plan: from ``evenhand.plan``.
      out: folder of the run; the ledger is written there before every block of steps.
      compose: add this run up with earlier ones on the same data; the statement says when that was switched off.
      insecure_seed: make the run bit-reproducible. The statement then says that it protects nobody who knows the seed.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=train.facts, epochs=1, batch_size=128)
      >>> model = torch.nn.Linear(64, 10)
      >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
      >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
      >>> with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp()) as private:
      ...     for batch in private.batches(train):
      ...         losses = private.step(batch)
      >>> private.remaining
      0
    """
    folder = Folder.create(Path(out), plan)
    return start(model, optimizer, loss, plan, folder, insecure_seed=insecure_seed, compose=compose)


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan,
    folder: Folder,
    *,
    insecure_seed: int | None = None,
    compose: bool = True,
) -> Private:
    """Open the next segment of a run: load the last checkpoint if there is one, take a new key, lock the ledger."""
    _check_optimizer(model, optimizer)
    rule = registry.build("rule", **plan.rule)
    memory = rule.initial(plan.facts)
    state = checkpoints.load(folder, plan)
    segment = len(folder.ledger().segments) if folder.ledger_file.exists() else 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        memory = state["memory"]
    stream = Stream.fresh() if insecure_seed is None else Stream.insecure(insecure_seed, segment)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    mechanism, engine = Mechanism(plan, rule, queries, stream), Engine(model, loss)
    ledger = Ledger.open(
        folder.ledger_file,
        plan=plan.digest,
        steps=plan.steps,
        key=stream.fingerprint,
        insecure=insecure_seed is not None,
    )
    private = Private(
        model,
        optimizer,
        loss,
        mechanism=mechanism,
        engine=engine,
        folder=folder,
        ledger=ledger,
        memory=memory,
        compose=compose,
    )
    if state is None:
        private.checkpoint()
    return private


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    }
    if not own:
        raise UsageError("The model has no trainable parameter: unfreeze one with requires_grad_(True).")
    if held != own:
        raise UsageError(
            "The optimizer does not hold exactly the model's trainable parameters: build it from "
            "[p for p in model.parameters() if p.requires_grad]."
        )
