"""Runs of a comparison: methods x promises x seeds, each cell one ordinary run with its own config.

With a ``[tune]`` table, trials are run first, and the final cells take the winning settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenhand import _validate
from evenhand.accounting.budgets import Budgets
from evenhand.comparison import compared_methods, tuning
from evenhand.comparison import declared_claims as claims
from evenhand.errors import UsageError
from evenhand.reporting import metrics
from evenhand.training.config import Config, absolute, merged, settings
from evenhand.training.goals.goal import Goal

REFERENCE = "sgd"
EACH_RUN = "each run"
"""As ``owner_seed`` of the source: every run draws its owners with its own seed, the same for all methods."""
_OWN: dict[str, Any] = {
    "methods": list,
    "goals": list,
    "epsilons": list,
    "seeds": int,
    "reference": bool,
    "baseline": str,
    "variants": Mapping,
    "tune": Mapping,
    "claim": list,
    "study": Mapping,
    "split": str,
    "metric": (str, list),
    "replicas": str,
}
SPLITS = ("resampled", "fixed")
REPLICAS = ("off", "auto", "on")
"""Whether runs that differ in their seeds alone are trained together: never, where that is possible, or always."""

_PLAIN = ("seeds", "reference", "baseline", "variants", "split", "replicas")


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
        """Return whether the run keeps a promise; other runs are kept out of what may be shared."""
        return self.epsilon is not None

    @property
    def name(self) -> str:
        """Return the name of the run on screen and in its folder's name."""
        promise = "" if self.epsilon is None else "-budgets" if self.config.budgets else f"-eps{self.epsilon:g}"
        return f"{self.method}{promise}-seed{self.seed}"


@dataclass(frozen=True)
class Trial:
    """One training of one point of the grid, for one line and promise."""

    line: str
    epsilon: float | None
    point: int
    choice: tuning.Choice
    cell: Cell

    @property
    def key(self) -> tuple[str, float | None]:
        """Return the pair that is tuned: a line at a promise."""
        return self.line, self.epsilon


Chosen = Mapping[tuple[str, float | None], tuning.Choice]
"""What won, by line and promise."""


@dataclass(frozen=True)
class Sweep:
    """Methods x promises x seeds over one base config.

    A method that is not private ignores the promises and runs once per seed. ``reference`` adds plain SGD. Budgets per
    owner in the base config are the one promise that all methods are compared at, instead of epsilons. ``variants`` are
    methods with settings of their own under another name, also a goal; the counts of labels that a goal needs are paid
    from the line's promise. ``tune`` is the grid that every method gets. Differences are
    counted against ``baseline``. ``file`` is the name of the experiment's file. ``split`` is "resampled" (each seed has
    its own held-out records, the same for all methods) or "fixed"; by default resampled where the data are public and
    have no official test set. ``metrics`` are what the comparison is about, the first of them what tuning goes by;
    none: accuracy. ``replicas`` "auto" trains the seeds of small models together, "on" refuses what cannot be, "off"
    trains one by one.

    Examples:
      >>> [cell.name for cell in Sweep(Config(), methods=("sgd", "dpsgd"), epsilons=(1.0, 3.0), seeds=1).cells()]
      ['sgd-seed0', 'dpsgd-eps1-seed0', 'dpsgd-eps3-seed0']
      >>> drawn = Config(source={"owners": "random class", "owner_seed": "each run"})
      >>> [cell.config.source["owner_seed"] for cell in Sweep(drawn, seeds=3).cells()]
      [0, 1, 2]
    """

    base: Config
    methods: tuple[str, ...] = ("dpsgd",)
    epsilons: tuple[float, ...] = (3.0,)
    seeds: int = 3
    reference: bool = False
    variants: Mapping[str, Any] = field(default_factory=dict)
    tune: tuning.Tune | None = None
    baseline: str | None = None
    claims: tuple[claims.Claim, ...] = ()
    file: str = ""
    split: str | None = None
    metrics: tuple[str, ...] = ()
    replicas: str = "off"

    def __post_init__(self) -> None:
        _validate.whole(self.seeds, "seeds")
        if self.split is not None:
            _validate.known(self.split, SPLITS, "kind of split")
        _validate.known(self.replicas, REPLICAS, "way to train replicas")
        if self.split == "resampled" and not self._divisible:
            raise UsageError(
                "These data come with held-out records of their own, so there is nothing to resample: leave out "
                "--split resampled, and test_data or split_seed where you gave them."
            )
        if not self.names or not self.epsilons:
            raise UsageError("There is nothing to compare: name methods and epsilons, e.g. --methods dpsgd,sgd.")
        for epsilon in self.epsilons:
            _validate.number(epsilon, "epsilon", low=0)
        if self.base.noise is not None:
            raise UsageError(
                "A comparison is made at the same true epsilon, so a fixed noise cannot be given: use epsilons."
            )
        if self.base.record_budgets is not None:
            raise UsageError("Budgets by record are not compared: give every class of records an owner name instead.")
        if self.base.training_records:
            raise UsageError("A comparison is of released figures: leave out training_records, and hold records out.")
        if isinstance(word := self.base.source.get("owner_seed"), str) and word != EACH_RUN:
            raise UsageError(
                f'owner_seed takes a whole number, or "{EACH_RUN}": then every run of the comparison draws anew.'
            )
        Budgets(self.base.budgets or {"all": 1.0}, self.base.delta)
        known = {*self.names, *map(compared_methods.without_goal, self.names)}
        for name in (set(self._settings()[1]) - known) if self.base.settings else ():
            raise UsageError(f"There are settings for {name!r}, which is not among the methods compared.")
        if self.baseline is not None:
            _validate.known(self.baseline, self.names, "method to compare with as baseline")
        if self.tune is not None and not self.public and not self.tune.allow_uncharged_tuning:
            raise UsageError(
                "Tuning tries many settings on the same records, and what that reveals is in no epsilon here. On data "
                "that are not public, fix the settings beforehand, or write allow_uncharged_tuning = true into [tune]: "
                "the report then says that tuning is not covered."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the lines to run: methods, then variants not named among them, the reference last, none twice."""
        return tuple(dict.fromkeys([*self.methods, *self.variants, *([REFERENCE] if self.reference else [])]))

    @property
    def research(self) -> bool:
        """Return whether a non-private method was asked for, and with it values that only research may see."""
        return any(not self._line(name).private for name in self.names)

    @property
    def public(self) -> bool:
        """Return whether everything about the data may be shown: published research data, known by their name.

        What lies in ``data_dir`` is not compared with the published files, many of which have no known checksum.
        Whoever puts private records there under a public name deceives himself: they are shown like public ones.
        """
        from evenhand.data import sources

        return self.base.data in sources.PUBLIC

    @property
    def _divisible(self) -> bool:
        """Return whether held-out records are drawn from the data, by a seed that nobody fixed."""
        from evenhand.data import sources

        if self.base.own_data:
            return self.base.test_data is None
        known = sources.SOURCES.get(self.base.data)
        return known is not None and "split_seed" in known.options and "split_seed" not in self.base.source

    @property
    def resampled(self) -> bool:
        """Return whether every seed has held-out records of its own, the same for all methods.

        On data that are not public that happens only if asked for: who trains in one run must not be held out, and so
        unprotected, in another.
        """
        if self.split is not None:
            return self.split == "resampled"
        return self.public and self._divisible

    def cells(self, chosen: Chosen | None = None) -> list[Cell]:
        """Return every final run, with what won in tuning; check names and settings before anything is spent."""
        seeds = range(self.base.seed, self.base.seed + self.seeds)
        return [
            Cell(
                line.name,
                epsilon,
                seed,
                self._config(
                    line, epsilon, seed, (chosen or {}).get((line.name, epsilon)), seed if self.resampled else None
                ),
            )
            for line, epsilon in self._rows()
            for seed in seeds
        ]

    def trials(self) -> list[Trial]:
        """Return every trial of the grid; none if there is no grid."""
        tune = self.tune
        if tune is None:
            return []
        seeds = range(tuning.FIRST_SEED, tuning.FIRST_SEED + tune.seeds)
        return [
            Trial(
                line.name,
                epsilon,
                point,
                choice,
                Cell(f"{line.name}-trial{point}", epsilon, seed, self._config(line, epsilon, seed, choice)),
            )
            for line, epsilon in self._rows()
            for point, choice in enumerate(tune.choices(line))
            for seed in seeds
        ]

    def _rows(self) -> list[tuple[compared_methods.Line, float | None]]:
        """Return every line with every promise it is run at; refuse a setting that no method has."""
        common = self._settings()[0]
        lines = [self._line(name) for name in self.names]
        for setting in sorted(set(common) - {key for line in lines for key in line.known}):
            raise UsageError(f"No method compared has a setting called {setting!r}: see `evenhand methods --json`.")
        return [(line, epsilon) for line in lines for epsilon in (self._promises() if line.private else [None])]

    def _promises(self) -> list[float]:
        """Return every epsilon, or the largest of the budgets, which stands for all of them."""
        return [max(map(float, self.base.budgets.values()))] if self.base.budgets else sorted(set(self.epsilons))

    def _config(
        self,
        line: compared_methods.Line,
        epsilon: float | None,
        seed: int,
        choice: tuning.Choice | None,
        split_seed: int | None = None,
    ) -> Config:
        """Return the config of one run; without ``split_seed`` it has the one split of all runs, and of all trials."""
        base, choice = self.base, choice or tuning.Choice()
        fixed = base.seed if base.split_seed is None else base.split_seed
        divided = {} if split_seed is None or base.own_data else {"split_seed": split_seed}
        drawn = {"owner_seed": seed} if base.source.get("owner_seed") == EACH_RUN else {}
        promised = compared_methods.lower_budgets(line.budgets, base.budgets, line.name)
        config = merged(base, {**line.config, **choice.config})
        asks = line.steps and (Goal.parse(config.goal).needs_prior or config.tau not in (None, 0.0))
        return dataclasses.replace(
            config,
            method=line.method,
            source={**base.source, **line.config.get("source", {}), **drawn, **divided},
            epsilon=None if base.budgets else epsilon,
            budgets=promised if epsilon is not None else {},
            seed=seed,
            split_seed=fixed if split_seed is None or not base.own_data else split_seed,
            insecure_seed=None if base.insecure_seed is None else base.insecure_seed + seed,
            settings={**line.settings, **choice.settings},
            prior=line.steps and (config.prior or (asks and not config.prior_counts)),
        )

    def _settings(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the settings for all methods, and those under one method's name."""
        common: dict[str, Any] = {}
        by_method: dict[str, dict[str, Any]] = {}
        for key, value in self.base.settings.items():
            method, dot, setting = key.partition(".")
            if dot:
                by_method.setdefault(method, {})[setting] = value
            elif isinstance(value, Mapping):
                by_method.setdefault(key, {}).update(value)
            else:
                common[key] = value
        return common, by_method

    def _line(self, name: str) -> compared_methods.Line:
        common, by_method = self._settings()
        chosen = by_method.get(name, by_method.get(compared_methods.without_goal(name), {}))
        return compared_methods.line(name, self.variants, common, chosen)


def from_toml(path: Path, flags: Mapping[str, Any]) -> Sweep:
    """Return a sweep from a TOML file: keys of ``evenhand train`` beside methods, epsilons, seeds, tune and so on."""
    return sweep({**table(path), **flags}, path.parent, path.name)


def table(path: Path) -> dict[str, Any]:
    """Return the keys of an experiment's file, unchecked."""
    return settings(path)


def sweep(values: Mapping[str, Any], folder: Path = Path(), file: str = "") -> Sweep:
    """Return a sweep from plain values; an unknown key or a wrong type is an error that says what to write.

    Paths are relative to ``folder``.

    Examples:
      >>> sweep({"methods": ["dpsgd"], "epsilons": [1, 3], "epochs": 5}).epsilons
      (1.0, 3.0)
    """
    options = {key: value for key, value in values.items() if key in _OWN}
    for key, value in options.items():
        if not isinstance(value, _OWN[key]) or (_OWN[key] is int and isinstance(value, bool)):
            raise UsageError(f"The setting {key} takes {_words(key)}.")
    base = absolute(
        merged(Config(prior=False), {key: value for key, value in values.items() if key not in _OWN}), folder
    )
    if base.budgets and ("epsilons" in options or base.epsilon is not None):
        raise UsageError("Give epsilons, which hold for every record, or budgets per owner: not both.")
    chosen: dict[str, Any] = {"methods": (base.method,), "epsilons": (base.epsilon or 3.0,)}
    if "methods" in options or "variants" in options:
        chosen["methods"] = tuple(str(name) for name in options.get("methods", []))
    if "goals" in options:
        goals = [str(Goal.parse(goal)) for goal in options["goals"]]
        variants = chosen["methods"], options.get("variants", {}), goals
        chosen["methods"], options["variants"] = compared_methods.with_goals(*variants)
    if "epsilons" in options:
        chosen["epsilons"] = tuple(_validate.number(value, "epsilon", low=0) for value in options["epsilons"])
    chosen |= {key: options[key] for key in _PLAIN if key in options}
    asked = options.get("metric", [])
    if asked:
        chosen["metrics"] = metrics.listed(asked if isinstance(asked, str) else ",".join(map(str, asked)))
    if "tune" in options:
        goal = {"score": chosen["metrics"][0]} if asked else {}
        chosen["tune"] = tuning.tune({**goal, **options["tune"]})
    draft = Sweep(dataclasses.replace(base, epsilon=None), **chosen, file=file)
    return dataclasses.replace(draft, claims=claims.claims(options.get("claim", []), draft.names))


def _words(key: str) -> str:
    return {
        "methods": 'a list of names, e.g. ["sgd", "dpsgd"]',
        "goals": 'a list of goals, e.g. ["overall", "worst"]',
        "epsilons": "a list of numbers, e.g. [1, 3, 8]",
        "seeds": "a whole number: how many trainings per method and epsilon",
        "reference": "true or false",
        "baseline": "the name of a method compared",
        "metric": 'names of metrics, e.g. "balanced_accuracy,fpr_difference"',
        "split": f"one of: {', '.join(SPLITS)}",
    }.get(key, "a table" if key != "claim" else "tables: [[claim]]")
