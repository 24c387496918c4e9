"""What a run's config says about how it trains, and how ``resume`` goes on in the same way.

Names and numbers are kept as they are; of an object of the user's own only that there was one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from evenhand.augmenting import Augment, Views, views_of
from evenhand.averaging import EMA
from evenhand.config import PYTHON, Config
from evenhand.guards import Compute
from evenhand.losses import Loss
from evenhand.optimizing import Descent, OptimizerFactory, SchedulerFactory


def settings_of(
    descent: Descent,
    loss: str | Loss | None,
    ema: EMA | None,
    compute: Compute,
    augment: str | Augment | None,
    views: int,
) -> dict[str, Any]:
    """Keys of the run's config.

    Examples:
      >>> kept = settings_of(Descent("adam", 0.1), "focal", None, Compute(lean=True), lambda inputs: inputs, 4)
      >>> [kept[key] for key in ("optimizer", "loss", "lean", "augment", "views")]
      ['adam', 'focal', True, 'python', 4]
    """
    return {
        "loss": _name(loss),
        "optimizer": _name(descent.optimizer),
        "lr": float(descent.lr),
        "momentum": descent.momentum,
        "weight_decay": descent.weight_decay,
        "lr_schedule": _name(descent.scheduler),
        "average": ema.decay if ema is not None and ema.warm_up else None,
        "augment": _name(augment),
        "views": views,
        **dataclasses.asdict(compute),
    }


def descent_again(config: Config, optimizer: OptimizerFactory | None, scheduler: SchedulerFactory | None) -> Descent:
    """As at the start; a schedule of the user's own that is not passed again is missed by the checkpoint."""
    if scheduler is None and config.lr_schedule == PYTHON:
        return Descent(optimizer or config.optimizer, config.lr, scheduler="constant")
    if optimizer is not None:
        given = config.lr_schedule if config.optimizer == PYTHON else "constant"
        return Descent(optimizer, config.lr, scheduler=scheduler or given)
    return Descent(config.optimizer, config.lr, config.momentum, config.weight_decay, scheduler or config.lr_schedule)


def views_again(config: Config, augment: str | Augment | None, views: int) -> Views | None:
    """As at the start; a function of the user's own that is not passed again is missed by the checkpoint."""
    if augment is not None or config.augment is None:
        return views_of(augment, views)
    return None if config.augment == PYTHON else views_of(config.augment, config.views)


def _name(given: object) -> str | None:
    return given if given is None or isinstance(given, str) else PYTHON
