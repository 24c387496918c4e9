"""What a comparison runs: methods x promises x seeds, each cell one ordinary run with its own config."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import _validate, methods
from evenhand.config import Config, absolute, merged
from evenhand.errors import UsageError
from evenhand.privacy.budgets import Budgets

PUBLIC = frozenset({"digits"})
"""Data that come with the library: everything about them may be shown."""
REFERENCE = "sgd"
_OWN = {"methods": list, "epsilons": list, "seeds": int, "reference": bool}


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    ``epsilon`` is None for a method that is not private, and the largest of the budgets where owners have their own.
    """

    method: str
    epsilon: float | None
    seed: int
    config: Config

    @property
    def private(self) -> bool:
        """Whether the run keeps a promise; the others are kept out of what may be shared."""
        return self.epsilon is not None

    @property
    def name(self) -> str:
        """What the run is called on screen and in its folder's name."""
        promise = "" if self.epsilon is None else "-budgets" if self.config.budgets else f"-eps{self.epsilon:g}"
        return f"{self.method}{promise}-seed{self.seed}"


@dataclass(frozen=True)
class Sweep:
    """Methods x promises x seeds over one base config.

    A method that is not private ignores the promises and runs once per seed. ``reference`` adds plain SGD. Budgets per
    owner in the base config are the one promise that all methods are compared at, instead of epsilons.

    Examples:
      >>> [cell.name for cell in Sweep(Config(), methods=("sgd", "dpsgd"), epsilons=(1.0, 3.0), seeds=1).cells()]
      ['sgd-seed0', 'dpsgd-eps1-seed0', 'dpsgd-eps3-seed0']
    """

    base: Config
    methods: tuple[str, ...] = ("dpsgd",)
    epsilons: tuple[float, ...] = (3.0,)
    seeds: int = 3
    reference: bool = False

    def __post_init__(self) -> None:
        _validate.whole(self.seeds, "seeds")
        if not self.methods or not self.epsilons:
            raise UsageError("There is nothing to compare: name methods and epsilons, e.g. --methods dpsgd,sgd.")
        for epsilon in self.epsilons:
            _validate.number(epsilon, "epsilon", low=0)
        if self.base.noise is not None:
            raise UsageError(
                "A comparison is made at the same true epsilon, so a fixed noise cannot be given: use epsilons."
            )
        if self.base.record_budgets is not None:
            raise UsageError("Budgets by record are not compared: give every class of records an owner name instead.")
        Budgets(self.base.budgets or {"all": 1.0}, self.base.delta)
        for name in (set(self._settings(None)[1]) - set(self.names)) if self.base.settings else ():
            raise UsageError(f"There are settings for {name!r}, which is not among the methods compared.")

    @property
    def names(self) -> tuple[str, ...]:
        """The methods to run, the reference last, none twice."""
        return tuple(dict.fromkeys([*self.methods, *([REFERENCE] if self.reference else [])]))

    @property
    def research(self) -> bool:
        """Whether a non-private method was asked for, and with it what only research may see."""
        return any(methods.method(name, self._of(name)).rule.guarantee == "not private" for name in self.names)

    @property
    def public(self) -> bool:
        """Whether everything about the data may be shown."""
        return self.base.data in PUBLIC

    def cells(self) -> list[Cell]:
        """Every run. Names and settings are checked here, before anything is spent."""
        found = []
        unused = set(self._settings(None)[0])
        for name in self.names:
            settings = self._of(name)
            unused -= set(settings)
            private = methods.method(name, settings).rule.guarantee != "not private"
            for epsilon in self._promises() if private else [None]:
                for seed in range(self.base.seed, self.base.seed + self.seeds):
                    found.append(Cell(name, epsilon, seed, self._config(name, epsilon, seed, settings)))
        if unused:
            raise UsageError(f"No method compared has a setting called {min(unused)!r}: see `evenhand methods --json`.")
        return found

    def _promises(self) -> list[float]:
        """Every epsilon, or the largest of the budgets, which stands for all of them."""
        return [max(map(float, self.base.budgets.values()))] if self.base.budgets else sorted(set(self.epsilons))

    def _config(self, name: str, epsilon: float | None, seed: int, settings: Mapping[str, Any]) -> Config:
        """One split for all: who trains in one run must not be held out, and so unprotected, in another."""
        base = self.base
        return dataclasses.replace(
            base,
            method=name,
            epsilon=None if base.budgets else epsilon,
            budgets=base.budgets if epsilon is not None else {},
            seed=seed,
            split_seed=base.seed if base.split_seed is None else base.split_seed,
            insecure_seed=None if base.insecure_seed is None else base.insecure_seed + seed,
            settings=settings,
        )

    def _settings(self, name: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Settings for all methods, and those under one method's name (or all such tables)."""
        common: dict[str, Any] = {}
        own: dict[str, dict[str, Any]] = {}
        for key, value in self.base.settings.items():
            method, dot, setting = key.partition(".")
            if dot:
                own.setdefault(method, {})[setting] = value
            elif isinstance(value, Mapping):
                own.setdefault(key, {}).update(value)
            else:
                common[key] = value
        return common, own if name is None else own.get(name, {})

    def _of(self, name: str) -> dict[str, Any]:
        """The common settings that this method knows, and its own."""
        common, own = self._settings(name)
        known = {recipe.name: recipe.defaults for recipe in methods.catalogue()}.get(name, {})
        return {**{key: value for key, value in common.items() if key in known}, **own}


def from_toml(path: Path, flags: Mapping[str, Any]) -> Sweep:
    """A sweep from a TOML file: the keys of ``evenhand train`` beside methods, epsilons, seeds, reference."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None
    return sweep({**values, **flags}, path.parent)


def sweep(values: Mapping[str, Any], folder: Path = Path()) -> Sweep:
    """A sweep from plain values; an unknown key or a wrong type is an error that says what to write.

    Paths are relative to ``folder``.

    Examples:
      >>> sweep({"methods": ["dpsgd"], "epsilons": [1, 3], "epochs": 5}).epsilons
      (1.0, 3.0)
    """
    own = {key: value for key, value in values.items() if key in _OWN}
    for key, value in own.items():
        if not isinstance(value, _OWN[key]) or (_OWN[key] is int and isinstance(value, bool)):
            raise UsageError(f"The setting {key} takes {_words(key)}.")
    base = absolute(merged(Config(), {key: value for key, value in values.items() if key not in _OWN}), folder)
    if base.budgets and ("epsilons" in own or base.epsilon is not None):
        raise UsageError("Give epsilons, which hold for every record, or budgets per owner: not both.")
    chosen: dict[str, Any] = {"methods": (base.method,), "epsilons": (base.epsilon or 3.0,)}
    if "methods" in own:
        chosen["methods"] = tuple(str(name) for name in own["methods"])
    if "epsilons" in own:
        chosen["epsilons"] = tuple(_validate.number(value, "epsilon", low=0) for value in own["epsilons"])
    rest = {key: own[key] for key in ("seeds", "reference") if key in own}
    return Sweep(dataclasses.replace(base, epsilon=None), **chosen, **rest)


def _words(key: str) -> str:
    return {
        "methods": 'a list of names, e.g. ["sgd", "dpsgd"]',
        "epsilons": "a list of numbers, e.g. [1, 3, 8]",
        "seeds": "a whole number: how many trainings per method and epsilon",
        "reference": "true or false",
    }[key]
