"""Attach private steps to a user's own loop, model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenhand.accounting.plan import Plan
from evenhand.errors import BudgetExhausted, EvenhandError, LedgerError, UsageError
from evenhand.gradients.doctor.refusals import refuse_wrapped
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, rehearse
from evenhand.methods import registry
from evenhand.runs import checkpoints
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger, Reading
from evenhand.runs.os_errors import boundary
from evenhand.runs.run_files import digests, place_recorded_files
from evenhand.training.augment import Augment, Views, views_of
from evenhand.training.guards import model_guards
from evenhand.training.guards.coupling_guard import Coupling
from evenhand.training.guards.model_guards import Compute
from evenhand.training.losses import Loss
from evenhand.training.private import Private, Stateful

__all__ = ["Private", "attach", "start"]


@boundary()
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan,
    *,
    out: str | Path,
    insecure_seed: int | None = None,
    compose: bool = True,
    compute: Compute | None = None,
    augment: str | Augment | None = None,
    views: int = 1,
    allow_not_finite: bool = False,
) -> Private:
    """Start private training inside your own loop; model and optimizer stay yours.

    Args:
      model: any module whose records do not influence each other (checked before the first step).
      optimizer: any torch.optim optimizer over parameters of ``model``.
      loss: ``loss(outputs, targets)`` giving one loss per record.
      plan: from ``evenhand.plan``.
      out: folder of the run; the ledger is written there before every block of steps.
      insecure_seed: make the run bit-reproducible. The statement then says that it protects nobody who knows the seed.
      compose: add this run up with earlier ones on the same data; the statement says when that was switched off.
      compute: micro-batches, memory and precision, see ``Compute``; nothing private depends on it.
      augment: "shift", "flip" or "flip+shift:2" for pictures; or a function that gives a random view of every record
        of a batch of inputs, see ``augmenting``.
      views: how many views of a record are averaged before its gradient is bounded.
      allow_not_finite: train although more than one record in a hundred holds values that are not finite.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> plan = eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=train.facts, epochs=1, batch_size=128)
      >>> model = torch.nn.Linear(64, 10)
      >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
      >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
      >>> with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp()) as private:
      ...     for batch in private.batches(train):
      ...         losses = private.step(batch)
      >>> private.remaining
      0
    """
    refuse_wrapped(model)
    seen = views_of(augment, views)
    folder = Folder.create(Path(out), plan)
    return start(
        *(model, optimizer, loss, plan, folder),
        insecure_seed=insecure_seed,
        compose=compose,
        compute=compute,
        views=seen,
        allow_not_finite=allow_not_finite,
    )


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan,
    folder: Folder,
    *,
    insecure_seed: int | None = None,
    compose: bool = True,
    compute: Compute | None = None,
    views: Views | None = None,
    extras: Mapping[str, Stateful] | None = None,
    allow_not_finite: bool = False,
    release_untrained: bool = False,
) -> Private:
    """Open the next segment of a run: load the last checkpoint if there is one, take a new key, lock the ledger.

    Args:
      model: trained in place; it stays the caller's.
      optimizer: over its parameters, likewise.
      loss: one value per record.
      plan: of the run.
      folder: of the run.
      insecure_seed: see ``attach``; so are ``compose``, ``compute`` and ``allow_not_finite``.
      compose: see ``attach``.
      compute: see ``attach``.
      views: random views of the records.
      extras: objects that are saved with every checkpoint, by name. All that a checkpoint contains must be passed
        again: without its average or schedule the run would silently be another one.
      allow_not_finite: see ``attach``.
      release_untrained: go on even if all steps are charged and none of them is in the checkpoint.
    """
    refuse_wrapped(model)
    extras = {**(extras or {}), **({} if views is None else {"augment": views})}
    model_guards.check_optimizer(model, optimizer)
    rule = registry.build("rule", **plan.rule)
    memory = rule.initial(plan.facts)
    state = checkpoints.load(folder, plan)
    position = 0 if state is None else int(state["position"])
    reading = folder.ledger() if folder.begun else None
    if reading is not None and not release_untrained:
        _refuse_untrained(folder, reading, position)
    segment = 0 if reading is None else len(reading.keys)
    if state is not None:
        _restore(state, model, optimizer, extras)
        memory = state["memory"]
    stream = Stream.fresh() if insecure_seed is None else Stream.insecure(insecure_seed, segment)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    mechanism = Mechanism(plan, rule, queries, stream, lean=compute is not None and compute.lean)

    def guards(used: Loss) -> tuple[model_guards.Watch, Coupling]:
        watch = model_guards.Watch(model, used, len(plan.facts.labels), compute=compute, views=views)
        computing = compute or Compute()
        coupling = Coupling(
            watch.company,
            stream,
            expected=plan.expected_batch,
            steps=plan.steps,
            limit=computing.micro_batch,
            full=computing.precision == "float32",
        )
        return watch, coupling

    rehearse(mechanism)
    ledger = Ledger.open(
        folder.ledger_file,
        plan=plan.digest,
        steps=plan.steps,
        key=stream.fingerprint,
        insecure=insecure_seed is not None,
        anchors=folder.anchors() + ([state["ledger_head"]] if state is not None else []),
        files=digests(folder.path),
    )
    try:
        place_recorded_files(folder.path, ledger)
        checkpoints.repair_marker(folder)
        if position < ledger.reserved:
            ledger.lost(position, ledger.reserved)
        private = Private(
            model,
            optimizer,
            mechanism=mechanism,
            loss=loss,
            guards=guards,
            folder=folder,
            ledger=ledger,
            memory=memory,
            compose=compose,
            extras=extras,
            restored_position=position,
            allow_not_finite=allow_not_finite,
        )
        if state is None:
            private.checkpoint()
        return private
    except BaseException:
        with suppress(OSError, LedgerError):
            ledger.close()
        raise


def _refuse_untrained(folder: Folder, reading: Reading, position: int) -> None:
    """Raise if all steps are charged and none is in the checkpoint: the released model would be untrained."""
    if reading.reserved >= reading.steps and not reading.survived(position):
        raise BudgetExhausted(
            f"All {reading.steps} steps of the plan are charged, and none of them is in a checkpoint: the run died "
            "before its first one was whole, and what is left is the model as it was before training. Start a new run "
            "with another --out; both budgets add up. To release the untrained model nevertheless: `evenhand resume "
            f"{folder.path} --release-untrained`, in Python resume(..., release_untrained=True)."
        )


def _restore(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, extras: Mapping[str, Stateful]
) -> None:
    """Load a checkpoint into model, optimizer and ``extras``; raise if it does not fit them."""
    missing = sorted(state.get("kept", {}).keys() - extras.keys())
    if missing:
        raise UsageError(f"The run was started with its own {missing[0]}: pass {missing[0]}= again to resume it.")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for name, saved_state in state.get("kept", {}).items():
            extras[name].load_state_dict(saved_state)
    except EvenhandError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        raise UsageError(
            "The checkpoint does not fit the model or the optimizer: pass those that the run was started with. If you "
            "did, the checkpoint is damaged. Nothing was spent."
        ) from None
