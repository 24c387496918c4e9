"""Checks of what was typed, before torch is imported and data are read: a wrong flag is answered at once.

Each refusal here is made again by the library, from Python too; here it comes seconds earlier. No file of data or code
is opened, only the settings file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand import _toml, _validate
from evenhand.errors import UsageError

_POSITIVE = ("epochs", "lr", "batch_size", "noise", "epsilon")
LOGGERS = ("tensorboard", "mlflow", "wandb")


def train(config: Path | None, asked: Mapping[str, Any], out: Path | None, loggers: Sequence[str] = ()) -> None:
    """Refuse what `evenhand train` cannot use: no promise, numbers out of range, names and files that are not there."""
    values = _settings(config, asked)
    if config is not None:
        from evenhand.training.config import Config, merged

        merged(Config(), values)
    _numbers(values)
    _methods([values.get("method", "dpsgd")])
    _promise(values)
    _goal(values)
    _files(asked)
    for name in loggers:
        _validate.known(name, LOGGERS, "logger")
    _folder(out)


def compare(config: Path | None, asked: Mapping[str, Any], out: Path, *, own_rules: bool = False) -> None:
    """Refuse what `evenhand compare` cannot use: nothing to compare, numbers out of range, unknown names."""
    values = _settings(config, asked)
    _numbers(values)
    for epsilon in _listed(values.get("epsilons")):
        _validate.number(epsilon, "epsilon", low=0)
    if "seeds" in values:
        _validate.whole(values["seeds"], "seeds")
    if "methods" in values and not values["methods"] and not values.get("variants"):
        raise UsageError("There is nothing to compare: name methods and epsilons, e.g. --methods dpsgd,sgd.")
    if not own_rules:
        variants = values.get("variants")
        named = set(variants) if isinstance(variants, Mapping) else set()
        _methods([name for name in _listed(values.get("methods")) if name not in named])
    _files(asked)
    _folder(out)


_TABLES = (".csv", ".tsv", ".parquet", ".npz", ".npy")


def _settings(config: Path | None, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file and the flags say; refuse a table of records in the place of the file."""
    if config is not None and config.suffix.lower() in _TABLES:
        raise UsageError(
            f"{_validate.shown(config.name)} holds records, and settings are expected here. Declare what is public "
            f"about it first: evenhand init {config.name}"
        )
    return {**({} if config is None else _toml.read(config)), **asked}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: Mapping[str, Any]) -> None:
    """Refuse numbers that no run can have. Values of other types are left to the config, which names the type."""
    for name in _POSITIVE:
        if isinstance(values.get(name), int | float):
            _validate.number(values[name], name, low=0)
    if isinstance(values.get("delta"), int | float):
        _validate.delta(values["delta"])
    if isinstance(values.get("test_share"), int | float):
        _validate.number(values["test_share"], "test_share", low=0, high=1)


def _methods(names: Iterable[Any]) -> None:
    """Refuse a method that does not exist, with the nearest name."""
    from evenhand.methods import catalogue

    for name in names:
        if isinstance(name, str):
            catalogue.check_name(catalogue.split_name(name)[0])


def _goal(values: Mapping[str, Any]) -> None:
    """Refuse a goal that does not exist, and a strength of the offset that it cannot have."""
    from evenhand.training.goals.goal import Goal, check_tau

    check_tau(values.get("tau"), Goal.parse(values.get("goal", "overall")))


def _promise(values: Mapping[str, Any]) -> None:
    """Refuse a private method without a promise."""
    from evenhand.methods import catalogue

    name = values.get("method", "dpsgd")
    promised = any(values.get(key) is not None for key in ("epsilon", "noise", "record_budgets")) or values.get(
        "budgets"
    )
    if promised or not isinstance(name, str):
        return
    plain = catalogue.split_name(name)[0]
    if plain in catalogue.DENSITIES or catalogue.recipe(plain).guarantee != "not private":
        raise UsageError(
            f"{name!r} is a private method: say what was promised, for example --epsilon 3. Nothing was spent."
        )


def _files(asked: Mapping[str, Any]) -> None:
    """Refuse files of data and of code that were named by a flag and do not exist."""
    for name in ("data", "test_data"):
        text = asked.get(name)
        if isinstance(text, str) and Path(text).suffix and not _exists(Path(text)):
            raise UsageError(f"There is no file {_validate.shown(text)}: --{name.replace('_', '-')} takes its path.")
    for name in ("model", "features"):
        text = asked.get(name)
        if isinstance(text, str) and ".py:" in text and not _exists(Path(text.rpartition(":")[0])):
            raise UsageError(
                f"There is no {name} file {_validate.shown(text.rpartition(':')[0])}: pass a Python file of your own."
            )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # names that no disk takes
        return False


def _folder(out: Path | None) -> None:
    """Refuse a run folder that is a file."""
    if out is not None and os.path.isfile(out):
        raise UsageError(f"--out {_validate.shown(out)} is a file: name a folder that is new or empty.")
