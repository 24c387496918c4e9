"""Train privately in a loop of accelerate: device, precision and trackers are its own, the steps are ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenhand.accounting.budgets import Promise
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.integrations.ask import Ask
from evenhand.integrations.loaders import EpochLoader, read_loader
from evenhand.methods.catalogue import Method
from evenhand.training import losses
from evenhand.training.guards.model_guards import Compute
from evenhand.training.losses import Loss
from evenhand.training.private import Private
from evenhand.training.steps.stateful import Stateful


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    scheduler: Stateful | None = None,
    *,
    loss: str | Loss,
    epochs: float,
    epsilon: float | None = None,
    delta: float | None = None,
    privacy: Promise | None = None,
    method: str | Method = "dpsgd",
    settings: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    data: Any = None,
    groups: Iterable[Any] | None = None,
    owners: Iterable[Any] | None = None,
    batch_size: float | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    extras: Mapping[str, Stateful] | None = None,
    **options: Any,
) -> tuple[Private, EpochLoader]:
    """Prepare a private loop, in the place of ``accelerator.prepare``: return the run, and a loader of its batches.

    The model is put on the accelerator's device; neither it nor the optimizer is wrapped. Iterate over the loader once
    an epoch and call ``private.step(batch)`` for each batch, in the place of ``accelerator.backward`` and
    ``optimizer.step``. Under ``mixed_precision="bf16"`` passes run in bfloat16; norms, sums and noise do not.

    Args:
      accelerator: of one process.
      model: not prepared.
      optimizer: over its parameters, not prepared.
      loader: a DataLoader over the training records; its order is replaced by the plan's Poisson draws.
      scheduler: a learning-rate schedule, which the loop steps as ever; it is saved with every checkpoint.
      loss: one value per record: a name, or a function of outputs and targets.
      epochs: of the plan.
      epsilon: promise to every record; or give ``privacy``, or a whole ``plan``. All that follow are as for
        ``evenhand.fit``.
      delta: see ``epsilon``.
      privacy: see ``epsilon``.
      method: see ``epsilon``.
      settings: see ``epsilon``.
      plan: a plan instead of all these.
      data: the training data, where the loader's dataset does not yield pairs, or has a collate function of its own.
      groups: one name per training record.
      owners: the budget class of each training record.
      batch_size: expected batch size, in place of the loader's.
      out: the run folder; default a new one in runs/.
      resume: continue this run folder instead.
      extras: further objects that are saved with every checkpoint, by name.
      options: further arguments of ``evenhand.attach``.
    """
    precision = refuse(accelerator, model, optimizer)
    rows = read_loader(loader, data=data, groups=groups, owners=owners)
    if precision != "float32":
        options["compute"] = replace(options.get("compute") or Compute(), precision=precision)
    saved = {**(extras or {}), **({} if scheduler is None else {"scheduler": scheduler})}
    model.to(accelerator.device)
    ask = Ask(epsilon, delta, privacy, method, settings, batch_size, plan, out, resume, options)
    private = ask.attach(
        *(model, optimizer, losses.named(loss), rows.data), epochs=epochs, batch_size=rows.batch_size, extras=saved
    )
    return private, EpochLoader(private, rows.data.on(accelerator.device))


def refuse(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the precision of the passes; raise if the accelerator is set up to do what private steps cannot.

    Examples:
      >>> from types import SimpleNamespace
      >>> one = SimpleNamespace(num_processes=1, mixed_precision="no", gradient_accumulation_steps=1)
      >>> refuse(one, nn.Linear(1, 1), None)
      'float32'
    """
    if accelerator.num_processes != 1:
        raise UsageError(
            f"{accelerator.num_processes} processes would each draw batches, which is not the sampling that is "
            "accounted: launch one process. Nothing was spent."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise UsageError(
            "gradient_accumulation_steps joins batches into one step, and a batch of the plan is one step: leave it "
            "out, and pass compute=evenhand.Compute(micro_batch=64) to save memory. Nothing was spent."
        )
    if type(model).__module__.startswith("accelerate") or type(optimizer).__module__.startswith("accelerate"):
        raise UsageError(
            "Model or optimizer went through accelerator.prepare already: pass them as they were before. Nothing was "
            "spent."
        )
    precision = {"no": "float32", "bf16": "bf16"}.get(accelerator.mixed_precision)
    if precision is None:
        raise UsageError(
            f"mixed_precision={accelerator.mixed_precision!r} scales or rounds gradients before they are bounded: use "
            "'no' or 'bf16'. Nothing was spent."
        )
    return precision
