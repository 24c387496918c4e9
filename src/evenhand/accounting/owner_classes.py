"""Owner classes side by side: what each is exposed to and has spent; one by one for a few, as quantiles for many."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenhand._numbers import rounded_up, setting
from evenhand.accounting.accountant import merged_noise

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan

LISTED = 20
"""Classes that are listed one by one; more are summarised, with the whole table in a file."""
OWNERS_SHOWN = 50
"""Classes that a statement has a sentence for; more are counted."""
FIGURES = ("epsilon", "budget", "rate", "bound", "noise_multiplier")
QUANTILES = {"least": 0.0, "lower_quarter": 0.25, "middle": 0.5, "upper_quarter": 0.75, "most": 1.0}


def rows(plan: Plan, spent: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return one row per class, in the order of the plan: records, budget, spent epsilon, exposure of a record.

    ``bound`` is the clip bound of its gradient and ``noise_multiplier`` the noise of a whole step over its bound, side
    queries included: smallest and largest over the steps that remain. Both are null where nothing is bounded.
    """
    bounds = [level.bound for level in plan.levels]
    levels = {(level.noise, level.queries) for level in plan.levels}
    pairs: dict[float, tuple[list[float] | None, list[float] | None]] = {
        scale: _exposure((min(bounds), max(bounds)), levels, scale) if plan.certified else (None, None)
        for scale in set(plan.scales)
    }
    return [
        {
            "name": name,
            "records": records,
            "budget": budget,
            "epsilon": epsilon,
            "rate": rate,
            "bound_scale": scale,
            "bound": pairs[scale][0],
            "noise_multiplier": pairs[scale][1],
        }
        for (name, records), budget, epsilon, rate, scale in zip(
            plan.facts.owners, plan.budgets, spent, plan.rates, plan.scales, strict=True
        )
    ]


def _exposure(
    bounds: tuple[float, float], levels: Collection[tuple[float, tuple[float, ...]]], scale: float
) -> tuple[list[float], list[float]]:
    """Return the least and the largest clip bound, and the least and the largest noise, of a class with this scale."""
    noises = [merged_noise(noise / scale, queries) for noise, queries in levels]
    return [bounds[0] * scale, bounds[1] * scale], [min(noises), max(noises)]


def summary(classes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute quantiles over classes of every figure (of pairs: their cheaper end), and the class that spent most.

    Examples:
      >>> few = [{"name": str(e), "epsilon": e, "budget": 2 * e, "rate": 0.1, "bound": [1, 2]} for e in (1.0, 2.0, 3.0)]
      >>> quantiles = summary(few)
      >>> quantiles["classes"], quantiles["dearest"], quantiles["epsilon"]["middle"], quantiles["bound"]["most"]
      (3, '3.0', 2.0, 2)
    """
    quantiles: dict[str, Any] = {"classes": len(classes), "dearest": dearest(classes)}
    for figure in FIGURES:
        values = sorted(_single(figure, row[figure]) for row in classes if row.get(figure) is not None)
        if values:
            last = len(values) - 1
            quantiles[figure] = {name: values[math.ceil(share * last)] for name, share in QUANTILES.items()}
    return quantiles


def _single(figure: str, value: Any) -> float:
    """Return one number for a pair over steps: the largest bound, the smallest noise."""
    if isinstance(value, int | float):
        return value
    return float(min(value)) if figure == "noise_multiplier" else max(value)


def dearest(classes: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the class that spent most; one without a bound comes first."""
    return str(max(classes, key=lambda row: math.inf if row["epsilon"] is None else row["epsilon"])["name"])


def chosen_few(epsilons: Sequence[float | None], count: int = 12) -> list[int]:
    """Return positions of at most ``count`` classes that stand for all: cheapest, dearest, and ranks between them.

    Examples:
      >>> chosen_few([3.0, 1.0, 2.0]), chosen_few([float(value) for value in range(1000)], 3)
      ([0, 1, 2], [0, 500, 999])
    """
    places = range(len(epsilons))
    if len(epsilons) <= count:
        return list(places)
    ranked = sorted(places, key=lambda place: math.inf if epsilons[place] is None else float(epsilons[place] or 0.0))
    return [ranked[round(rank * (len(ranked) - 1) / (count - 1))] for rank in range(count)]


def within(classes: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each of these classes is known to spend at most its own budget."""
    return all(
        row["epsilon"] is not None and row["budget"] is not None and row["epsilon"] <= row["budget"] * (1 + 1e-9)
        for row in classes
    )


def span(pair: Sequence[float] | None) -> str:
    """Return a pair as text: one number if both are equal.

    Examples:
      >>> span([1.0, 1.0]), span([0.5, 2.0]), span(None)
      ('1', '0.5 to 2', 'none')
    """
    return "none" if pair is None else setting(*pair)


def in_words(quantiles: Mapping[str, Any]) -> list[str]:
    """Return a summary as lines of text: one per figure, from the least over the quartiles to the most.

    Examples:
      >>> epsilons = dict(zip(QUANTILES, (1, 2, 3, 4, 5)))
      >>> in_words({"classes": 50, "dearest": "a", "epsilon": epsilons})[1]
      'spent epsilon: 1.000 to 5.000 (quartiles 2.000, 3.000, 4.000)'
    """
    names = {"epsilon": "spent epsilon", "budget": "promised epsilon", "rate": "sampling rate"}
    names |= {"bound": "clip bound", "noise_multiplier": "noise multiplier"}
    lines = [f"{quantiles['classes']} owner classes; most is spent by {quantiles['dearest']!r}"]
    for figure, name in names.items():
        if figure in quantiles:
            shown = rounded_up if figure == "epsilon" else "{:.4g}".format
            least, lower, middle, upper, most = (shown(quantiles[figure][key]) for key in QUANTILES)
            lines.append(
                f"{name}: {least}" + ("" if least == most else f" to {most} (quartiles {lower}, {middle}, {upper})")
            )
    return lines


def further_owners(owners: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence on the owners that are not listed; it says that they keep to their budgets only if they do.

    Examples:
      >>> row = {"epsilon": 1.0, "budget": 2.0}
      >>> further_owners([row] * 52), further_owners([row])
      (['And 2 more owners, each within its own budget.'], [])
    """
    left = owners[OWNERS_SHOWN:]
    if not left:
        return []
    remark = "each within its own budget" if within(left) else "listed in statement.json"
    return [f"And {len(left)} more owners, {remark}."]


def owner_words(row: Mapping[str, Any], delta: float) -> str:
    """Return the promise to an owner class, and what its records are exposed to, as a sentence."""
    promised = "" if row["budget"] is None else f", promised {row['budget']:g}"
    return (
        f"Each of the {row['records']} records of owner {row['name']!r}: epsilon {rounded_up(row['epsilon'])}"
        f"{promised}, delta {delta:g}, add/remove one record{_exposed(row)}."
    )


def _exposed(row: Mapping[str, Any]) -> str:
    if row.get("bound") is None:
        return ""
    if row["rate"] == 0:
        return "; not drawn any more"
    bound, noise = span(row["bound"]), span(row["noise_multiplier"])
    return f"; drawn with rate {row['rate']:.4g}, clip bound {bound}, noise multiplier {noise}"
