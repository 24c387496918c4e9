"""``PrivateTrainer``: the arguments and methods of ``transformers.Trainer`` on top of ``evenhand.fit``.

It is no subclass: a Trainer's loop shuffles, averages the loss over a batch, clips the batch and scales it, and its
methods hand raw batches, losses and gradients to whoever overrides them. Inherited, each would be a way around the
promise. So there is one loop, that of ``fit``, and what a Trainer's user reads and calls is built around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenhand.accounting.budgets import Promise
from evenhand.accounting.plan import Plan
from evenhand.data import Data
from evenhand.data.fingerprint import survey
from evenhand.data.record_checks import refuse_training_records
from evenhand.errors import UsageError
from evenhand.integrations.transformers import repository
from evenhand.integrations.transformers.arguments import Settings, optimizer_of, settings_of
from evenhand.integrations.transformers.library import base_of, library, setting
from evenhand.integrations.transformers.records import Names, Reader, collator_of
from evenhand.integrations.transformers.relay import Relay, as_metrics
from evenhand.methods.catalogue import Method
from evenhand.reporting.held_out import small_cells
from evenhand.runs.folder import Folder
from evenhand.training import evaluate
from evenhand.training.fit import fit, resume
from evenhand.training.goals.goal import Goal
from evenhand.training.loggers import Logger, MlflowLogger, TensorBoardLogger
from evenhand.training.losses import CrossEntropy, Loss
from evenhand.training.optimizers import OptimizerFactory, SchedulerFactory
from evenhand.training.run import Run
from evenhand.training.steps.callbacks import Stop

_OVERRIDDEN = ("compute_loss", "training_step", "get_train_dataloader", "create_optimizer", "get_batch_samples")


class PrivateTrainer:
    """Train a model of transformers privately, with the arguments of ``transformers.Trainer``.

    Args:
      model: for classification (of records or of tokens), regression or causal language modelling, also with adapters
        of PEFT; only trainable parameters are trained. It is trained in place.
      args: TrainingArguments; every setting is followed, refused with a reason, or has no meaning here, see
        ``arguments``. ``per_device_train_batch_size * gradient_accumulation_steps`` is the expected batch, the first
        factor alone decides memory only.
      data_collator: makes a batch of a list of records, one row for each and of one shape.
      train_dataset: a ``datasets.Dataset``, a torch Dataset of dicts, or ``evenhand.data.wrap(...)``.
      eval_dataset: held-out records, likewise; measured after every epoch and in the report.
      processing_class: the tokenizer: it is declared public, pads, and is saved with the model.
      model_init: makes the model, after ``args.seed`` was set, instead of ``model``.
      compute_loss_func: refused, since it is given a batch: use ``loss``.
      compute_metrics: given predictions and labels of held-out records, after every epoch and by ``evaluate`` and
        ``predict``.
      callbacks: TrainerCallbacks, given released values only, see ``relay``.
      optimizers: an optimizer over the trainable parameters and a scheduler of it, either of them may be None.
      optimizer_cls_and_kwargs: a class of optimizers and its settings, instead.
      preprocess_logits_for_metrics: changes the logits before ``compute_metrics``.
      tokenizer: an earlier name of ``processing_class``.
      epsilon: the promise to every record; or give ``noise`` or ``privacy``; see ``evenhand.fit`` for these,
        ``method``, ``settings``, ``goal``, ``tau`` and ``insecure_seed``.
      delta: see ``evenhand.fit``.
      noise: see ``evenhand.fit``.
      privacy: ``evenhand.Privacy`` or ``evenhand.Budgets``.
      method: a name from ``evenhand methods``.
      settings: of the method.
      groups: a column, or one name per training record: who is reported, and what group rules see.
      owners: a column, or one name per training record: the budget class of each.
      goal: whom the run serves.
      tau: strength of the goal's offset.
      loss: a name or a function with one value per record.
      max_length: the declared number of tokens to which every record is padded, or cut.
      run_folder: where ledger, statement and report are; default ``args.output_dir`` with "-run" behind it, so that
        the folder of the model can be shared whole and the run's private part is not in it.
      loggers: see ``evenhand.fit``; those that ``args.report_to`` names are added.
      insecure_seed: bit-reproducible noise, for research only.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _OVERRIDDEN:
            if name in vars(cls):
                raise UsageError(
                    f"{cls.__name__}.{name} would be given raw batches of training records, and no bound on one record "
                    "would hold for what it returns: pass loss=, a function with one value per record, or optimizers=."
                )

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Any = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise: float | None = None,
        privacy: Promise | None = None,
        method: str | Method = "dpsgd",
        settings: Mapping[str, Any] | None = None,
        groups: Names = None,
        owners: Names = None,
        goal: str | Goal = "overall",
        tau: float | str | None = None,
        loss: str | Loss | None = None,
        max_length: int | None = None,
        run_folder: str | Path | None = None,
        loggers: Sequence[Logger] = (),
        insecure_seed: int | None = None,
    ) -> None:
        if compute_loss_func is not None:
            raise UsageError(
                "compute_loss_func is given a whole batch and returns its mean, which bounds no record: pass loss=, a "
                "name or a function loss(outputs, targets) with one value per record. Nothing was spent."
            )
        if isinstance(eval_dataset, Mapping):
            raise UsageError("eval_dataset is a dict of datasets: pass one of them, and measure others by evaluate().")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError("Steps are taken in one process on one device: start without torchrun or accelerate.")
        self.args = library().TrainingArguments(output_dir="trainer_output") if args is None else args
        self._settings: Settings = settings_of(self.args)
        self.model = _placed(_built(model, model_init, self.args), self.args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = tokenizer if processing_class is None else processing_class
        self.data_collator, self.compute_metrics = data_collator, compute_metrics
        self._preprocess, self._groups, self._owners = preprocess_logits_for_metrics, groups, owners
        self.run_folder = Path(f"{self.args.output_dir}-run" if run_folder is None else run_folder)
        self._run: Run | None = None
        self._begun = False
        self._reader = Reader(
            self.model,
            collator_of(data_collator, self.processing_class, max_length),
            self.processing_class,
            tuple(getattr(self.args, "label_names", None) or ()),
            not getattr(self.args, "remove_unused_columns", True),
        )
        self._descent = _descent(self.args, self.model, self._settings, optimizers, optimizer_cls_and_kwargs)
        smooth = CrossEntropy(self._settings.smoothing) if self._settings.smoothing else None
        self._loss: str | Loss | None = smooth if loss is None else loss
        self._promise: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "noise": noise, "privacy": privacy}
        self._asked: dict[str, Any] = {"method": method, "settings": settings, "goal": goal, "tau": tau}
        self._asked["insecure_seed"] = insecure_seed
        self._relay = Relay(self.args, callbacks)
        self._loggers = [*loggers, *_reported(self.args, self.run_folder)]
        self._relay.send("on_init_end")

    @property
    def state(self) -> Any:
        """Return the TrainerState: ``log_history`` has released values only."""
        return self._relay.state

    @property
    def run(self) -> Run:
        """Return the finished run: its statement is ``run.privacy``; raise before training has ended."""
        return self._finished()

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback, a class or an object."""
        self._relay.callbacks.append(callback() if isinstance(callback, type) else callback)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train, write run folder and report, and save model and card; return a TrainOutput.

        Its ``training_loss`` is NaN, since losses of training records are private. ``resume_from_checkpoint`` continues
        the run: True for that of this trainer, or a run folder.
        """
        if trial is not None:
            raise UsageError("A search trains several times and every trial spends: leave trial out.")
        if self.train_dataset is None:
            raise UsageError("PrivateTrainer needs train_dataset= to train.")
        folder = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else self.run_folder
        data = self._reader.read(self.train_dataset, self._groups, self._owners)
        test = None if self.eval_dataset is None else self._reader.read(self.eval_dataset, *self._columns())
        optimizer, scheduler = self._descent
        common: dict[str, Any] = {"optimizer": optimizer, "compute": self._settings.compute}
        common |= {"loss": self._loss, "test": test, "loggers": self._loggers if test is not None else []}
        common["stop"] = None if test is None else self._after_evaluations(test)
        common["progress"] = False if getattr(self.args, "disable_tqdm", False) else None
        with _as_trained(self.model, bool(getattr(self.args, "use_cache", False))):
            if resume_from_checkpoint:
                existing = _existing(folder)
                if not existing.finished():
                    self._begin(data, existing.plan())
                given = scheduler if callable(scheduler) else None
                run = resume(folder, model=self.model, train=data, scheduler=given, **common)
            else:
                _refuse_begun(folder)
                run = fit(
                    self.model,
                    data,
                    **self._promise,
                    **self._asked,
                    epochs=self._settings.passes(len(data)),
                    batch_size=self._settings.batch_size,
                    scheduler=scheduler,
                    out=folder,
                    on_start=lambda plan, _: self._begin(data, plan),
                    **common,
                )
        return self._finish(run)

    def _begin(self, data: Data, plan: Plan) -> None:
        """Note that weights are about to depend on training records: until the run has ended none may be measured."""
        self._run, self._begun = None, True
        self._relay.announce(len(data), plan.expected_batch, plan.steps)

    def _finish(self, run: Run) -> Any:
        self._run, steps = run, run.folder.ledger().reserved
        values = {"epsilon": run.privacy.epsilon, "delta": run.plan.delta}
        self._relay.conclude(run.evaluations, values, steps)
        if self._settings.saves and callable(getattr(self.model, "save_pretrained", None)):
            self._save(Path(self.args.output_dir))
            self._relay.send("on_save")
        last = as_metrics(run.evaluations[-1]) if run.evaluations else {}
        metrics = {**last, **values, "epoch": self.state.epoch}
        return library().trainer_utils.TrainOutput(steps, float("nan"), metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return figures of held-out records: loss, accuracy, accuracy per group, and those of ``compute_metrics``.

        Groups that are too small to be shared are left out. Training records are refused.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if given is None:
            raise UsageError("PrivateTrainer needs eval_dataset= to evaluate.")
        metrics = self._measured(self._held_out(given), metric_key_prefix)
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})
        self._relay.send("on_evaluate", metrics=dict(metrics))
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """Return a PredictionOutput: logits, labels if there are any, and figures; training records are refused."""
        unlabelled = self._reader.unlabelled(test_dataset)
        first = {"labels": [0] * len(test_dataset)} if unlabelled else {}
        for name, column in first.items():
            test_dataset = test_dataset.add_column(name, column)
        data = self._held_out(test_dataset, grouped=not unlabelled)
        scores, labels = evaluate.compute_scores(self.model, data)
        metrics = {} if unlabelled else self._measured(data, metric_key_prefix)
        given = None if unlabelled else labels.numpy()
        return library().trainer_utils.PredictionOutput(scores.float().numpy(), given, metrics)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write model (of PEFT: the adapter alone), tokenizer and card; nothing is written before training has ended.

        The weights of the whole model are in the run folder, as safetensors, with their ledger.
        """
        self._save(Path(self.args.output_dir if output_dir is None else output_dir))

    def create_model_card(self, **_: Any) -> None:
        """Write the section on this run into the card in ``args.output_dir``, in place of an earlier one."""
        repository.write_card(Path(self.args.output_dir), self._finished())

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refuse: nothing is pushed by itself."""
        raise UsageError(
            "PrivateTrainer pushes nothing: read README.md in the model's folder, then call model.push_to_hub and "
            "tokenizer.push_to_hub. Never push the run folder, whose private part holds raw training values."
        )

    def hyperparameter_search(self, *_: Any, **__: Any) -> None:
        """Refuse: every trial would spend."""
        raise UsageError("A search trains several times and every trial spends: nothing was started.")

    def _save(self, folder: Path) -> None:
        run = self._finished()
        repository.save(folder, self.model, self.processing_class, run)

    def _finished(self) -> Run:
        if self._run is None:
            raise UsageError(
                "Nothing is released before training has ended: call train(), or train(resume_from_checkpoint=True)."
            )
        return self._run

    def _held_out(self, dataset: Any, *, grouped: bool = True) -> Data:
        """Return held-out records with the groups and owners of columns; raise if they hold training records."""
        if self._begun:
            self._finished()
        data = self._reader.read(dataset, *(self._columns() if grouped else ()))
        if self._run is not None:
            self._run.refuse_training_records(data)
        elif self.train_dataset is not None:
            refuse_training_records(survey(self._reader.read(self.train_dataset)), data)
        return data

    def _columns(self) -> tuple[str | None, str | None]:
        """Return the columns of groups and owners, which held-out records have too."""
        groups, owners = (name if isinstance(name, str) else None for name in (self._groups, self._owners))
        return groups, owners

    def _measured(self, data: Data, prefix: str) -> dict[str, float]:
        decision = None if self._run is None else self._run.decision
        row = evaluate.row(self.model, data, self.state.global_step, self.state.epoch or 0.0, decision)
        metrics = as_metrics(small_cells.shareable(row), prefix)
        return metrics | {f"{prefix}_{name.removeprefix(f'{prefix}_')}": v for name, v in self._own(data).items()}

    def _own(self, data: Data) -> Mapping[str, float]:
        """Return what ``compute_metrics`` makes of held-out records."""
        if self.compute_metrics is None:
            return {}
        scores, labels = evaluate.compute_scores(self.model, data)
        logits = scores if self._preprocess is None else self._preprocess(scores, labels)
        given = library().EvalPrediction(predictions=_as_array(logits), label_ids=labels.numpy())
        return self.compute_metrics(given)

    def _after_evaluations(self, test: Data) -> Stop:
        """Return what tells callbacks the values of an evaluation, and says whether one of them asks to stop."""

        def compute_metrics_or_a_callback(step: int, values: Mapping[str, float]) -> bool:  # a failure prints this name
            computed = {name.removeprefix("eval_"): value for name, value in self._own(test).items()}
            return self._relay.asks_to_stop(step, {**values, **computed})

        return compute_metrics_or_a_callback


def _built(model: nn.Module | None, model_init: Callable[[], nn.Module] | None, args: Any) -> nn.Module:
    if (model is None) == (model_init is None):
        raise UsageError("PrivateTrainer needs model= or model_init=, and not both.")
    if model is not None:
        return model
    assert model_init is not None
    library().set_seed(int(getattr(args, "seed", 42)))
    return model_init()


def _placed(model: nn.Module, args: Any) -> nn.Module:
    """Return the model on the first accelerator, unless the arguments ask for the processor."""
    return model.to("cuda") if torch.cuda.is_available() and not getattr(args, "use_cpu", False) else model


def _descent(
    args: Any,
    model: nn.Module,
    settings: Settings,
    optimizers: tuple[Any, Any],
    kind: tuple[Any, dict[str, Any]] | None,
) -> tuple[OptimizerFactory, str | SchedulerFactory]:
    """Return how weights follow the private gradients: by objects of one's own, by a class, or by name."""
    optimizer, scheduler = optimizers
    if optimizer is not None and kind is not None:
        raise UsageError("Pass optimizers= or optimizer_cls_and_kwargs=, and not both.")
    if optimizer is None and scheduler is not None:
        raise UsageError("A scheduler follows its own optimizer: pass both, optimizers=(optimizer, scheduler).")
    if kind is not None:
        made: OptimizerFactory = lambda parameters: kind[0](list(parameters), **kind[1])  # noqa: E731
        return made, settings.scheduler
    if optimizer is None:
        return optimizer_of(args, model), settings.scheduler
    return (lambda _: optimizer), (settings.scheduler if scheduler is None else (lambda _: scheduler))


def _reported(args: Any, folder: Path) -> list[Logger]:
    """Return the loggers that ``report_to`` names."""
    names = getattr(args, "report_to", None) or []
    loggers: list[Logger] = []
    for name in [names] if isinstance(names, str) else names:
        if name == "tensorboard":
            loggers.append(TensorBoardLogger(folder.with_name(f"{folder.name}-tensorboard")))
        elif name == "mlflow":
            loggers.append(MlflowLogger())
        elif name != "none":
            raise UsageError(
                f"report_to={name!r} would be sent raw training losses by its own callback: use 'tensorboard', "
                "'mlflow' or 'none', or pass loggers=, which are given released values."
            )
    return loggers


@contextmanager
def _as_trained(model: nn.Module, use_cache: bool) -> Iterator[None]:
    """Put the model into train mode, its cache of keys and values off; put back the cache and end in eval mode."""
    config = getattr(base_of(model), "config", None)
    before = setting(model, "use_cache")
    if before is not None:
        config.use_cache = use_cache  # type: ignore[union-attr]
    model.train()
    try:
        yield
    finally:
        model.eval()
        if before is not None:
            config.use_cache = before  # type: ignore[union-attr]


def _existing(folder: Path) -> Folder:
    if not (folder / "plan.json").exists():
        raise UsageError(
            f"{folder} is no run of evenhand, so there is nothing to continue: checkpoints of a Trainer cannot be "
            "resumed privately, since what they have seen was not counted."
        )
    return Folder.existing(folder)


def _refuse_begun(folder: Path) -> None:
    before = Folder(folder)
    if before.begun and before.ledger().reserved:  # what stopped before its first charge makes room, as in fit
        raise UsageError(
            f"There is a run in {folder} already: continue it with train(resume_from_checkpoint=True), or give the new "
            "one a folder of its own, run_folder=. Nothing was spent."
        )


def _as_array(values: Any) -> Any:
    return values.float().numpy() if isinstance(values, torch.Tensor) else values
