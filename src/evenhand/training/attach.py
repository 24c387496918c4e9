"""Attach private steps to a user's own loop, model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenhand.accounting.plan import Plan
from evenhand.errors import BudgetExhausted, EvenhandError, LedgerError, PlanMismatchError, UsageError
from evenhand.gradients.doctor.refusals import refuse_wrapped
from evenhand.mechanism.processes.group import Group
from evenhand.mechanism.processes.joint_step import weights_of
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, rehearse
from evenhand.methods import registry
from evenhand.methods.plugins import refuse_other_versions
from evenhand.runs import checkpoints
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger, Reading
from evenhand.runs.os_errors import boundary
from evenhand.runs.run_files import digests, place_recorded_files
from evenhand.terminal import say
from evenhand.training.augment import Augment, Views, views_of
from evenhand.training.guards import model_guards
from evenhand.training.guards.coupling_guard import Coupling
from evenhand.training.guards.model_guards import Compute
from evenhand.training.losses import Loss
from evenhand.training.private import Private
from evenhand.training.rebudget import refuse_waiting
from evenhand.training.steps.followed_ledger import FollowedLedger
from evenhand.training.steps.stateful import Stateful
from evenhand.training.steps.together import facts_of_run

__all__ = ["Private", "attach", "start"]


@boundary()
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    insecure_seed: int | None = None,
    compose: bool = True,
    compute: Compute | None = None,
    augment: str | Augment | None = None,
    views: int = 1,
    extras: Mapping[str, Stateful] | None = None,
    allow_not_finite: bool = False,
) -> Private:
    """Start private training inside your own loop, or continue it; model and optimizer stay yours.

    Args:
      model: any module whose records do not influence each other (checked before the first step).
      optimizer: any torch.optim optimizer over parameters of ``model``.
      loss: ``loss(outputs, targets)`` giving one loss per record.
      plan: from ``evenhand.plan``. With ``resume`` it may be left out; another one than the run has is refused.
      out: folder of the new run; the ledger is written there before every block of steps.
      resume: folder of a run to continue instead: weights, optimizer and extras are put back, a new segment with a new
        key takes the steps that remain, and steps that were charged after the last checkpoint are lost.
      insecure_seed: make the run bit-reproducible. The statement then says that it protects nobody who knows the seed.
      compose: add this run up with earlier ones on the same data; the statement says when that was switched off.
      compute: micro-batches, memory and precision, see ``Compute``; nothing private depends on it.
      augment: "shift", "flip" or "flip+shift:2" for pictures; or a function that gives a random view of every record
        of a batch of inputs, see ``augmenting``.
      views: how many views of a record are averaged before its gradient is bounded.
      extras: objects with ``state_dict`` and ``load_state_dict`` that are saved with every checkpoint, by name, such as
        a learning-rate schedule. Pass all of them again to resume.
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
    seen, group = views_of(augment, views), Group.of_this_process()
    if resume is not None:
        folder = _resumable(resume, plan, out)
        plan = folder.plan()
    elif plan is None or out is None:
        raise UsageError("A new run needs a plan and a folder, attach(..., plan, out=RUN); an old one resume=RUN.")
    else:
        folder = create_together(group, Path(out), plan, model, optimizer, insecure_seed)
    private = start(
        *(model, optimizer, loss, plan, folder, group),
        insecure_seed=insecure_seed,
        compose=compose,
        compute=compute,
        views=seen,
        extras=extras,
        allow_not_finite=allow_not_finite,
        exact_extras=True,
    )
    if resume is not None and group.leads and (lost := private.position - private.restored_position):
        say(
            f"{lost} step(s) were charged but are not in the checkpoint, so their work is lost: a loop of your own "
            "saves what it has with private.checkpoint(), for example after every epoch."
        )
    return private


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan,
    folder: Folder,
    group: Group | None = None,
    *,
    insecure_seed: int | None = None,
    compose: bool = True,
    compute: Compute | None = None,
    views: Views | None = None,
    extras: Mapping[str, Stateful] | None = None,
    allow_not_finite: bool = False,
    release_untrained: bool = False,
    exact_extras: bool = False,
) -> Private:
    """Open the next segment of a run: load the last checkpoint if there is one, take a new key, lock the ledger.

    Of several processes the first does so, and gives the others the key and the checkpoint.

    Args:
      model: trained in place; it stays the caller's.
      optimizer: over its parameters, likewise.
      loss: one value per record.
      plan: of the run.
      folder: of the run.
      group: of the processes that train it together; without one it is this process alone.
      insecure_seed: see ``attach``; so are ``compose``, ``compute`` and ``allow_not_finite``.
      compose: see ``attach``.
      compute: see ``attach``.
      views: random views of the records.
      extras: objects that are saved with every checkpoint, by name. All that a checkpoint contains must be passed
        again: without its average or schedule the run would silently be another one.
      allow_not_finite: see ``attach``.
      release_untrained: go on even if all steps are charged and none of them is in the checkpoint.
      exact_extras: refuse extras that are not in the checkpoint too, which would begin anew in the middle of a run.
    """
    refuse_wrapped(model)
    group = group or Group()
    extras = {**(extras or {}), **({} if views is None else {"augment": views})}
    model_guards.check_optimizer(model, optimizer)
    if plan.packages:
        refuse_other_versions(plan.packages)
    rule = registry.build("rule", **plan.rule)
    memory = rule.initial(plan.facts)
    if group.size > 1:
        group.agree(lambda: facts_of_run(plan, optimizer, insecure_seed, loss=loss, extras=sorted(extras)))
    state, key = group.first(partial(_segment, folder, plan, insecure_seed, release_untrained))
    position = 0 if state is None else int(state["position"])
    if state is not None:
        if exact_extras:
            _refuse_unknown(state, extras)
        _restore(state, model, optimizer, extras)
        memory = state["memory"]
    group.agree(lambda: {"weights": weights_of(model)} if group.size > 1 else {})
    stream = Stream(bytes.fromhex(key), public=insecure_seed is not None)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    mechanism = Mechanism(plan, rule, queries, stream, lean=compute is not None and compute.lean)

    def guards(used: Loss) -> tuple[model_guards.Watch, Coupling]:
        labels, slots = len(plan.facts.labels), plan.facts.records_per_person
        watch = model_guards.Watch(model, used, labels, compute=compute, views=views, slots=slots)
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

    def opened() -> Ledger:
        return Ledger.open(
            folder.ledger_file,
            plan=plan.digest,
            steps=plan.steps,
            key=stream.fingerprint,
            insecure=insecure_seed is not None,
            anchors=folder.anchors() + ([state["ledger_head"]] if state is not None else []),
            files=digests(folder.path),
        )

    ledger = open_together(group, opened)
    try:
        if group.leads:
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
            group=group,
            restored_position=position,
            allow_not_finite=allow_not_finite,
        )
        if state is None:
            private.checkpoint()
        return private
    except BaseException as error:
        group.fail(error)
        with suppress(OSError, LedgerError):
            ledger.close()
        raise


def _segment(
    folder: Folder, plan: Plan, insecure_seed: int | None, release_untrained: bool
) -> tuple[dict[str, Any] | None, str]:
    """Return the checkpoint to go on from, and the key of the segment that begins."""
    state = checkpoints.load(folder, plan)
    reading = folder.ledger() if folder.begun else None
    if reading is not None and not release_untrained:
        _refuse_untrained(folder, reading, 0 if state is None else int(state["position"]))
    segment = 0 if reading is None else len(reading.keys)
    stream = Stream.fresh() if insecure_seed is None else Stream.insecure(insecure_seed, segment)
    return state, stream.key.hex()


def create_together(
    group: Group,
    path: Path,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    insecure_seed: int | None,
) -> Folder:
    """Return the folder of a new run, which process 0 makes once all processes agree on what they train."""
    if group.size > 1:
        group.agree(lambda: facts_of_run(plan, optimizer, insecure_seed) | {"initial weights": weights_of(model)})

    def create() -> None:
        Folder.create(path, plan)

    group.first(create)
    return Folder(path)


def open_together(group: Group, opened: Callable[[], Ledger]) -> Ledger:
    """Return the ledger that process 0 opens, or in the others what they follow of it."""
    if group.size == 1:
        return opened()
    ledgers: list[Ledger] = []

    def state() -> dict[str, int]:
        ledgers.append(opened())
        return FollowedLedger.state_of(ledgers[0])

    told = group.first(state)
    return ledgers[0] if ledgers else FollowedLedger(told)


def _resumable(run: str | Path, plan: Plan | None, out: str | Path | None) -> Folder:
    """Return the folder of a run that a loop can continue; raise if there is nothing to continue, or another plan."""
    if out is not None and Path(out).resolve() != Path(run).resolve():
        raise UsageError("Give out= for a new run or resume= for an old one: a run goes on in its own folder.")
    folder = Folder.existing(run)
    refuse_waiting(folder)
    recorded = folder.plan()
    if plan is not None and plan.digest != recorded.digest:
        raise PlanMismatchError(
            f"The run in {folder.path} was started with another plan, which decides what is charged: leave the plan "
            "out, attach(..., resume=RUN), to go on with its own. For other budgets see evenhand.rebudget; anything "
            "else is a new run. Nothing was spent."
        )
    if (folder.path / "config.toml").exists():
        raise UsageError(
            f"The run in {folder.path} was started by fit, with a loss, a schedule and a goal that a loop of your own "
            f"would not follow: evenhand.resume continues it, on the command line `evenhand resume {folder.path}`."
        )
    if folder.finished():
        raise BudgetExhausted(
            f"The run in {folder.path} is finished: all {recorded.steps} steps are charged and the model is in "
            f"{folder.model_file}. To train on, make a new plan; both budgets add up."
        )
    return folder


def _refuse_untrained(folder: Folder, reading: Reading, position: int) -> None:
    """Raise if all steps are charged and none is in the checkpoint: the released model would be untrained."""
    if reading.reserved >= reading.steps and not reading.survived(position):
        raise BudgetExhausted(
            f"All {reading.steps} steps of the plan are charged, and none of them is in a checkpoint: the run died "
            "before its first one was whole, and what is left is the model as it was before training. Start a new run "
            "with another --out; both budgets add up. To release the untrained model nevertheless: `evenhand resume "
            f"{folder.path} --release-untrained`, in Python resume(..., release_untrained=True)."
        )


def _refuse_unknown(state: Mapping[str, Any], extras: Mapping[str, Stateful]) -> None:
    """Raise if a checkpoint holds no state of one of the extras."""
    for name in sorted(extras.keys() - state.get("kept", {}).keys()):
        raise UsageError(
            f"The run was started without {name}, so its checkpoint holds no state of it: leave it out to resume."
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
