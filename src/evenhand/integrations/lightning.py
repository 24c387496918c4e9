"""Train a LightningModule privately: ``Trainer(callbacks=[PrivateCallback(...)])``.

The callback takes the place of ``training_step`` and of the optimizer's step, and our Poisson draws that of the
training loader. All else is Lightning's: validation, learning-rate schedules, checkpoints, loggers, early stopping by
held-out metrics. Losses of training records are computed by our step and reach no logger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.accounting.budgets import Promise
from evenhand.accounting.plan import Plan
from evenhand.errors import EvenhandError, UsageError
from evenhand.integrations.ask import Ask, finish
from evenhand.integrations.loaders import EpochLoader, read_loader, refuse_same_records
from evenhand.methods.catalogue import Method
from evenhand.terminal import say
from evenhand.training import losses
from evenhand.training.losses import Loss
from evenhand.training.private import Private
from evenhand.training.run import Run
from evenhand.training.steps.spent import largest

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        Callback = object

_REPLACED = ("training_step", "backward", "optimizer_step")
"""Methods of the strategy that stand for our step while a private fit runs."""
_FOREIGN = ("backward", "optimizer_step", "configure_gradient_clipping", "on_before_batch_transfer")
_FINDERS = ("LearningRateFinder", "BatchSizeFinder")
"""Callbacks that train raw before the fit."""
_FOREIGN_BATCH = ("transfer_batch_to_device", "on_after_batch_transfer")


class PrivateCallback(Callback):  # type: ignore[misc] # Lightning is optional
    """Make ``trainer.fit`` private: every optimizer step is a private step of a plan, charged in a ledger before it.

    The module's ``forward`` gives outputs from inputs, and ``loss`` one value per record from outputs and targets: pass
    it here, or define ``per_record_loss(outputs, targets)`` in the module. ``training_step`` is NOT called. The
    trainer's ``max_epochs`` and the loader's batch size go into the plan. ``private`` is the run while it trains and
    ``run`` the finished one.

    Args:
      epsilon: promise to every record; or give ``privacy`` (Privacy, Budgets, FixedNoise), or a whole ``plan``.
      delta: see ``fit``; so are ``privacy``, ``method``, ``settings``, ``groups`` and ``owners``.
      privacy: see ``delta``.
      method: see ``delta``.
      settings: see ``delta``.
      plan: a plan instead of all these.
      loss: one value per record: a name, or a function of outputs and targets.
      data: the training data, where the loader's dataset does not yield pairs, or has a collate function of its own.
      groups: one name per training record.
      owners: the budget class of each training record.
      batch_size: expected batch size, in place of the loader's.
      out: the run folder; default a new one in runs/.
      resume: continue this run folder instead; not Lightning's ``ckpt_path``, which knows nothing of what was charged.
      options: further arguments of ``evenhand.attach``.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        privacy: Promise | None = None,
        method: str | Method = "dpsgd",
        settings: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        loss: str | Loss | None = None,
        data: Any = None,
        groups: Iterable[Any] | None = None,
        owners: Iterable[Any] | None = None,
        batch_size: float | None = None,
        out: str | Path | None = None,
        resume: str | Path | None = None,
        **options: Any,
    ) -> None:
        if Callback is object:
            raise UsageError("Lightning is not installed: pip install 'evenhand[lightning]'. Nothing was spent.")
        super().__init__()
        self._ask = Ask(epsilon, delta, privacy, method, settings, batch_size, plan, out, resume, options)
        self._loss, self._data, self._names = loss, data, {"groups": groups, "owners": owners}
        self._batch: Any = None
        self._module: nn.Module | None = None
        self._view: nn.Module | None = None
        self.private: Private | None = None
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """Return the finished run: its statement is ``run.privacy``; raise before training has ended."""
        if self._run is None:
            raise UsageError("Nothing is released before training has ended: call trainer.fit(module, loader) first.")
        return self._run

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what would void the promise, make the plan, and put private steps into the trainer."""
        refuse(trainer, pl_module)
        source = trainer.fit_loop._data_source
        rows = read_loader(source.dataloader(), data=self._data, **self._names)
        held_out = trainer.fit_loop.epoch_loop.val_loop._data_source
        if held_out.instance is not None and held_out.is_defined():
            refuse_same_records(rows.data, held_out.dataloader())
        self._module, self._view = pl_module, without_trainer(pl_module)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.private = self._ask.attach(
            *(self._view, trainer.optimizers[0], record_loss(self._loss, self._view), rows.data),
            epochs=trainer.max_epochs,
            batch_size=rows.batch_size,
            extras={f"lr_scheduler_{place}": schedule for place, schedule in enumerate(schedules)},
        )
        facts, steps = rows.data.facts, self.private.plan.steps
        say(f"{steps:,} private steps over {trainer.max_epochs} epochs of {facts.records:,} {facts.units}.")
        source.instance = EpochLoader(self.private, rows.data.on(pl_module.device))
        trainer.fit_loop._combined_loader = None
        strategy = trainer.strategy
        strategy.training_step, strategy.backward = self._take, _no_backward
        strategy.optimizer_step = self._step

    def _take(self, batch: Any, *_: Any) -> Tensor:
        """Remember the batch, and give the trainer a loss of 0: raw losses reach no callback and no logger."""
        self._batch = batch
        return torch.zeros(())

    def _step(self, optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> None:
        """Let the trainer go through its hooks, then take the private step, which moves the optimizer."""
        closure()
        private = self._begun()
        if self._view is not None and self._module is not None:
            self._view.training = self._module.training
        private.step(self._batch)
        self._batch = None

    def _begun(self) -> Private:
        if self.private is None:
            raise UsageError("The private run has not begun: PrivateCallback works in trainer.fit only.")
        return self.private

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop a trainer whose plan is at its end, as that of a resumed run may be before ``max_epochs``."""
        if self.private is not None and not self.private.remaining:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the epsilon of the plan, and that of the steps so far, which is no promise."""
        private = self._begun()
        epsilons = {"epsilon": largest(private.planned.values()), "epsilon_charged": private.epsilon}
        pl_module.log_dict({name: value for name, value in epsilons.items() if value is not None})
        if not private.remaining:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Record in the ledger that figures of the present weights are about to leave the run."""
        if self.private is not None and not trainer.sanity_checking:
            self.private.told()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the run's own checkpoint with Lightning's: only that one can be continued, by ``resume=``."""
        if self.private is not None:
            self.private.told()
            self.private.checkpoint()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Release the model with its statement, which counts the whole plan also if steps of it were not taken."""
        private = self._begun()
        self._run, self.private = finish(private), None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save what can be saved and close the run: ``PrivateCallback(resume=RUN)`` takes the steps that remain."""
        if self.private is not None:
            with suppress(EvenhandError, OSError):
                self.private.checkpoint()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the run if it is open, and give the trainer its own steps back."""
        if self.private is not None:
            self.private.close()
            self.private = None
        for name in _REPLACED:
            vars(trainer.strategy).pop(name, None)


def without_trainer(module: nn.Module) -> nn.Module:
    """Return a view of a module that shares its parameters and layers, and does not know its trainer.

    What a trainer counts changes between steps, and the guards of a run would take it for a part of the model.
    """
    view = copy.copy(module)
    for name in ("_trainer", "_fabric"):
        if name in vars(view):
            vars(view)[name] = None
    return view


def record_loss(loss: str | Loss | None, module: nn.Module) -> Loss:
    """Return the loss with one value per record: as given, or the module's ``per_record_loss``; raise if none is."""
    if loss is not None:
        return losses.named(loss)
    own: Loss | None = getattr(module, "per_record_loss", None)
    if own is None:
        raise UsageError(
            "A private step needs one loss per record, and training_step gives their mean: pass loss= to "
            "PrivateCallback, for example loss=torch.nn.CrossEntropyLoss(reduction='none'), or define "
            "per_record_loss(self, outputs, targets) in the module. Nothing was spent."
        )
    return own


def _no_backward(loss: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the loss of 0 as it is: gradients are those of the private step."""
    return loss


def _overrides(module: Any, names: Iterable[str]) -> list[str]:
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return [name for name in names if getattr(type(module), name, None) is not getattr(base, name, None)]


def _is_a(callback: Any, name: str) -> bool:
    return name in {kind.__name__ for kind in type(callback).__mro__}


def _accumulates(callback: Any) -> bool:
    """Return whether a callback will join batches later, as GradientAccumulationScheduler does."""
    asked: Callable[[], bool] | None = getattr(callback, "going_to_accumulate_grad_batches", None)
    return asked is not None and asked()


def refuse(trainer: Any, module: Any) -> None:
    """Raise for all at once that private steps cannot do of what the trainer or the module is set up for."""
    if messages := [message for refused, message in _refusals(trainer, module) if refused]:
        listed = (
            messages[0]
            if len(messages) == 1
            else "\n- ".join(["The fit cannot be private as it is set up:", *messages])
        )
        raise UsageError(f"{listed}{' ' if len(messages) == 1 else chr(10)}Nothing was spent.")


def _refusals(trainer: Any, module: Any) -> list[tuple[bool, str]]:
    plugin, strategy = type(trainer.precision_plugin).__name__, type(trainer.strategy).__name__
    finders = [name for name in _FINDERS if any(_is_a(callback, name) for callback in trainer.callbacks)]
    foreign, moved = _overrides(module, _FOREIGN[:3]), _overrides(module, (_FOREIGN[3], *_FOREIGN_BATCH))
    return [
        (
            trainer.world_size != 1 or strategy != "SingleDeviceStrategy",
            f"The strategy {strategy} with {trainer.world_size} process(es) would draw batches in each of them, which "
            "is not the sampling that is accounted: Trainer(devices=1, strategy='auto').",
        ),
        (
            plugin != "Precision" or trainer.precision != "32-true",
            f"The precision {trainer.precision} ({plugin}) would change gradients behind the step that bounds them: "
            "leave it out; PrivateCallback(compute=evenhand.Compute(precision='bf16')) runs the model in bfloat16.",
        ),
        (
            trainer.gradient_clip_val is not None,
            "gradient_clip_val clips the mean gradient of a batch, which bounds no record: leave it out. The bound of "
            "each record's gradient is set by the method, settings={'bound': 1.0}.",
        ),
        (
            trainer.accumulate_grad_batches != 1 or any(_accumulates(callback) for callback in trainer.callbacks),
            "accumulate_grad_batches joins batches into one step, and a batch of the plan is one step: leave it out, "
            "and pass compute=evenhand.Compute(micro_batch=64) to save memory.",
        ),
        (
            not module.automatic_optimization or len(trainer.optimizers) != 1,
            "A private fit takes automatic optimization with exactly one optimizer.",
        ),
        (
            trainer.limit_train_batches != 1.0 or trainer.overfit_batches != 0 or bool(trainer.fast_dev_run),
            "fast_dev_run, overfit_batches and limit_train_batches cut epochs off, while a plan charges whole ones: "
            "leave them out, or try the module without PrivateCallback first.",
        ),
        (
            trainer.max_epochs in (None, -1) or trainer.max_steps != -1,
            "The plan needs to know how long training takes: Trainer(max_epochs=...), without max_steps.",
        ),
        (
            isinstance(trainer.val_check_interval, float) and trainer.val_check_interval != 1.0,
            "val_check_interval as a share of an epoch needs a loader with a length, and epochs of a plan differ by a "
            "step: give a number of batches, val_check_interval=50.",
        ),
        (
            bool(finders),
            f"{', '.join(finders)} trains on the training records without privacy and chooses by their losses, which "
            "no epsilon covers: leave it out, and tune on public data.",
        ),
        (
            trainer.reload_dataloaders_every_n_epochs != 0,
            "reload_dataloaders_every_n_epochs would put the loader back in the place of the plan's draws.",
        ),
        (
            trainer.ckpt_path is not None,
            "ckpt_path restores weights without what they have cost: PrivateCallback(resume=RUN) continues a run "
            "with its ledger.",
        ),
        (bool(foreign), f"The module overrides {', '.join(foreign)}, which private steps would not call."),
        (
            bool(moved),
            f"The module overrides {', '.join(moved)}: change records in the dataset, or at random by augment=.",
        ),
        (
            not _overrides(module, ("forward",)),
            "The module has no forward(inputs), which a private step calls in the place of training_step: move what "
            "gives the outputs there, `def forward(self, x): return self.decoder(self.encoder(x))`, and the loss of "
            "each record to `def per_record_loss(self, outputs, targets): return (outputs - targets).square().mean(1)`."
            " Targets are the loader's second part: for an autoencoder the inputs once more, TensorDataset(x, x).",
        ),
    ]
