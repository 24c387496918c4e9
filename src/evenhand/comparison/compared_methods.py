"""The lines of a comparison: methods by their own name, and variants: a method with settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenhand import _validate, density
from evenhand.errors import UsageError
from evenhand.methods import catalogue

OWN = (
    *("model", "features", "epochs", "batch_size", "loss", "optimizer", "lr", "lr_schedule"),
    *("momentum", "weight_decay", "average", "augment", "views", "micro_batch", "lean", "precision"),
)
"""Keys of a run's config that a variant may set. None of them changes what is promised to whom."""


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
        recipes = {recipe.name: recipe.defaults for recipe in catalogue.catalogue()}
        plain, named = catalogue.split_name(self.method)
        return {key: value for key, value in recipes.get(plain, {}).items() if key not in named}


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
