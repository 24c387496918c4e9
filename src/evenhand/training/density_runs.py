"""Fit the density that a Config describes, evaluate it and write its run folder; or finish one after a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenhand import _validate, density
from evenhand.accounting.budgets import Budgets, Promise
from evenhand.accounting.plan import Plan
from evenhand.data import Data
from evenhand.data.fingerprint import survey
from evenhand.data.record_checks import refuse_training_records
from evenhand.errors import UsageError
from evenhand.mechanism.processes.group import Group, refuse_several
from evenhand.runs import released_weights
from evenhand.runs.folder import Folder, write_durably
from evenhand.training import evaluate, trusted_code
from evenhand.training.config import PYTHON, Config, to_toml
from evenhand.training.guards.promise_audit import audit_before_release, refuse_unauditable
from evenhand.training.loggers import Broadcast, Logger, collect_released
from evenhand.training.loop import stopped_at_once
from evenhand.training.run import Run

if TYPE_CHECKING:
    from torch import nn

    from evenhand.density.base_estimator import PrivateDensity


def read_budgets(config: Config, data: Data) -> Budgets | None:
    """Return the budgets per owner or per record that a config asks for; None if it promises the same to all."""
    if config.record_budgets is not None:
        return Budgets.named(data.facts.owner_names, config.delta)
    return Budgets(config.budgets, config.delta) if config.budgets else None


def estimator(config: Config, out: Path | None) -> PrivateDensity:
    """Return the estimator that a config asks for, which writes into ``out``."""
    kind = getattr(density, density.METHODS[config.method])
    for key in config.settings:
        _validate.known(key, density.settings(config.method), f"setting of {config.method}")
    private_density: PrivateDensity = kind(
        **config.settings, seed=config.seed, insecure_seed=config.insecure_seed, out=out, compose=config.compose
    )
    return private_density


def train(
    config: Config,
    data: Data,
    held_out: Data | None,
    promise: Promise | None,
    out: Path,
    *,
    on_start: Callable[[Plan, float], None] | None = None,
    loggers: Sequence[Logger] = (),
) -> Run:
    """Fit a density and return its run. Every release is a step over all records.

    Releases that are on disk in ``out`` already are used again and not charged twice.
    """
    refuse_several("A density")
    plan = estimator(config, None).plan(data.facts, promise)
    refuse_unauditable(plan, config.audit)
    research = config.training_records
    if held_out is not None and not research:
        refuse_training_records(survey(data), held_out)
    telling = Broadcast(loggers, evaluates=held_out is not None and not research)
    if on_start is not None:
        from evenhand.density.noisy_sums import seconds

        on_start(plan, seconds(data) * plan.steps)

    def before(folder: Folder) -> None:
        write_durably(folder.path / "config.toml", to_toml(config).encode())
        trusted_code.write(folder, data.declared, {"features": config.features})

    def begun(folder: Folder) -> None:
        audit_before_release(Group(), folder, plan, config.audit)

    def after(folder: Folder, model: nn.Module) -> None:
        if held_out is not None:
            line = evaluate.row(model, held_out, plan.steps, float(plan.steps))
            line |= {"segment": len(folder.ledger().keys) - 1, "weights": released_weights.digest(model)}
            folder.drop_metrics(-1)
            line = folder.add_metrics(line, config.least_records, training_records=research)
            spent = max((epsilon for epsilon in plan.epsilons if epsilon is not None), default=None)
            telling.log(plan.steps, collect_released(line, spent, spent))

    with stopped_at_once(lambda: _advice(out)), telling.training(plan):
        fitted = estimator(config, out).fit_data(
            data, promise, before=before, begun=begun, after=after, allow_not_finite=config.allow_not_finite
        )
    finished = Run(fitted.folder, fitted.model_)
    if held_out is not None:
        page = fitted.folder.private / "report-full.html" if research else finished.path / "report.html"
        finished.report(training_records=research).save(page)
    write_durably(finished.path / "model-card.md", finished.card().encode())
    telling.finish(finished.folder)
    return finished


def _advice(out: Path) -> str:
    """Return in words how to continue a density that was stopped."""
    if Folder(out).plan_file.exists():
        return f"Stopped. What was charged stays charged. Continue with: evenhand resume {out}"
    return "Stopped before anything was charged. Type the same command again."


def forget_sums(folder: Folder) -> None:
    """Remove the noisy sums of a density whose model is released, if the process died before it removed them."""
    from evenhand.density.noisy_sums import Sums

    Sums(folder).forget()


def refuse_unfinishable(folder: Folder, config: Config, *, given: bool) -> None:
    """Raise if a density that died cannot be finished by ``resume``; ``given``: its data were passed.

    Raises:
      BudgetExhausted: a release was charged whose noisy sum is lost.
      UsageError: it was fitted in Python, so that its settings are not in the folder.
    """
    from evenhand.density.noisy_sums import Sums

    if folder.begun:
        reading = folder.ledger()
        if reading.released and Sums(folder).read(0) is None:
            raise UsageError(
                "A density has no steps to go on with, and this one has released its model: start another in a new "
                "folder."
            )
        Sums(folder).refuse_lost(folder.plan(), reading.reserved)
    if config.method not in density.METHODS or (config.data == PYTHON and not given):
        if not folder.begun:
            raise UsageError(
                f"This density died before its settings were in {folder.path}, and before anything was charged: type "
                "the command that started it again, with the same --out."
            )
        raise UsageError(
            f"This density was fitted in Python, so its settings are not in the folder: call fit(X, y) again with the "
            f"same settings, the same data and out={str(folder.path)!r}. It takes the releases that are on disk from "
            "there, and charges nothing twice."
        )
