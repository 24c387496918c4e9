"""The methods by name: published combinations of rule, queries and schedule, and the densities in words.

How densities work is in ``evenhand.density``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods import references, registry, rules
from evenhand.methods.composition import Method
from evenhand.methods.queries import Exceedance, GroupCounts, GroupSizes
from evenhand.methods.references import Reference
from evenhand.methods.schedules import Constant, Linear, Phases, Schedule, Step, Time
from evenhand.types import Guarantee

__all__ = ["Method", "Recipe", "catalogue", "method"]

SMOOTHING = Reference(
    "anonymous2024enhancing",
    "Anonymous",
    2024,
    "Enhancing Privacy and Utility in Differentially Private Deep Learning through Instance-Level Smoothing",
    "Anonymous",
    "misc; howpublished=OpenReview, 97tbbvSJ4A; note=Paper under double-blind review",
)
HARDER = Reference(
    "harder2021dpmerf",
    "Harder et al.",
    2021,
    "DP-MERF: Differentially Private Mean Embeddings with Random Features for Practical Privacy-Preserving Data "
    "Generation",
    "Harder, Frederik and Adamczewski, Kamil and Park, Mijung",
    "misc; eprint=2002.11603; archiveprefix=arXiv",
)
DWORK = Reference(
    "dwork2014analyze",
    "Dwork et al.",
    2014,
    "Analyze Gauss: Optimal Bounds for Privacy-Preserving Principal Component Analysis",
    "Dwork, Cynthia and Talwar, Kunal and Thakurta, Abhradeep and Zhang, Li",
    "inproceedings; booktitle=ACM Symposium on Theory of Computing",
)


@dataclass(frozen=True)
class Density:
    """One density. ``releases`` names what is released, in order; a form that skips some skips the first ones."""

    name: str
    guarantee: Guarantee
    summary: str
    releases: tuple[str, ...]
    source: Reference

    @property
    def estimator(self) -> str:
        """Its class in ``evenhand.density``.

        Examples:
          >>> DENSITIES["moment_density"].estimator
          'MomentDensity'
        """
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def instead(self) -> str:
        """The command or call to use instead, for a user who asks for this density as a method of gradient steps."""
        if self.guarantee == "not established":
            return (
                f"No guarantee is established for {self.name!r}, so no command fits it: study it in Python with "
                f"evenhand.density.{self.estimator}(allow_unproven=True), or choose 'moment_density', which is private."
            )
        return (
            f"{self.name!r} is a density: it takes no gradient steps and trains no model of yours. Use `evenhand train "
            f"--method {self.name}`, or evenhand.density.{self.estimator} with fit(X, y) and plan(facts, promise)."
        )


DENSITIES = {
    density.name: density
    for density in (
        Density(
            "moment_density",
            "proved and tested",
            "a Gaussian per class, from noisy means and second moments",
            ("mean", "second moments"),
            DWORK,
        ),
        Density(
            "random_feature_density",
            "proved and tested",
            "a kernel density per class, from noisy sums of random features",
            ("mean", "second moments", "class sums"),
            HARDER,
        ),
        Density(
            "noisy_embedding_density",
            "proved and tested",
            "every record with noise for its own budget, and densities over those rows",
            ("row of every record",),
            SMOOTHING,
        ),
        Density(
            "published_smoothing",
            "not established",
            "the paper's smoothed densities as printed: for study, in Python only",
            ("training points with the paper's noise",),
            SMOOTHING,
        ),
    )
}
"""By the name that ``--method`` takes."""


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
) -> Method:
    """Build DP-SGD-Global-Adapt."""
    query = Exceedance(factor=factor, **_asked(share, noise))
    return Method(rules.GlobalAdapt(threshold=threshold, rate=rate), (query,), Constant(bound=bound))


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
def dpsgd_f(bound: float = 1.0, most: float = 5.0, share: float = 0.01, noise: float | None = None) -> Method:
    """Build DPSGD-F."""
    return Method(rules.GroupClip(most=most), (GroupCounts(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.XU, "a weight per group, by its noisy size")
def naive(bound: float = 1.0, most: float = 10.0, share: float = 0.01, noise: float | None = None) -> Method:
    """Build the naive baseline of the DPSGD-F paper."""
    return Method(rules.GroupReweight(most=most), (GroupSizes(**_asked(share, noise)),), Constant(bound=bound))


@_recipe(references.BOENISCH, "a sampling rate per owner, for its own budget")
def idp_sample(bound: float = 1.0) -> Method:
    """Build IDP-SGD with a sampling rate per owner."""
    return Method(rules.Clip(), schedule=Constant(bound=bound), sampling="owner")


@_recipe(references.BOENISCH, "a clip bound per owner, for its own budget")
def idp_scale(bound: float = 1.0) -> Method:
    """Build IDP-SGD with a clip bound per owner."""
    return Method(rules.Clip(), schedule=Constant(bound=bound), bounds="owner")


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
    rule = rules.Ordered(over=over, tail=tail, a=a, b=b, steps=steps, length=length, order=order)
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
    rule = rules.Ordered(over=over, tail=tail, a=a, b=b, steps=steps, length=length, order=order)
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


def catalogue() -> tuple[Recipe, ...]:
    """Return all methods that take gradient steps: the recipes, then registered rules that no recipe covers."""
    rule_recipes = [_of_rule(name) for name in registry.names("rule") if name not in COVERED]
    return (*RECIPES.values(), *rule_recipes)


def method(name: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """Return the method called ``name`` with these settings; a registered rule is a method too.

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
