"""Tune with equal effort: one declared grid for every method, tried on a validation part of the training data.

A trial is an ordinary run at the same promise. It trains on the rest of the training part and is scored on the
validation part; the test data are not touched. What trials learn about the training data is NOT in any epsilon here, so
tuning is for public data, or for who says in the file that this is understood.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand import _validate
from evenhand.comparison.compared_methods import Line
from evenhand.errors import UsageError
from evenhand.reporting import metrics

SCORES = {
    "accuracy": "accuracy",
    "worst": "accuracy_group_min",
    "balanced": "balanced_accuracy",
    "auc": "roc_auc",
}
"""Short names of what trials may be chosen by; any metric by its own name, and ``group:NAME:METRIC``, will do too."""
KEYS = ("lr", "batch_size", "epochs", "momentum", "weight_decay", "average", "optimizer", "lr_schedule")
FIRST_SEED = 10_000
"""Trials start from seeds of their own, far from those of the final runs."""
UNCHARGED = "Tuning is not covered by any epsilon here: choosing by scores on training records reveals them too."
PUBLIC = "Tuning on private data would cost privacy that is not in epsilon here; these data are public."


@dataclass(frozen=True)
class Choice:
    """One point of the grid: keys of the config and settings of the method.

    Examples:
      >>> str(Choice({"lr": 0.5}, {"bound": 1.0}))
      'lr 0.5, bound 1'
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        both = {**self.config, **self.settings}
        return ", ".join(f"{key} {value:g}" if _is_number(value) else f"{key} {value}" for key, value in both.items())


@dataclass(frozen=True)
class Tune:
    """The declared grid, and how its trials are scored.

    Attributes:
      config: values to try per key of the config.
      settings: values to try per setting, for the methods that have it.
      score: what the winner is best in: accuracy, worst, balanced, auc, any other metric (brier, fpr_difference, mae:
        the lower the better), or a metric of one group, group:NAME:METRIC.
      share: part of the training records that trials are scored on.
      seeds: trainings per point of the grid.
      split_seed: decides which records those are; public.
      allow_uncharged_tuning: tune although the data are not public.

    Examples:
      >>> grid = tune({"lr": [0.1, 0.5], "settings": {"bound": [0.5, 1.0, 2.0]}})
      >>> len(grid.choices(Line("dpsgd", "dpsgd"))), len(grid.choices(Line("sgd", "sgd")))
      (6, 2)
      >>> len(grid.choices(Line("moment_density", "moment_density")))  # one release: no rate, no bound
      1
    """

    config: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    score: str = "accuracy"
    share: float = 0.1
    seeds: int = 1
    split_seed: int = 0
    allow_uncharged_tuning: bool = False

    def choices(self, line: Line) -> list[Choice]:
        """Return every point of the grid that this line has, without settings that the line fixes itself."""
        config = {key: values for key, values in self.config.items() if line.steps and key not in line.config}
        settings = {
            key: values for key, values in self.settings.items() if key in line.known and key not in line.settings
        }
        points = itertools.product(*config.values(), *settings.values())
        return [
            Choice(dict(zip(config, point, strict=False)), dict(zip(settings, point[len(config) :], strict=True)))
            for point in points
        ]


def tune(table: Mapping[str, Any]) -> Tune:
    """Return the grid of an experiment's ``[tune]`` table; mistakes are named before anything runs.

    Examples:
      >>> tune({"lr": [0.1, 0.5], "score": "worst"}).config
      {'lr': (0.1, 0.5)}
    """
    values, options = dict(table), {}
    for key, kind in (("score", str), ("share", float), ("seeds", int), ("split_seed", int)):
        if key in values:
            options[key] = values.pop(key)
            if not isinstance(options[key], kind) or isinstance(options[key], bool):
                raise UsageError(f"In [tune], {key} takes a {'name' if kind is str else 'number'}.")
    allowed = values.pop("allow_uncharged_tuning", False)
    if not isinstance(allowed, bool):
        raise UsageError("In [tune], allow_uncharged_tuning takes true or false.")
    settings = values.pop("settings", {})
    if not isinstance(settings, Mapping):
        raise UsageError("In [tune], settings are lists by name, for example settings.bound = [0.5, 1].")
    for key in values:
        _validate.known(key, KEYS, "key of [tune]")
    grid = Tune(_lists(values, ""), _lists(settings, "settings."), allow_uncharged_tuning=allowed, **options)
    _check_score(grid.score)
    _validate.number(grid.share, "share", low=0, high=1)
    _validate.whole(grid.seeds, "seeds")
    _validate.whole(grid.split_seed, "split_seed", low=0)
    if not grid.config and not grid.settings:
        raise UsageError("[tune] declares nothing to try: give lists, for example lr = [0.1, 0.5].")
    return grid


def _check_score(score: str) -> None:
    """Raise unless a score has a name: a short one, a metric, or a metric of a group."""
    if score not in SCORES:
        name = score.rpartition(":")[2] if score.startswith("group:") else score
        metrics.known(name, "score to tune by", SCORES)


def value_of(row: Mapping[str, Any], score: str) -> float:
    """Return the score of a trial from its last evaluation, the higher the better; NaN if it is not defined.

    Examples:
      >>> row = {"accuracy": 0.75, "groups": {"a": 1.0, "b": 0.5}, "metrics": {"brier": 0.25}}
      >>> value_of(row, "worst"), value_of(row, "brier"), value_of(row, "group:b:accuracy")
      (0.5, -0.25, 0.5)
    """
    group, _, name = score.removeprefix("group:").rpartition(":") if score.startswith("group:") else ("", "", score)
    name = SCORES.get(name, name)
    value = metrics.value(row, name, group or None)
    if value is None:
        return math.nan
    return value if metrics.higher_is_better(name) else -value


def best(scores: Mapping[int, Sequence[float]]) -> int | None:
    """Return the point with the highest mean score, the first of equals; None if no trial finished.

    A point of which a trial failed does not win against one that finished: fewer seeds would be luck.

    Examples:
      >>> best({0: [0.5, 0.7], 1: [0.6, 0.62], 2: [0.9, float("nan")]})
      1
    """
    means = {point: sum(values) / len(values) for point, values in scores.items() if values}
    known = {point: mean for point, mean in means.items() if math.isfinite(mean)}
    return max(known, key=lambda point: known[point], default=None)


def _lists(table: Mapping[str, Any], prefix: str) -> dict[str, tuple[Any, ...]]:
    for key, values in table.items():
        if not isinstance(values, list | tuple) or not values or len(set(map(str, values))) < len(values):
            raise UsageError(
                f"In [tune], {prefix}{key} takes a list of different values, for example {prefix}{key} = [0.5, 1]."
            )
    return {key: tuple(values) for key, values in table.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
