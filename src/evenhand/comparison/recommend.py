"""Recommend a method for given data: find the nearest study of docs/results, and take what did best in it.

The figures come with the package in ``recommend.json``, written by ``experiments/results.py``; it says where they are
from. Only public facts go in, so a recommendation costs no privacy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from evenhand import _validate

FILE = "recommend.json"
NEAR = 1.5
"""Studies whose distance is beyond this are not similar: about a factor of 30 in the number of records alone."""
KINDS = ("table", "images", "text", "other")
GOALS = {"worst": "the worst group", "accuracy": "all records together", "gap": "the gap between groups"}
_SIMPLE = ("dpsgd", "auto_s", "psac", "idp_sample", "idp_scale")
"""Of methods that cannot be told apart the first of these is taken, then any."""


@dataclass(frozen=True)
class Facts:
    """Public facts about the data and the model.

    Attributes:
      records: training records.
      epsilon: what is promised to every record, or the largest of the budgets.
      share: share of the smallest group; None if there are no groups.
      budgets: whether owners have budgets of their own.
      kind: "table", "images", "text" or "other"; studies of another kind are not looked at.
      parameters: trainable parameters of the model; None if not known.
    """

    records: int
    epsilon: float = 3.0
    share: float | None = None
    budgets: bool = False
    kind: str = "table"
    parameters: int | None = None

    def __post_init__(self) -> None:
        _validate.whole(self.records, "records")
        _validate.number(self.epsilon, "epsilon", low=0)
        _validate.known(self.kind, KINDS, "kind of data")
        if self.share is not None:
            _validate.number(self.share, "smallest", low=0, high=1)


@dataclass(frozen=True)
class Advice:
    """A method with its parameters, the reasons, how similar what was measured is, and how sure the advice is.

    ``measured`` is False when no study of this kind of data is similar, or the nearest one is poor: then the method is
    the plain default. ``sure`` is high, moderate or low, and none if nothing was measured.
    """

    method: str
    settings: Mapping[str, Any]
    reasons: Sequence[str]
    measured: bool
    study: str = ""
    distance: float = math.inf
    others: Sequence[str] = field(default_factory=tuple)
    provenance: str = ""
    sure: str = "none"


def table() -> dict[str, Any]:
    """Return the packaged figures; none if no experiment was run for this version."""
    file = resources.files("evenhand.comparison") / FILE
    if not file.is_file():
        return {"provenance": "", "studies": []}
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def distance(facts: Facts, study: Mapping[str, Any]) -> float:
    """Return how unlike two settings are: each factor of ten counts one, another kind of promise more.

    Examples:
      >>> study = {"records": 1000, "epsilon": 3.0, "smallest_share": 0.1, "budgets": {}, "kind": "table",
      ...          "parameters": 100}
      >>> round(distance(Facts(10_000, 3.0, 0.1), study), 2), distance(Facts(1000, budgets=True), study) > NEAR
      (1.0, True)
    """
    if facts.kind != study["kind"]:
        return math.inf
    parts = [abs(math.log10(facts.records / study["records"])), abs(math.log10(facts.epsilon / study["epsilon"]))]
    if facts.share is not None and study["smallest_share"]:
        parts.append(abs(math.log10(facts.share / study["smallest_share"])))
    if facts.parameters is not None:
        parts.append(abs(math.log10(facts.parameters / study["parameters"])) / 2)
    parts.append(2 * NEAR if facts.budgets != bool(study["budgets"]) else 0.0)
    return math.sqrt(sum(part**2 for part in parts))


def recommend(facts: Facts, goal: str = "worst", known: Mapping[str, Any] | None = None) -> Advice:
    """Return the method that did best by ``goal`` in the most similar study of the same kind of data.

    Where the nearest study is far, or poor (its best method hardly answers better than a guess), nothing is advised but
    the plain default.

    Args:
      facts: what is publicly known.
      goal: worst (group or owner), accuracy (of all records), or gap (between groups).
      known: figures in place of the packaged ones.

    Examples:
      >>> recommend(Facts(1000), known={"studies": []}).measured
      False
    """
    _validate.known(goal, GOALS, "goal")
    known = table() if known is None else known
    ranked = sorted(known["studies"], key=lambda study: distance(facts, study))
    if not ranked or distance(facts, ranked[0]) > NEAR:
        return _unmeasured(facts, ranked, known)
    study = ranked[0]
    if lack := poor(study):
        return _unmeasured(facts, ranked, known, lack)
    measure = "worst_owner" if goal == "worst" and "worst_owner" in study["best"] else goal
    best = study["best"].get(measure) or study["best"]["accuracy"]
    alike = [best["method"], *best["tied"]]
    line = next((name for name in _SIMPLE if name in alike), best["method"])
    used = study["methods"][line]["settings"]
    method = used.get("method", line)
    reasons = [_found(study, best, measure if measure in study["best"] else "accuracy")]
    if line != best["method"]:
        reasons.append(f"{line} is the simplest of those that 95 % intervals do not set apart from it.")
    if method != line:
        reasons.append(f"{line} is a variant of {method}; experiments/{study['experiment']}.toml says what it changes.")
    reasons += _differences(facts, study)
    others = tuple(name for name in alike if name != line)
    near = distance(facts, study)
    sure, why = _sure(near, best, study)
    reasons.append(f"How sure: {sure}. {why}")
    return Advice(method, used, reasons, True, study["experiment"], near, others, known.get("provenance", ""), sure)


def poor(study: Mapping[str, Any]) -> str:
    """Return why a study advises nothing: its best is no better than a guess or the most common label; else empty.

    Examples:
      >>> best = {"accuracy": {"value": 70.0, "low": 69.0}, "worst": {"value": 1.7, "low": 0.4}}
      >>> poor({"best": best, "labels": 7, "groups": 7})
      'in it even the best worst group has 1.7 % right, where guessing among 7 classes has 14.3 %'
    """
    classes = max(2, study.get("labels") or study["groups"])
    names = {
        "accuracy": "the best accuracy is",
        "worst": "the best worst group has",
        "worst_owner": "the best worst owner has",
    }
    for measure, words in names.items():
        value = study["best"].get(measure, {}).get("value")
        if value is not None and value <= 100 / classes:
            guess = f"guessing among {classes} classes has {100 / classes:.1f} %"
            return f"in it even {words} {value:.1f} % right, where {guess}"
    top, most = study["best"].get("accuracy", {}), study.get("majority")
    low = top.get("value") if top.get("low") is None else top["low"]
    if most is not None and low is not None and low <= 100 * most:
        return f"in it no method measurably beats the most common label, right for {100 * most:.1f} %"
    return ""


def _sure(near: float, best: Mapping[str, Any], study: Mapping[str, Any]) -> tuple[str, str]:
    """Return how sure the advice is, and why: how near the study is, how many seeds, told apart, by which intervals."""
    whole = bool(study.get("split"))
    lacks = [
        (near > NEAR / 3, f"the study is at distance {near:.1f}, where 0 is the same setting and {NEAR:g} too far"),
        (best["seeds"] < 10, f"it has {best['seeds']} seeds"),
        (bool(best["tied"]), "its best method is not told apart from others"),
        (not whole, "its intervals hold the chance of training alone, not that of the held-out records"),
        (bool(study.get("columns")), "no flag of the command line makes its features: without them expect less"),
    ]
    reasons = [words for lacking, words in lacks if lacking]
    level = (
        "high" if not reasons else "low" if near > 2 * NEAR / 3 or best["seeds"] < 3 or len(reasons) > 3 else "moderate"
    )
    text = "; ".join(reasons) or "the study is near, has many seeds and tells its best method apart"
    return level, f"{text[:1].upper()}{text[1:]}."


def _found(study: Mapping[str, Any], best: Mapping[str, Any], measure: str) -> str:
    ends = "" if best["low"] is None else f" ({best['low']:.1f} to {best['high']:.1f})"
    what = "the worst owner" if measure == "worst_owner" else GOALS[measure]
    promise = f"{'budgets up to' if study['budgets'] else 'epsilon'} {study['epsilon']:g}"
    return (
        f"On {study['data']} ({study['records']:,} records, {study['model']}{_seen(study)}, {promise}) "
        f"{best['method']} did best for {what}: {best['value']:.1f}{ends}, {best['seeds']} seeds."
    )


def _seen(study: Mapping[str, Any]) -> str:
    """Return what the model of a study saw in place of the data's own columns; empty for those.

    Examples:
      >>> _seen({"features": "scattering", "columns": 512}), _seen({"features": ""})
      (' on scattering features, which a public random matrix takes to 512 columns', '')
    """
    if not study.get("features"):
        return ""
    columns = study.get("columns")
    return f" on {study['features']} features" + (
        f", which a public random matrix takes to {columns} columns" if columns else ""
    )


def _differences(facts: Facts, study: Mapping[str, Any]) -> list[str]:
    """Return sentences on how the study differs from the asker's data."""
    lines = []
    if max(facts.records / study["records"], study["records"] / facts.records) > 3:
        lines.append(f"It had {study['records']:,} records, yours has {facts.records:,}: tune the learning rate anew.")
    if facts.share is not None and study["smallest_share"] and not 1 / 3 < facts.share / study["smallest_share"] < 3:
        lines.append(
            f"Its smallest group was {100 * study['smallest_share']:.2g} % of the records, yours is "
            f"{100 * facts.share:.2g} %."
        )
    return lines


def _unmeasured(facts: Facts, ranked: Sequence[Mapping[str, Any]], known: Mapping[str, Any], lack: str = "") -> Advice:
    method = "idp_sample" if facts.budgets else "dpsgd"
    nearest = ""
    if ranked and math.isfinite(distance(facts, ranked[0])):
        nearest = f" The nearest study is {ranked[0]['experiment']}: {lack or 'it is too unlike'}."
    reasons = [
        f"Nothing similar was measured, so this is the plain default and no finding.{nearest}",
        "Compare methods on public data like yours: evenhand compare --help",
    ]
    return Advice(method, {}, reasons, False, provenance=known.get("provenance", ""))
