"""Turn what a person asks of another library's trainer into a plan and a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenhand.accounting.budgets import Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.errors import UsageError
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.methods.catalogue import Method
from evenhand.methods.catalogue import method as find_method
from evenhand.runs.folder import Folder, write_durably
from evenhand.training.attach import attach
from evenhand.training.fit import choose_promise, new_folder
from evenhand.training.losses import Loss
from evenhand.training.private import Private
from evenhand.training.run import Run
from evenhand.training.steps.stateful import Stateful


@dataclass(frozen=True)
class Ask:
    """A promise and how to keep it, in the words of ``fit``; ``plan`` takes the place of all but the folders.

    ``options`` are further arguments of ``attach``: compute, augment, views, compose, insecure_seed, allow_not_finite.
    """

    epsilon: float | None = None
    delta: float | None = None
    privacy: Promise | None = None
    method: str | Method = "dpsgd"
    settings: Mapping[str, Any] | None = None
    batch_size: float | None = None
    plan: Plan | None = None
    out: str | Path | None = None
    resume: str | Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        data: Data,
        *,
        epochs: float,
        batch_size: float,
        extras: Mapping[str, Stateful] | None = None,
    ) -> Private:
        """Start the run, or continue that of ``resume``."""
        if self.resume is not None:
            return attach(model, optimizer, loss, self.plan, resume=self.resume, extras=extras, **self.options)
        promise = choose_promise(self.epsilon, self.delta, None, self.privacy)
        if self.plan is not None and promise is not None:
            raise UsageError("Give a plan or a promise (epsilon=, privacy=), not both: a plan has its promise in it.")
        plan = self.plan or make_plan(
            *(find_method(self.method, self.settings), promise),
            data=data.facts,
            epochs=epochs,
            batch_size=min(self.batch_size or batch_size, data.facts.records),
        )
        out = self.out if self.out is not None else new_folder(plan)
        return attach(model, optimizer, loss, plan, out=out, extras=extras, **self.options)


def finish(private: Private) -> Run:
    """Save, release the model with its statement and card, close the run, and return it."""
    with private:
        private.checkpoint()
        private.release()
    run = Run(Folder(private.folder.path), private.model)
    write_durably(run.path / "model-card.md", run.card().encode())
    return run
