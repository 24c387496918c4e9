"""The lines of a comparison: methods by their own name, and variants: a method with settings of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand import _validate, density
from evenhand.errors import UsageError
from evenhand.methods import catalogue

OWN = (
    *("model", "features", "epochs", "batch_size", "loss", "optimizer", "lr", "lr_schedule"),
    *("momentum", "weight_decay", "average", "augment", "views", "micro_batch", "lean", "precision"),
    *("goal", "tau", "prior", "prior_counts", "source"),
)
"""Keys of a run's config that a variant may set. None of them changes what is promised to whom."""
OWN_SOURCE = ("owner_drop",)
"""Keys of the source that a variant may set: training records are left out; promises and held-out records stay."""
_GOAL = " (goal "
"""Between a method and the goal that one of its lines is trained for."""


@dataclass(frozen=True)
class Line:
    """One row of the table: the method behind it, its settings, and the keys of the config that are its own.

    ``budgets`` may promise some owners more privacy than the comparison asks for, never less.

    Examples:
      >>> Line("reversed", "sad", {"noise": 1.25}).private
      True
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> bool:
        """Return whether the method trains by gradient steps; a density releases once, without rate or batch."""
        return self.method not in density.METHODS

    @property
    def private(self) -> bool:
        """Return whether the method keeps a promise."""
        if not self.steps:
            return True
        return catalogue.method(self.method, self.settings).rule.guarantee != "not private"

    @property
    def known(self) -> Mapping[str, Any]:
        """Return the settings that the method has, with their defaults."""
        if not self.steps:
            return density.settings(self.method)
        plain, named = catalogue.split_name(self.method)
        return {key: value for key, value in catalogue.recipe(plain).defaults.items() if key not in named}


def line(name: str, variants: Mapping[str, Any], common: Mapping[str, Any], line_settings: Mapping[str, Any]) -> Line:
    """Return the line called ``name``: a variant if one is declared, else the method of that name.

    Args:
      name: as it stands in ``methods``.
      variants: tables with ``method``, ``settings``, ``budgets`` and keys of the config, by name.
      common: settings for every method that has them.
      line_settings: settings for this line only.

    Examples:
      >>> line("C = 2", {"C = 2": {"method": "dpsgd", "settings": {"bound": 2.0}}}, {"bound": 1.0}, {}).settings
      {'bound': 2.0}
    """
    table = variants.get(name, {"method": name})
    if not isinstance(table, Mapping) or not isinstance(table.get("method"), str):
        raise UsageError(f'The variant {name!r} must say whose it is: [variants."{name}"] with method = "dpsgd".')
    for key in set(table) - {"method", "settings", "budgets"}:
        _validate.known(key, OWN, f"key of the variant {name!r}")
    for key in table.get("source", {}):
        _validate.known(key, OWN_SOURCE, f"key of the source of the variant {name!r}")
    plain_line = Line(
        name,
        table["method"],
        config={key: value for key, value in table.items() if key in OWN},
        budgets=table.get("budgets", {}),
    )
    used = {key: value for key, value in common.items() if key in plain_line.known}
    settings = {**used, **table.get("settings", {}), **line_settings}
    if not plain_line.steps:
        for key in settings:
            _validate.known(key, plain_line.known, f"setting of {plain_line.method}")
    else:
        catalogue.method(plain_line.method, settings)
    return Line(name, plain_line.method, settings, plain_line.config, plain_line.budgets)


def with_goals(
    methods: Sequence[str], variants: Mapping[str, Any], goals: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return methods and variants with a line for every goal; the one for the goal overall keeps its name.

    Densities and methods that are not private have no counts of labels that a goal could rest on: one line each.

    Examples:
      >>> with_goals(["dpsgd"], {}, ["overall", "worst"])
      (('dpsgd', 'dpsgd (goal worst)'), {'dpsgd (goal worst)': {'method': 'dpsgd', 'goal': 'worst'}})
    """
    names: list[str] = []
    tables = dict(variants)
    for name in dict.fromkeys([*methods, *variants]):
        table = variants.get(name, {"method": name})
        for goal in goals:
            if goal == "overall" or not _counts_labels(name, table):
                names.append(name)
                continue
            names.append(f"{name}{_GOAL}{goal})")
            tables[names[-1]] = {**table, "goal": goal}
        if name not in names:
            tables.pop(name, None)
    return tuple(dict.fromkeys(names)), tables


def _counts_labels(name: str, table: Any) -> bool:
    """Return whether runs of a line can release counts of labels; a table that is no variant's is refused later."""
    if not isinstance(table, Mapping) or not isinstance(table.get("method"), str):
        return False
    declared = Line(name, table["method"], table.get("settings", {}))
    return declared.steps and declared.private


def without_goal(name: str) -> str:
    """Return the name of the line that a line for a goal was made from.

    Examples:
      >>> without_goal("dpsgd (goal worst)"), without_goal("dpsgd")
      ('dpsgd', 'dpsgd')
    """
    return name.partition(_GOAL)[0]


def lower_budgets(budgets: Mapping[str, Any], promised: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the budgets of a line; refuse those that promise an owner less privacy than the comparison does.

    Examples:
      >>> lower_budgets({"open": 4.0}, {"strict": 1.0, "open": 8.0}, "lowered")
      {'strict': 1.0, 'open': 4.0}
    """
    for owner, epsilon in budgets.items():
        _validate.known(owner, promised, "owner with a budget")
        if _validate.number(epsilon, "epsilon", low=0) > float(promised[owner]):
            raise UsageError(
                f"The variant {name!r} would spend more of {owner!r} than was promised: lower its budget to "
                f"{float(promised[owner]):g} or less."
            )
    return {**promised, **budgets}
