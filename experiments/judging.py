"""Plain conclusions from a comparison's figures: who is best in what, and whom the intervals cannot tell apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand.comparison import declared_claims
from evenhand.comparison import measures as measured
from evenhand.reporting.uncertainty import Split, of_values

WORDS = {
    "accuracy": ("highest accuracy over all records", "%"),
    "worst": ("highest accuracy of the worst group", "%"),
    "gap": ("smallest gap between groups", "points"),
    "worst_owner": ("highest accuracy of the worst owner", "%"),
    "balanced": ("highest balanced accuracy", "%"),
    "auc": ("highest area under the curve", "%"),
    "cost_gap": ("smallest difference in what privacy costs two groups", "points"),
}
LOWER = {"gap", "cost_gap", "cost"}


@dataclass(frozen=True)
class Best:
    """The best method in a measure at one promise, and others that 95 % intervals do not set apart from it."""

    measure: str
    promise: str
    method: str
    value: float
    low: float
    high: float
    tied: tuple[str, ...]
    seeds: int

    @property
    def sentence(self) -> str:
        """In words, with figures."""
        words, unit = WORDS[self.measure]
        ends = f" ({self.low:.1f} to {self.high:.1f})" if self.low == self.low else ""
        tied = ""
        if self.seeds < 2:
            tied = "; one seed cannot tell it from the others"
        elif self.tied:
            tied = f"; not distinguishable from it by paired 95 % intervals: {', '.join(self.tied)}"
        else:
            tied = "; every other method is worse by a paired 95 % interval"
        return f"**{self.method}** has the {words}: {self.value:.1f} {unit}{ends}{tied}."


def rows(entry: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The evaluations of a method in a table, by seed."""
    return {int(seed): row for seed, row in entry["by_seed"].items()}


def promise(entry: Mapping[str, Any]) -> str:
    """The promise of an entry in words."""
    if entry["epsilon"] is None:
        return "not private"
    budgets = [owner["budget"] for owner in entry.get("owners", {}).values() if "budget" in owner]
    return f"budgets up to {entry['epsilon']:g}" if budgets else f"epsilon {entry['epsilon']:g}"


def reference(table: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The evaluations of the method without privacy."""
    return next((rows(entry) for entry in table["entries"] if not entry["private"]), {})


def measures(table: Mapping[str, Any]) -> list[str]:
    """What the methods of a table can be judged by."""
    private = [entry for entry in table["entries"] if entry["private"] and entry["by_seed"]]
    asked = [*table.get("study", {}).get("measures", []), "accuracy", "worst", "gap", "worst_owner", "cost_gap"]
    return [
        name
        for name in dict.fromkeys(asked)
        if private and all(measured.series(name, rows(entry), reference(table)) for entry in private)
    ]


def best(table: Mapping[str, Any], measure: str, at: str) -> Best | None:
    """The best private method of a table in ``measure`` at the promise ``at``.

    Tables from before the number of held-out records was written have intervals over trainings alone.
    """
    base, split = reference(table), Split(table.get("held_out_over_training"))
    chosen = {entry["method"]: rows(entry) for entry in table["entries"] if entry["private"] and promise(entry) == at}
    found = {name: measured.series(measure, each, base) for name, each in chosen.items()}
    chances = {name: measured.chance(measure, each, split, base) for name, each in chosen.items() if found[name]}
    means = {
        name: of_values(list(values.values()), chances[name], len(values), split, bounds=(0.0, math.inf))
        for name, values in found.items()
        if values
    }
    if not means:
        return None
    sign = -1 if measure in LOWER else 1
    first = max(means, key=lambda name: sign * means[name].value)
    tied = []
    for name, values in found.items():
        if name == first or not values:
            continue
        apart = declared_claims.difference(found[first], values, chance=chances[first] + chances[name], split=split)
        if not (sign * apart.value > 0 and math.isfinite(apart.low) and (apart.low > 0) == (apart.high > 0)):
            tied.append(name)
    top = means[first]
    return Best(measure, at, first, top.value, top.low, top.high, tuple(tied), top.count)


def guides(table: Mapping[str, Any]) -> bool:
    """Whether an experiment says which method to take, rather than answering a question of its own."""
    return bool(table["study"].get("guides", True))


def promises(table: Mapping[str, Any]) -> list[str]:
    """What was promised, strictest first."""
    private = [entry for entry in table["entries"] if entry["private"]]
    return list(dict.fromkeys(promise(entry) for entry in sorted(private, key=lambda entry: entry["epsilon"])))


def conclusions(table: Mapping[str, Any]) -> list[str]:
    """The conclusions of a page, one sentence each."""
    lines = []
    several = len(promises(table)) > 1
    for at in promises(table):
        for measure in measures(table):
            found = best(table, measure, at)
            if found is not None:
                lines.append((f"At {at}, " if several else "") + found.sentence)
    return lines


def claims(table: Mapping[str, Any]) -> list[str]:
    """The declared claims with their verdicts."""
    return [
        f"{claim['text']} ({claim['promise']}): **{claim['verdict']}**; difference {points(claim['difference'])} "
        f"points, {claim['seeds']} {'pairs of trainings' if claim.get('pooled') else 'seeds'}."
        for claim in table["claims"]
    ]


def judged(table: Mapping[str, Any]) -> list[str]:
    """The verdicts, with what these records alone tell, and how many trainings would decide what is not decided."""
    lines = []
    for words, claim in zip(claims(table), table["claims"], strict=True):
        alone = claim.get("alone") or {}
        more = (
            [f"Over trainings and splits of these records alone: {points(alone)}."]
            if alone.get("value") is not None
            else []
        )
        more += [f"Power: {claim['power']}."] if alone and claim["verdict"] == declared_claims.OPEN else []
        lines.append(" ".join([words, *more]))
    return lines


def points(found: Mapping[str, Any]) -> str:
    """A difference in points with its interval."""
    if found["value"] is None:
        return "not measured"
    ends = f" ({found['low']:+.1f} to {found['high']:+.1f})" if found["low"] is not None else ""
    return f"{found['value']:+.1f}{ends}"


def smallest(setting: Mapping[str, Any]) -> tuple[str, float] | None:
    """The smallest group of the training data and its share."""
    counts: Sequence[tuple[str, int]] = [item for item in setting.get("group_records", {}).items() if item[1]]
    if not counts:
        return None
    name, count = min(counts, key=lambda item: item[1])
    return name, count / setting["records"]
