"""``fit`` and ``resume``: the loop around the private step, with evaluation, checkpoints and a stop at the budget."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import _validate, evaluation, pacing
from evenhand.attachment import Loss, Private, start
from evenhand.config import PYTHON, Config, of_run, to_toml
from evenhand.data.wrapping import Data, wrap
from evenhand.errors import BudgetExhausted, UsageError
from evenhand.integrations.loggers import Broadcast, Logger, released
from evenhand.interrupting import Interrupted, signals
from evenhand.methods import Method
from evenhand.methods import method as find_method
from evenhand.planning import Plan
from evenhand.planning import plan as make_plan
from evenhand.privacy.budgets import FixedNoise, Privacy, Promise
from evenhand.progress import Progress
from evenhand.results import Run
from evenhand.runs import Folder, write_durably, write_json

CHECKPOINT_SECONDS = 5.0
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OnStart = Callable[[Plan, float], None]


def fit(
    model: nn.Module,
    train: Any,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise: float | None = None,
    privacy: Promise | None = None,
    method: str | Method = "dpsgd",
    settings: Mapping[str, Any] | None = None,
    epochs: float = 10,
    batch_size: float | None = None,
    lr: float = 0.2,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    test: Any = None,
    groups: Iterable[Any] | None = None,
    owners: Iterable[Any] | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    insecure_seed: int | None = None,
    allow_unproven: bool = False,
    compose: bool = True,
    config: Config | None = None,
    on_start: OnStart | None = None,
    loggers: Sequence[Logger] = (),
) -> Run:
    """Train a model privately, from data to statement and report.

    Args:
      model: your module; it is trained in place.
      train: (X, y), a torch Dataset, or ``evenhand.data.wrap(...)``.
      epsilon: promise to every record; or give ``privacy`` (Privacy, Budgets, FixedNoise), or ``noise``.
      delta: probability that the promise may fail; default the largest power of ten below 1/N.
      noise: a noise multiplier instead of a promise; the statement says what it costs.
      privacy: the promise as an object, for example Budgets.
      method: a name from ``evenhand methods``, or a Method; ``settings`` changes the defaults of a named one.
      settings: see ``method``.
      epochs: expected passes over the data.
      batch_size: expected records per step; default about a tenth of the data, at most 1024.
      lr: learning rate of the default optimizer, SGD with momentum 0.9; it falls linearly to zero.
      optimizer: ``lambda parameters: torch.optim.Adam(parameters)`` instead; its rate stays as given.
      loss: ``loss(outputs, targets)`` with one value per record; default cross-entropy for classes.
      test: held-out data for the report; not covered by the statement.
      groups: one name per training record, when ``train`` is not wrapped yet.
      owners: the budget class of each training record, likewise.
      out: the run folder; default a new one in runs/.
      progress: show progress; default only in a terminal or a notebook.
      insecure_seed: bit-reproducible noise and sampling, for research only.
      allow_unproven: run a method without an established guarantee.
      compose: add this run up with earlier ones on the same data; False is named in the statement.
      config: what the command line was asked, kept in the folder for ``resume``.
      on_start: called with the plan and the estimated seconds before anything is spent; raise in it to stop here.
      loggers: given released values (held-out accuracy, spent epsilon) at each evaluation, see ``integrations``.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> model = torch.nn.Linear(64, 10)
      >>> run = eh.fit(model, train, epsilon=3.0, delta=1e-4, epochs=1, test=test, out=tempfile.mkdtemp())
      >>> run.privacy.epsilon <= 3.0
      True
    """
    data = wrap(train) if groups is None and owners is None else _wrapped(train, groups, owners)
    held_out = None if test is None else wrap(test)
    if test is not None and (test is train or (held_out is not None and held_out.fetch is data.fetch)):
        raise UsageError(
            "The training data were passed as test data: their metrics would reveal training records. Hold records out."
        )
    telling = Broadcast(loggers, evaluates=test is not None)
    chosen = find_method(method, settings)
    promise = _promise(epsilon, delta, noise, privacy)
    made = make_plan(
        chosen, promise, data=data.facts, epochs=epochs, batch_size=batch_size, allow_unproven=allow_unproven
    )
    lr = _validate.number(lr, "lr", low=0)
    folder = Folder.create(Path(out) if out is not None else _new_folder(made), made)
    kept = config or Config(
        data=PYTHON, model=PYTHON, method=made.method, epochs=epochs, lr=lr, insecure_seed=insecure_seed
    )
    write_durably(folder.path / "config.toml", to_toml(kept).encode())
    if data.declared is not None:
        write_json(folder.path / "preprocessing.json", data.declared.to_json())
    used = loss or default_loss(data)
    held = _optimizer(model, lr, optimizer)
    private = start(model, held, used, made, folder, insecure_seed=insecure_seed, compose=compose)

    def before() -> None:
        if on_start is not None:
            on_start(made, pacing.seconds(model, used, made, data.on(next(model.parameters()).device)))

    return _run(private, data, held_out, progress, lr if optimizer is None else None, telling, before)


def resume(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    train: Any = None,
    test: Any = None,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    progress: bool | None = None,
    loggers: Sequence[Logger] = (),
) -> Run:
    """Continue a run that was stopped or killed: a new segment with a new key takes the steps that remain.

    What was charged stays charged: steps that ran after the last checkpoint are lost, and the run says how many.
    Model and data are needed only if the run was not started from the command line.
    """
    folder = Folder.existing(path)
    made, reading = folder.plan(), folder.ledger()
    if reading.released and reading.reserved >= made.steps:
        raise BudgetExhausted(
            f"This run is finished: all {made.steps} steps are charged and the model is in {folder.model_file}. "
            "To train on, make a new plan; both budgets add up."
        )
    config = of_run(folder.path)
    if train is None:
        train, test = config.load_data()
    telling = Broadcast(loggers, evaluates=test is not None)
    data = wrap(train)
    model = model if model is not None else config.build_model(data.facts)
    used = loss or default_loss(data)
    seed = config.insecure_seed
    private = start(model, _optimizer(model, config.lr, optimizer), used, made, folder, insecure_seed=seed)
    held_out = None if test is None else wrap(test)
    return _run(private, data, held_out, progress, config.lr if optimizer is None else None, telling)


def default_loss(data: Data) -> Loss:
    """Cross-entropy for classes, mean squared error for real numbers; always one value per record."""
    _, targets = data.fetch(torch.arange(1))
    if not targets.is_floating_point():
        return nn.CrossEntropyLoss(reduction="none")

    def squared(outputs: Tensor, wanted: Tensor) -> Tensor:
        return (outputs.reshape(wanted.shape) - wanted).square().reshape(wanted.shape[0], -1).mean(1)

    return squared


def _run(
    private: Private,
    data: Data,
    test: Data | None,
    progress: bool | None,
    falling_lr: float | None,
    telling: Broadcast,
    before: Callable[[], None] = lambda: None,
) -> Run:
    data = data.on(next(private.model.parameters()).device)
    with private, Progress(private.plan, private.position, enabled=progress) as shown, signals() as received:
        before()
        saved = time.monotonic()
        shown.started(lost=_lost(private))
        for batch in private.batches(data):
            if falling_lr is not None:
                _set_rate(private, falling_lr)
            losses = private.step(batch)
            shown.step(private.position, losses)
            if _epoch_ends(private):
                _log(private, losses, len(batch))
                if test is not None:
                    _evaluate(private, test, telling)
            if received and private.at_block_end:
                private.checkpoint()
                raise Interrupted(
                    received[0],
                    f"Stopped after step {private.position} of {private.plan.steps}; nothing is lost. "
                    f"Continue with: evenhand resume {private.folder.path}",
                )
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                private.checkpoint()
                saved = time.monotonic()
        private.checkpoint()
        if test is not None and not _evaluated(private):
            _evaluate(private, test, telling)
        private.release()
    run = Run(private.folder, private.model)
    if test is not None:
        run.report().save(private.folder.path / "report.html")
    write_durably(private.folder.path / "model-card.md", run.card().encode())
    return run


def _set_rate(private: Private, lr: float) -> None:
    for group in private.optimizer.param_groups:
        group["lr"] = lr * private.remaining / private.plan.steps


def _epoch(private: Private) -> float:
    return private.position * private.plan.expected_batch / private.plan.facts.records


def _epoch_ends(private: Private) -> bool:
    per_step = private.plan.expected_batch / private.plan.facts.records
    return int(_epoch(private) + 1e-9) > int(_epoch(private) - per_step + 1e-9) or private.remaining == 0


def _evaluate(private: Private, test: Data, telling: Broadcast) -> None:
    line = evaluation.row(private.model, test, private.position, _epoch(private))
    with private.folder.metrics_file.open("a") as file:
        file.write(json.dumps(line) + "\n")
    if telling:
        charged = private.plan.spent_by_owner(private.folder.ledger().reserved)
        telling.log(private.position, released(line, max((e for e in charged if e is not None), default=None)))


def _evaluated(private: Private) -> bool:
    return any(line["step"] == private.position for line in private.folder.metrics())


def _log(private: Private, losses: Tensor, records: int) -> None:
    """Raw training values, for the trainer's eyes only."""
    line = {
        "step": private.position,
        "loss": losses.mean().item() if records else None,
        "records": records,
        "left_out": private.left_out,
    }
    with (private.folder.private / "training.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _lost(private: Private) -> int:
    marker = json.loads((private.folder.private / "checkpoint.json").read_text())
    return private.position - int(marker["position"])


def _optimizer(model: nn.Module, lr: float, factory: OptimizerFactory | None) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UsageError("The model has no trainable parameter: unfreeze one with requires_grad_(True).")
    return factory(trainable) if factory is not None else torch.optim.SGD(trainable, lr=lr, momentum=0.9)


def _promise(
    epsilon: float | None, delta: float | None, noise: float | None, privacy: Promise | None
) -> Promise | None:
    if sum(given is not None for given in (epsilon, noise, privacy)) > 1:
        raise UsageError("Give one of epsilon, noise and privacy: together they would contradict each other.")
    if privacy is not None and delta is not None:
        raise UsageError("Give delta inside the privacy object, for example Privacy(3, delta=1e-5).")
    if noise is not None:
        return FixedNoise(noise, delta)
    return privacy if epsilon is None else Privacy(epsilon, delta)


def _wrapped(train: Any, groups: Iterable[Any] | None, owners: Iterable[Any] | None) -> Data:
    if isinstance(train, tuple) and len(train) == 2:
        return wrap(train[0], train[1], groups=groups, owners=owners)
    return wrap(train, groups=groups, owners=owners)


def _new_folder(made: Plan) -> Path:
    name = f"{made.method}-{made.digest[:8]}"
    number = next(n for n in range(1, 10_000) if not Path("runs", f"{name}-{n}").exists())
    return Path("runs", f"{name}-{number}")
