"""The methods by name: published combinations of rule, queries and schedule; the densities are in ``densities``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods import references, registry, rules
from evenhand.methods.composition import Method
from evenhand.methods.densities import DENSITIES, Density
from evenhand.methods.queries import Exceedance, GroupCounts, GroupLosses, GroupSizes, Unclipped
from evenhand.methods.schedules import Constant, Linear, Phases, Schedule, Step, Time
from evenhand.types import Guarantee

__all__ = ["DENSITIES", "Density", "Method", "Recipe", "catalogue", "method", "split_name"]


@dataclass(frozen=True)
class Recipe:
    """Parts and origin of a method; ``defaults`` are the settings that ``--set key=value`` may change."""

    name: str
    guarantee: Guarantee
    reference: str
    summary: str
    defaults: Mapping[str, Any]
    make: Callable[..., Method]
    bibtex: str = ""


RECIPES: dict[str, Recipe] = {}
COVERED: set[str] = set()
"""Rules that a recipe already offers; other registered rules are methods of their own name."""


def _recipe(source: references.Reference | None, summary: str) -> Callable[[Callable[..., Method]], Recipe]:
    def add(function: Callable[..., Method]) -> Recipe:
        name = function.__name__.rstrip("_")
        defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
        rule = function(**defaults).rule
        text, bibtex = (source.text, source.bibtex) if source else (rule.reference, "")
        COVERED.add(rule.name)

        def make(**settings: Any) -> Method:
            return dataclasses.replace(function(**settings), name=name)

        RECIPES[name] = Recipe(name, rule.guarantee, text, summary, defaults, make, bibtex)
        return RECIPES[name]

    return add


def _asked(share: float, noise: float | None) -> dict[str, Any]:
    """Return the arguments of a query's noise: a fixed multiplier if given, else the share."""
    return {"share": share} if noise is None else {"noise": noise}


def _decaying(kind: str, bound: float, rate: float | None) -> Schedule:
    kinds: dict[str, Callable[..., Schedule]] = {"no": Constant, "linear": Linear, "time": Time, "step": Step}
    settings = {} if rate is None else {"decay": rate}
    if kind == "no" and settings:
        raise UsageError("noise_decay is the rate of a decay: pass decay=linear, time or step with it.")
    return kinds[_validate.known(kind, kinds, "decay of the noise")](bound=bound, **settings)


@_recipe(references.ABADI, "clip every gradient to one bound")
def dpsgd(bound: float = 1.0) -> Method:
    """Build DP-SGD."""
    return Method(rules.Clip(), schedule=Constant(bound=bound))


@_recipe(references.BU_2023, "normalise every gradient to about the bound")
def auto_s(bound: float = 1.0, gamma: float = 0.01) -> Method:
    """Build AUTO-S."""
    return Method(rules.AutoS(gamma=gamma), schedule=Constant(bound=bound))


@_recipe(references.YANG, "normalise every gradient to about the bound, as auto_s does")
def nsgd(bound: float = 1.0, gamma: float = 0.01) -> Method:
    """Build normalised SGD."""
    return Method(rules.Nsgd(gamma=gamma), schedule=Constant(bound=bound))


@_recipe(references.XIA, "normalise large gradients, keep small ones small")
def psac(bound: float = 1.0, r: float = 0.1) -> Method:
    """Build PSAC."""
    return Method(rules.Psac(r=r), schedule=Constant(bound=bound))


@_recipe(references.BU_2021, "one factor for all gradients up to a threshold, nothing beyond")
def global_(bound: float = 1.0, threshold: float = 100.0) -> Method:
    """Build DP-SGD-Global."""
    return Method(rules.Global(threshold=threshold), schedule=Constant(bound=bound))


@_recipe(references.ESIPOVA, "one factor up to a threshold that follows a noisy count")
def global_adapt(
    bound: float = 1.0,
    threshold: float = 50.0,
    rate: float = 0.1,
    factor: float = 0.7,
    share: float = 0.01,
    noise: float | None = None,
    memory: str | float = "none",
) -> Method:
    """Build DP-SGD-Global-Adapt."""
    query = Exceedance(factor=factor, **_asked(share, noise))
    rule = rules.GlobalAdapt(threshold=threshold, rate=rate, memory=memory)
    return Method(rule, (query,), Constant(bound=bound))


@_recipe(references.CHILUKOTI_2025, "one factor up to a threshold that falls over the epochs")
def global_adapt_v2(
    bound: float = 1.0,
    decay: str = "no",
    noise_decay: float | None = None,
    threshold: float = 3.0,
    rate: float = 0.5,
    every: int = 10,
    shape: str = "step",
    floor: float = 0.0,
    r: float = 0.1,
) -> Method:
    """Build DP-SGD-Global-Adapt-V2."""
    rule = rules.GlobalAdaptV2(threshold=threshold, rate=rate, every=every, shape=shape, floor=floor, r=r)
    return Method(rule, schedule=_decaying(decay, bound, noise_decay))


@_recipe(references.XU, "a clip bound per group, by how often it is clipped")
def dpsgd_f(
    bound: float = 1.0,
    most: float = 5.0,
    share: float = 0.01,
    noise: float | None = None,
    memory: str | float = "full",
) -> Method:
    """Build DPSGD-F."""
    rule = rules.GroupClip(most=most, memory=memory)
    return Method(rule, (GroupCounts(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.XU, "a weight per group, by its noisy size")
def naive(
    bound: float = 1.0,
    most: float = 10.0,
    share: float = 0.01,
    noise: float | None = None,
    memory: str | float = "none",
) -> Method:
    """Build the naive baseline of the DPSGD-F paper."""
    rule = rules.GroupReweight(most=most, memory=memory)
    return Method(rule, (GroupSizes(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.BOENISCH, "a sampling rate per owner, for its own budget")
def idp_sample(bound: float = 1.0, over: Any = "clip") -> Method:
    """Build IDP-SGD with a sampling rate per owner, over any rule that keeps every record within its bound."""
    return Method(rules.bounded_by_owner(over), schedule=Constant(bound=bound), sampling="owner")


@_recipe(references.BOENISCH, "a clip bound per owner, for its own budget")
def idp_scale(bound: float = 1.0, over: Any = "clip") -> Method:
    """Build IDP-SGD with a clip bound per owner, over any rule that keeps every record within its bound."""
    return Method(rules.bounded_by_owner(over), schedule=Constant(bound=bound), bounds="owner")


@_recipe(references.TIAN, "idp_sample in which records of low loss count less")
def ino_sample(
    bound: float = 1.0,
    tail: Any = "beta",
    a: float = 1.0,
    b: float = 1.0,
    steps: int = 4,
    length: float = 0.5,
    order: str = "loss",
    over: Any = "clip",
) -> Method:
    """Build INO-SGD over idp_sample."""
    rule = rules.Ordered(
        over=rules.bounded_by_owner(over), tail=tail, a=a, b=b, steps=steps, length=length, order=order
    )
    return Method(rule, schedule=Constant(bound=bound), sampling="owner")


@_recipe(references.TIAN, "idp_scale in which records of low loss count less")
def ino_scale(
    bound: float = 1.0,
    tail: Any = "beta",
    a: float = 1.0,
    b: float = 1.0,
    steps: int = 4,
    length: float = 0.5,
    order: str = "loss",
    over: Any = "clip",
) -> Method:
    """Build INO-SGD over idp_scale."""
    rule = rules.Ordered(
        over=rules.bounded_by_owner(over), tail=tail, a=a, b=b, steps=steps, length=length, order=order
    )
    return Method(rule, schedule=Constant(bound=bound), bounds="owner")


@_recipe(references.CHILUKOTI_2023, "auto_s with noise that falls every epoch: a sound substitute")
def auto_dpsgd_l(bound: float = 1.0, gamma: float = 0.01, decay: float = 0.99) -> Method:
    """Build Auto DP-SGD with linear decay."""
    return Method(rules.AutoS(gamma=gamma), schedule=Linear(decay=decay, bound=bound))


@_recipe(references.CHILUKOTI_2023, "auto_s with noise that falls in steps: a sound substitute")
def auto_dpsgd_s(bound: float = 1.0, gamma: float = 0.01, decay: float = 0.5, every: int = 10) -> Method:
    """Build Auto DP-SGD with step decay."""
    return Method(rules.AutoS(gamma=gamma), schedule=Step(decay=decay, every=every, bound=bound))


@_recipe(references.HUANG, "phases of growing noise and falling clip bound")
def sad(bound: float = 1.0, n: int = 3, noise: float = 0.8, length: float = 0.9, growth: float = 1.2) -> Method:
    """Build SAD-DPSGD (steps adaptive decay)."""
    return Method(rules.Clip(), schedule=Phases(n=n, noise=noise, length=length, growth=growth, bound=bound))


@_recipe(references.TIAN, "a combination of ours: ino_sample over psac, in the phases of sad")
def ino_psac(
    bound: float = 1.0, r: float = 0.1, length: float = 0.5, n: int = 3, noise: float = 0.8, growth: float = 1.2
) -> Method:
    """Build a combination of ours from INO-SGD, PSAC and phases."""
    schedule = Phases(n=n, noise=noise, growth=growth, bound=bound)
    return Method(rules.Ordered(over=rules.Psac(r=r), length=length), schedule=schedule, sampling="owner")


@_recipe(None, "no clipping, no noise: for comparison")
def sgd() -> Method:
    """Build plain SGD."""
    return Method(rules.Identity())


@_recipe(references.ANDREW, "a clip bound that follows a quantile of the gradient norms")
def adaptive_clip(
    bound: float = 1.0,
    quantile: float = 0.5,
    rate: float = 0.2,
    normalize: bool = False,
    share: float = 0.01,
    noise: float | None = None,
) -> Method:
    """Build adaptive quantile clipping."""
    rule = rules.AdaptiveClip(quantile=quantile, rate=rate, normalize=normalize)
    return Method(rule, (Unclipped(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.ZHAO, "a clip bound that follows the norms, but never below a floor")
def bounded_adaptive(
    bound: float = 1.0,
    quantile: float = 0.5,
    rate: float = 0.2,
    least: float = 0.5,
    most: float = 10.0,
    normalize: bool = False,
    share: float = 0.01,
    noise: float | None = None,
) -> Method:
    """Build bounded adaptive clipping."""
    rule = rules.BoundedAdaptive(quantile=quantile, rate=rate, least=least, most=most, normalize=normalize)
    return Method(rule, (Unclipped(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.SOLEYMANI, "gradients bent towards an adaptive bound by a tanh, not cut")
def soft_ada_clip(
    bound: float = 1.0,
    quantile: float = 0.5,
    rate: float = 0.2,
    normalize: bool = False,
    share: float = 0.01,
    noise: float | None = None,
) -> Method:
    """Build SoftAdaClip."""
    rule = rules.SoftAdaClip(quantile=quantile, rate=rate, normalize=normalize)
    return Method(rule, (Unclipped(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.SAGAWA, "a weight up to 1 per group, by its noisy mean loss")
def group_dro(
    bound: float = 1.0,
    rate: float = 0.1,
    least: float = 0.1,
    cap: float = 5.0,
    share: float = 0.01,
    noise: float | None = None,
    memory: str | float = 0.9,
) -> Method:
    """Build private group DRO."""
    query = GroupLosses(cap=cap, **_asked(share, noise))
    return Method(rules.GroupDro(rate=rate, least=least, memory=memory), (query,), Constant(bound=bound))


@_recipe(references.CHILUKOTI_2025, "global_adapt_v2 whose noise falls with its threshold, by one rate")
def global_adapt_v2_s(
    bound: float = 1.0, threshold: float = 3.0, rate: float = 0.5, every: int = 10, floor: float = 0.0, r: float = 0.1
) -> Method:
    """Build DP-SGD-Global-Adapt-V2-S: one rate R and one number of epochs K for threshold and noise."""
    rule = rules.GlobalAdaptV2(threshold=threshold, rate=rate, every=every, floor=floor, r=r)
    return Method(rule, schedule=Step(decay=rate, every=every, bound=bound))


@_recipe(references.HUANG, "sad with phases of equal length: what its public code runs as Auto-S")
def sad_auto_s(bound: float = 1.0, n: int = 3, noise: float = 0.8, growth: float = 1.2) -> Method:
    """Build the baseline that the public code of SAD-DPSGD calls Auto-S."""
    return Method(rules.Clip(), schedule=Phases(n=n, noise=noise, length=1.0, growth=growth, bound=bound))


def catalogue() -> tuple[Recipe, ...]:
    """Return all methods that take gradient steps: the recipes, registered rules that no recipe covers, and plugins."""
    listed = {**RECIPES, **{name: of_rule(name) for name in registry.names("rule") if name not in COVERED}}
    return tuple({**{recipe.name: recipe for recipe in _plugins().recipes()}, **listed}.values())


def check_name(plain: str) -> None:
    """Raise unless a method is called so, here or in a package that was not imported yet."""
    here = {*RECIPES, *registry.names("rule"), *DENSITIES}
    if plain not in here:
        _validate.known(plain, {*here, *_plugins().names()}, "method")


def recipe(plain: str) -> Recipe:
    """Return the method that takes gradient steps called ``plain``, without settings in its name.

    Raises:
      UsageError: there is none; the message names the nearest, or says what a density is asked for instead.
    """
    if plain in DENSITIES:
        raise UsageError(DENSITIES[plain].instead)
    if plain in RECIPES:
        return RECIPES[plain]
    offered = None if plain in registry.names("rule") else _plugins().recipe(plain)
    if offered is None:
        check_name(plain)
    return offered or of_rule(plain)


def method(name: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """Return the method called ``name`` with these settings; a registered rule is a method too.

    Settings may stand in the name: "idp_sample:over=auto_s".

    Examples:
      >>> method("dpsgd", {"bound": 0.5}).schedule
      Constant(bound=0.5)
      >>> method("idp_scale:over=psac").rule
      Psac(r=0.1)
    """
    if isinstance(name, Method):
        if settings:
            raise UsageError("Settings go with a method's name; a Method object already carries them.")
        return name
    plain, named = split_name(name)
    chosen_recipe = recipe(plain)
    twice = sorted(named.keys() & (settings or {}).keys())
    if twice:
        raise UsageError(f"The setting {_validate.shown(twice[0])!r} stands in the method's name and beside it.")
    chosen = {**named, **(settings or {})}
    for key in chosen:
        _validate.known(key, chosen_recipe.defaults, f"setting of {chosen_recipe.name}")
    return dataclasses.replace(chosen_recipe.make(**{**chosen_recipe.defaults, **chosen}), name=name)


def split_name(name: str) -> tuple[str, dict[str, Any]]:
    """Return the method's own name and the settings in it; values are JSON where they can be, else text.

    Examples:
      >>> split_name("ino_scale:over=psac,length=0.3")
      ('ino_scale', {'over': 'psac', 'length': 0.3})
      >>> split_name("dpsgd")
      ('dpsgd', {})
    """
    plain, colon, rest = name.partition(":")
    settings: dict[str, Any] = {}
    for entry in rest.split(",") if colon else ():
        key, equals, value = entry.partition("=")
        if not equals or not key or key in settings:
            raise UsageError(
                "Settings in a method's name are KEY=VALUE, separated by commas, each once: for example "
                "idp_sample:over=auto_s. Others go beside it, with --set or settings=."
            )
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return plain, settings


def of_rule(name: str) -> Recipe:
    """Return the recipe of a registered rule: the rule with its settings under a constant schedule."""
    rule = registry.part("rule", name)
    defaults = {f.name: f.default for f in dataclasses.fields(rule) if f.default is not dataclasses.MISSING}

    def make(bound: float, **settings: Any) -> Method:
        return Method(registry.build("rule", name, settings), schedule=Constant(bound=bound))

    summary = (rule.__doc__ or name).strip().split("\n")[0]
    return Recipe(name, rule.guarantee, rule.reference, summary, {"bound": 1.0, **defaults}, make)


def of_function(name: str, function: Callable[..., Any], package: str) -> Recipe:
    """Return the recipe of another package's function: its arguments with their defaults are the settings.

    Raises:
      UsageError: an argument has no default, or what it returns is no Method.
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.default is inspect.Parameter.empty for parameter in parameters.values()):
        raise UsageError("every argument of its function must have a default.")
    defaults = {key: parameter.default for key, parameter in parameters.items()}

    def make(**settings: Any) -> Method:
        composed = function(**settings)
        if not isinstance(composed, Method):
            raise UsageError(f"its function returned {type(composed).__name__}, not a Method.")
        return dataclasses.replace(composed, name=name, package=package)

    rule = make(**defaults).rule
    summary = (function.__doc__ or name).strip().split("\n")[0]
    return Recipe(name, rule.guarantee, rule.reference, summary, defaults, make)


def _plugins() -> Any:
    return importlib.import_module("evenhand.methods.plugins")
