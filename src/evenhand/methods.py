"""The catalogue: every method as a recipe of sampling + rule + queries + schedule, with its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from evenhand import _validate, registry
from evenhand.errors import UsageError
from evenhand.queries import Query
from evenhand.rules import Clip, Identity, Rule
from evenhand.schedules import Constant, Schedule
from evenhand.types import Guarantee


@dataclass(frozen=True)
class Method:
    """A point in the space of methods. Nothing in it depends on data.

    ``sampling="owner"`` gives every owner class the sampling rate that spends its own budget, ``bounds="owner"`` the
    clip bound that does; otherwise all classes are treated alike, by the strictest budget.

    Examples:
      >>> Method(Clip(), schedule=Constant(bound=0.5)).name
      'clip'
    """

    rule: Rule
    queries: tuple[Query, ...] = ()
    schedule: Schedule = field(default_factory=Constant)
    sampling: Literal["uniform", "owner"] = "uniform"
    bounds: Literal["uniform", "owner"] = "uniform"
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise UsageError(f"Method needs a rule such as evenhand.rules.Clip(), not {type(self.rule).__name__}.")
        if sum(query.share or 0.0 for query in self.queries) >= 1:
            raise UsageError("The shares of the side queries leave nothing for the gradient: keep their sum below 1.")
        if self.sampling == self.bounds == "owner":
            raise UsageError("Owners differ in their sampling rate or in their clip bound, not in both: choose one.")
        if self.bounds == "owner" and any(query.share is not None for query in self.queries):
            raise UsageError(
                "With a clip bound per owner a side query needs a fixed noise=, since a share of the step's "
                "privacy would differ between owners."
            )
        answers = [query.name for query in self.queries]
        if len(set(answers)) < len(answers):
            raise UsageError("Two side queries have the same name, so a rule could not tell their answers apart.")
        object.__setattr__(self, "queries", tuple(self.queries))
        object.__setattr__(self, "name", self.name or self.rule.name)


@dataclass(frozen=True)
class Recipe:
    """How a method is put together and where it comes from. ``defaults`` is what ``--set key=value`` may change."""

    name: str
    guarantee: Guarantee
    reference: str
    summary: str
    defaults: Mapping[str, Any]
    make: Callable[..., Method]


def _dpsgd(bound: float) -> Method:
    return Method(Clip(), schedule=Constant(bound=bound), name="dpsgd")


def _idp_sample(bound: float) -> Method:
    return Method(Clip(), schedule=Constant(bound=bound), sampling="owner", name="idp_sample")


def _idp_scale(bound: float) -> Method:
    return Method(Clip(), schedule=Constant(bound=bound), bounds="owner", name="idp_scale")


def _sgd() -> Method:
    return Method(Identity(), name="sgd")


_BOUND = {"bound": 1.0}
_IDP = "Boenisch et al. 2024, Have it your way: Individualized Privacy Assignment for DP-SGD"
_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("dpsgd", Clip.guarantee, Clip.reference, "clip every gradient to one bound", _BOUND, _dpsgd),
        Recipe(
            "idp_sample", Clip.guarantee, _IDP, "a sampling rate per owner, for its own budget", _BOUND, _idp_sample
        ),
        Recipe("idp_scale", Clip.guarantee, _IDP, "a clip bound per owner, for its own budget", _BOUND, _idp_scale),
        Recipe("sgd", Identity.guarantee, Identity.reference, "no clipping, no noise: for comparison", {}, _sgd),
    )
}
_COVERED = {Clip.name, Identity.name}


def catalogue() -> tuple[Recipe, ...]:
    """All methods to choose from: the recipes, then every registered rule that no recipe covers."""
    own = [_of_rule(name) for name in registry.names("rule") if name not in _COVERED]
    return (*_RECIPES.values(), *own)


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
    _validate.known(name, {*_RECIPES, *registry.names("rule")}, "method")
    recipe = _RECIPES.get(name) or _of_rule(name)
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
