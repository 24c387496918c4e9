"""``attach``: the private step inside a user's own loop, on their own model and optimizer."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import checkpoints, guards, registry
from evenhand.data.fingerprint import fingerprint
from evenhand.data.sampling import PoissonSampler, draw
from evenhand.data.wrapping import Data, wrap
from evenhand.datasets import DatasetLedger
from evenhand.errors import BatchReuseError, DataError, PlanMismatchError
from evenhand.plans import Plan
from evenhand.privacy.ledger import Ledger
from evenhand.recording import Recorder
from evenhand.runs import Folder, sha256, write_json
from evenhand.step import Mechanism, private_gradient, rehearse
from evenhand.streams import Stream
from evenhand.types import Batch

Loss = Callable[[Any, Any], Tensor]
_tokens = itertools.count(int.from_bytes(os.urandom(6), "big"))


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
        folder: Folder,
        ledger: Ledger,
        memory: Mapping[str, Any],
        compose: bool,
    ) -> None:
        self.model, self.optimizer, self.plan, self.folder = model, optimizer, mechanism.plan, folder
        self._mechanism, self._watch, self._ledger, self._recorder = mechanism, watch, ledger, Recorder(ledger)
        self.memory: Mapping[str, Any] = memory
        self.left_out = 0
        self._position = ledger.reserved
        self._drawn: Batch | None = None
        self._compose = compose
        self._token, self._process, self._lock = next(_tokens), os.getpid(), threading.RLock()

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
            with self._alone():
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
        with self._alone():
            drawn = self._expected(batch)
            started = time.perf_counter()
            if self._watch.changed_elsewhere():
                self._ledger.foreign(self._position)
            result = self._watch.run(batch.inputs, batch.targets)
            if result.norm.shape[0] != len(drawn):
                raise DataError(
                    "The batch does not hold one input per sampled record: augment rows in place, never add any."
                )
            released = private_gradient(self._mechanism, result, drawn, self.memory)
            self._position += 1  # from here on the noise of this position is out: it must never serve a second gradient
            self._drawn = None
            self.memory = released.memory
            self._recorder.add(released.commit, time.perf_counter() - started)
            if self.at_block_end:
                self._recorder.flush()
            self._update(released.gradient)
            self._watch.updated()
            self.left_out += released.left_out
            return result.loss

    def checkpoint(self) -> None:
        """Save what a resume needs: weights, optimizer, memory, and the ledger's head. Only safe types."""
        self._watch.refuse_spoilt()
        self._recorder.flush()
        self._ledger.sync()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": dict(self.memory),
            "position": self._position,
            "plan": self.plan.digest,
            "ledger_head": self._ledger.head,
        }
        checkpoints.save(self.folder, state)

    def release(self) -> None:
        """Write the model and its statement. The ledger records the file's hash."""
        from safetensors.torch import save_model

        self._watch.refuse_spoilt()
        beside = self.folder.model_file.with_suffix(".part")
        save_model(self.model, str(beside))
        os.replace(beside, self.folder.model_file)
        self._recorder.flush()
        self._ledger.release(sha256(self.folder.model_file))
        self.folder.write_statement()

    def close(self) -> None:
        """Write the last commits and let go of the ledger. Safe to call twice."""
        try:
            self._recorder.flush()
        finally:
            self._ledger.close()

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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread of the process that made it: a fork or a race would let noise serve twice."""
        if os.getpid() != self._process:
            raise BatchReuseError(
                "This run belongs to another process: a fork would draw the same noise again. Resume it."
            )
        with self._lock:
            yield

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
    guards.check_optimizer(model, optimizer)
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
    mechanism, watch = Mechanism(plan, rule, queries, stream), guards.Watch(model, loss, len(plan.facts.labels))
    rehearse(mechanism)
    ledger = Ledger.open(
        folder.ledger_file,
        plan=plan.digest,
        steps=plan.steps,
        key=stream.fingerprint,
        insecure=insecure_seed is not None,
        anchors=folder.anchors() + ([state["ledger_head"]] if state is not None else []),
    )
    private = Private(
        model,
        optimizer,
        mechanism=mechanism,
        watch=watch,
        folder=folder,
        ledger=ledger,
        memory=memory,
        compose=compose,
    )
    if state is None:
        private.checkpoint()
    return private
