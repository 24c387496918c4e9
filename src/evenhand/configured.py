"""One training as a Config describes it: what ``evenhand train`` and every cell of ``evenhand compare`` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenhand.config import Config
from evenhand.data import Data
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
    return fit(
        config.build_model(data.facts),
        data,
        epsilon=config.epsilon,
        delta=None if config.budgets else config.delta,
        noise=config.noise,
        privacy=Budgets(config.budgets, config.delta) if config.budgets else None,
        method=config.method,
        settings=config.settings,
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        test=held_out,
        out=out,
        insecure_seed=config.insecure_seed,
        compose=config.compose,
        config=config,
        **options,
    )
