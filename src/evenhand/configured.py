"""One training as a Config describes it: what ``evenhand train`` and every cell of ``evenhand compare`` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenhand.config import Config
from evenhand.data import Data
from evenhand.guards import Compute
from evenhand.privacy.budgets import Budgets
from evenhand.results import Run
from evenhand.training import fit


def train(config: Config, data: Data, held_out: Data | None, out: Path | None, **options: Any) -> Run:
    """``fit`` the configured model on data that were loaded before; ``options`` go to ``fit``.

    Examples:
      >>> import tempfile
      >>> config = Config(epsilon=3.0, epochs=1)
      >>> train(config, *config.load_data(), out=Path(tempfile.mkdtemp())).privacy.epsilon <= 3
      True
    """
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
        compute=Compute(config.micro_batch, config.lean, config.precision),
        test=held_out,
        out=out,
        insecure_seed=config.insecure_seed,
        compose=config.compose,
        config=config,
        **options,
    )


def promised(config: Config, data: Data) -> Budgets | None:
    """The budgets per owner or per record that a config asks for; None if it promises the same to all."""
    if config.record_budgets is not None:
        return Budgets.named(data.facts.owner_names, config.delta)
    return Budgets(config.budgets, config.delta) if config.budgets else None
