"""Train as a Config describes it: run by ``evenhand train`` and by every cell of ``evenhand compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenhand import density
from evenhand.accounting.budgets import Budgets, Promise
from evenhand.accounting.plan import Plan
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.mechanism.make_plan import plan
from evenhand.methods.catalogue import method
from evenhand.training import density_runs, trusted_code
from evenhand.training.config import Config
from evenhand.training.density_runs import read_budgets
from evenhand.training.fit import choose_promise, fit, new_folder
from evenhand.training.guards.model_guards import Compute
from evenhand.training.run import Run
from evenhand.types import Facts, PriorKind

__all__ = ["fit_options", "planned", "read_budgets", "train"]


def train(config: Config, data: Data, held_out: Data | None, out: Path | None, **options: Any) -> Run:
    """Fit the configured model to loaded data and return its run; ``options`` go to ``fit``.

    Examples:
      >>> import tempfile
      >>> config = Config(epsilon=3.0, epochs=1)
      >>> train(config, *config.load_data(), out=Path(tempfile.mkdtemp())).privacy.epsilon <= 3
      True
    """
    trusted_code.remember((config.model, config.features))
    if config.method in density.METHODS:
        return _density(config, data, held_out, out, **options)
    return fit(config.build_model(data.facts), data, test=held_out, out=out, **{**fit_options(config, data), **options})


def fit_options(config: Config, data: Data) -> dict[str, Any]:
    """Return what ``fit`` is told besides model, data and folder: promise, method, descent and so on.

    Examples:
      >>> fit_options(Config(epsilon=3.0), Config().load_data()[0])["method"]
      'dpsgd'
    """
    privacy = _only_budgets(config, data)
    return {
        "epsilon": config.epsilon,
        "delta": config.delta if privacy is None else None,
        "noise": config.noise,
        "privacy": privacy,
        "method": config.method,
        "settings": config.settings,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "loss": config.loss,
        "lr": config.lr,
        "optimizer": config.optimizer,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "scheduler": config.lr_schedule,
        "average": config.average,
        "augment": config.augment,
        "views": config.views,
        "compute": Compute(config.micro_batch, config.lean, config.precision),
        "insecure_seed": config.insecure_seed,
        "compose": config.compose,
        "training_records": config.training_records,
        "allow_not_finite": config.allow_not_finite,
        "prior": tuple(config.prior_counts) or config.prior,
        "goal": config.goal,
        "tau": config.tau,
        "least_records": config.least_records,
        "audit": config.audit,
        "config": config,
    }


def planned(config: Config, facts: Facts, promise: Promise | None, counts: PriorKind | None = None) -> Plan:
    """Return the plan that ``train`` would follow under this promise, for gradient methods and for densities.

    ``counts`` names the counts of labels that are released before the first step, see ``fit.countable``.

    Examples:
      >>> from evenhand import Privacy
      >>> facts = Facts(1000, (("all", 1000),), labels=("a", "b"))
      >>> planned(Config(method="moment_density"), facts, Privacy(1.0)).steps
      2
    """
    if config.method in density.METHODS:
        return density_runs.estimator(config, None).plan(facts, promise)
    chosen = method(config.method, config.settings)
    return plan(chosen, promise, data=facts, epochs=config.epochs, batch_size=config.batch_size, prior=counts)


def _only_budgets(config: Config, data: Data) -> Budgets | None:
    """Return the budgets of a config; raise if it promises the same to all as well."""
    budgets = read_budgets(config, data)
    if budgets is not None and (config.epsilon, config.noise) != (None, None):
        raise UsageError(
            "The budgets of the owners are the promise (budgets or record_budgets in the TOML, --budgets): leave out "
            "epsilon and noise, or the budgets. Nothing was spent."
        )
    return budgets


def _density(
    config: Config, data: Data, held_out: Data | None, out: Path | None, *, progress: bool | None = None, **options: Any
) -> Run:
    """Fit a density and return its run; no progress is shown."""
    if config.goal != "overall" or config.tau is not None or config.prior_counts:
        raise UsageError(
            f"{config.method} releases densities of classes, which have no offsets to train with: goal, tau and "
            "declared counts are for gradient methods. Nothing was spent."
        )
    budgets = _only_budgets(config, data)
    promise = choose_promise(config.epsilon, config.delta if budgets is None else None, config.noise, budgets)
    folder = out if out is not None else new_folder(planned(config, data.facts, promise))
    return density_runs.train(config, data, held_out, promise, folder, **options)
