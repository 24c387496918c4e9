"""One training as a Config describes it: what ``evenhand train`` and every cell of ``evenhand compare`` run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import _validate, density, evaluation
from evenhand.accounting.budgets import Budgets, Promise
from evenhand.accounting.plan import Plan
from evenhand.config import Config, to_toml
from evenhand.data import Data
from evenhand.data.row_digests import survey
from evenhand.data.training_overlap import refuse_training_records
from evenhand.guards import Compute
from evenhand.integrations.loggers import Broadcast, Logger, released
from evenhand.methods.catalogue import method
from evenhand.planning import plan
from evenhand.results import Run
from evenhand.runs import Folder, write_durably, write_json
from evenhand.training import OnStart, fit, new_folder
from evenhand.training import promised as promise_of
from evenhand.types import Facts

if TYPE_CHECKING:
    from torch import nn

    from evenhand.density.estimators import PrivateDensity


def train(config: Config, data: Data, held_out: Data | None, out: Path | None, **options: Any) -> Run:
    """``fit`` the configured model on data that were loaded before; ``options`` go to ``fit``.

    Examples:
      >>> import tempfile
      >>> config = Config(epsilon=3.0, epochs=1)
      >>> train(config, *config.load_data(), out=Path(tempfile.mkdtemp())).privacy.epsilon <= 3
      True
    """
    if config.method in density.METHODS:
        return _released(config, data, held_out, out, **options)
    privacy = promised(config, data)
    return fit(
        config.build_model(data.facts),
        data,
        epsilon=config.epsilon,
        delta=config.delta if privacy is None else None,
        noise=config.noise,
        privacy=privacy,
        method=config.method,
        settings=config.settings,
        epochs=config.epochs,
        batch_size=config.batch_size,
        loss=config.loss,
        lr=config.lr,
        optimizer=config.optimizer,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        scheduler=config.lr_schedule,
        average=config.average,
        augment=config.augment,
        views=config.views,
        compute=Compute(config.micro_batch, config.lean, config.precision),
        test=held_out,
        out=out,
        insecure_seed=config.insecure_seed,
        compose=config.compose,
        training_records=config.training_records,
        allow_not_finite=config.allow_not_finite,
        config=config,
        **options,
    )


def promised(config: Config, data: Data) -> Budgets | None:
    """The budgets per owner or per record that a config asks for; None if it promises the same to all."""
    if config.record_budgets is not None:
        return Budgets.named(data.facts.owner_names, config.delta)
    return Budgets(config.budgets, config.delta) if config.budgets else None


def planned(config: Config, facts: Facts, promise: Promise | None) -> Plan:
    """The plan that ``train`` would follow under this promise, for gradient methods and for densities.

    Examples:
      >>> from evenhand import Privacy
      >>> facts = Facts(1000, (("all", 1000),), labels=("a", "b"))
      >>> planned(Config(method="moment_density"), facts, Privacy(1.0)).steps
      2
    """
    if config.method in density.METHODS:
        return _estimator(config, None).plan(facts, promise)
    chosen = method(config.method, config.settings)
    return plan(chosen, promise, data=facts, epochs=config.epochs, batch_size=config.batch_size)


def _released(
    config: Config,
    data: Data,
    held_out: Data | None,
    out: Path | None,
    *,
    on_start: OnStart | None = None,
    loggers: Sequence[Logger] = (),
    progress: bool | None = None,
) -> Run:
    """A density instead of gradient steps: every release is a step over all records, and nothing is to be resumed."""
    budgets = promised(config, data)
    promise = promise_of(config.epsilon, config.delta if budgets is None else None, config.noise, budgets)
    made = planned(config, data.facts, promise)
    research = config.training_records
    if held_out is not None and not research:
        refuse_training_records(survey(data), held_out)
    telling = Broadcast(loggers, evaluates=held_out is not None and not research)
    if on_start is not None:
        from evenhand.density.chunks import seconds

        on_start(made, seconds(data) * made.steps)

    def after(folder: Folder, model: nn.Module) -> None:
        write_durably(folder.path / "config.toml", to_toml(config).encode())
        if data.declared is not None:
            write_json(folder.path / "preprocessing.json", data.declared.to_json())
        if held_out is not None:
            line = evaluation.row(model, held_out, made.steps, float(made.steps))
            metrics = folder.training_metrics_file if research else folder.metrics_file
            write_durably(metrics, (json.dumps(line) + "\n").encode())
            spent = max((epsilon for epsilon in made.epsilons if epsilon is not None), default=None)
            telling.log(made.steps, released(line, spent, spent))

    estimator = _estimator(config, out if out is not None else new_folder(made))
    fitted = estimator.fit_data(data, promise, after=after, allow_not_finite=config.allow_not_finite)
    finished = Run(fitted.folder, fitted.model_)
    if held_out is not None:
        page = fitted.folder.private / "report-full.html" if research else finished.path / "report.html"
        finished.report(training_records=research).save(page)
    write_durably(finished.path / "model-card.md", finished.card().encode())
    return finished


def _estimator(config: Config, out: Path | None) -> PrivateDensity:
    kind = getattr(density, density.METHODS[config.method])
    for key in config.settings:
        _validate.known(key, density.settings(config.method), f"setting of {config.method}")
    made: PrivateDensity = kind(
        **config.settings, seed=config.seed, insecure_seed=config.insecure_seed, out=out, compose=config.compose
    )
    return made
