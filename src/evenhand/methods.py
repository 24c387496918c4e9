"""Methods by name: the catalogue of published ones, and every registered rule as a method of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from evenhand import _validate, registry
from evenhand.catalogue import COVERED, RECIPES, Recipe
from evenhand.composition import Method
from evenhand.densities import DENSITIES
from evenhand.errors import UsageError
from evenhand.schedules import Constant

__all__ = ["Method", "Recipe", "catalogue", "method"]


def catalogue() -> tuple[Recipe, ...]:
    """All methods that take gradient steps: the recipes, then every registered rule that no recipe covers."""
    own = [_of_rule(name) for name in registry.names("rule") if name not in COVERED]
    return (*RECIPES.values(), *own)


def method(name: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """The method called ``name`` with ``settings`` in place of its defaults; a registered rule is a method too.

    Examples:
      >>> method("dpsgd", {"bound": 0.5}).schedule
      Constant(bound=0.5)
    """
    if isinstance(name, Method):
        if settings:
            raise UsageError("Settings go with a method's name; a Method object already carries them.")
        return name
    _validate.known(name, {*RECIPES, *registry.names("rule"), *DENSITIES}, "method")
    if name in DENSITIES:
        raise UsageError(DENSITIES[name].instead)
    recipe = RECIPES.get(name) or _of_rule(name)
    for key in settings or {}:
        _validate.known(key, recipe.defaults, f"setting of {recipe.name}")
    return recipe.make(**{**recipe.defaults, **(settings or {})})


def _of_rule(name: str) -> Recipe:
    rule = registry.part("rule", name)
    defaults = {f.name: f.default for f in dataclasses.fields(rule) if f.default is not dataclasses.MISSING}

    def make(bound: float, **settings: Any) -> Method:
        return Method(registry.build("rule", name, settings), schedule=Constant(bound=bound))

    summary = (rule.__doc__ or name).strip().split("\n")[0]
    return Recipe(name, rule.guarantee, rule.reference, summary, {"bound": 1.0, **defaults}, make)
