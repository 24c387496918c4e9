"""Owner classes side by side: what each is exposed to and has spent; one by one for a few, as quantiles for many."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand._numbers import rounded_up, setting
from evenhand.accounting import accountant
from evenhand.accounting.accountant import merged_noise
from evenhand.accounting.many_owners import FEW, MANY_WITH_CAP, owner_epsilons
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan, Stage
    from evenhand.types import Event

_ONE_BY_ONE = 64  # distinct classes whose spend is computed one by one where no single number orders them
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


def owner_words(row: Mapping[str, Any], delta: float, unit: str = "record", one: str | None = None) -> str:
    """Return the promise to an owner class, and what its records (or persons) are exposed to, as a sentence.

    Args:
      row: of the class, see ``rows``.
      delta: that belongs to its epsilon.
      unit: what is counted and drawn.
      one: whom the promise is about, if that is another.

    Examples:
      >>> row = {"name": "a", "records": 9, "budget": None, "epsilon": 1.0}
      >>> owner_words(row, 1e-5)
      "Each of the 9 records of owner 'a': epsilon 1.000, delta 1e-05, add/remove one record."
      >>> owner_words(row, 1e-5, "record", "person")
      "Each person behind the 9 records of owner 'a': epsilon 1.000, delta 1e-05, add/remove one person."
    """
    promised = "" if row["budget"] is None else f", promised {row['budget']:g}"
    each, drawn = ("Each of", "drawn") if one in (None, unit) else (f"Each {one} behind", f"each {unit} drawn")
    return (
        f"{each} the {row['records']} {unit}s of owner {row['name']!r}: epsilon {rounded_up(row['epsilon'])}"
        f"{promised}, delta {delta:g}, add/remove one {one or unit}{_exposed(row, drawn)}."
    )


def _exposed(row: Mapping[str, Any], drawn: str) -> str:
    if row.get("bound") is None:
        return ""
    if row["rate"] == 0:
        return "; not drawn any more"
    bound, noise = span(row["bound"]), span(row["noise_multiplier"])
    return f"; {drawn} with rate {row['rate']:.4g}, clip bound {bound}, noise multiplier {noise}"


@lru_cache(maxsize=64)
def epsilon_by_class(
    stages: tuple[Stage, ...], delta: float, budgets: tuple[float | None, ...], cap: int = 1
) -> tuple[float, ...]:
    """Compute the epsilon of every owner class after all these stages, composed step by step: an upper bound.

    With a ``cap`` it is that of a person with at most so many records, for few classes only.

    Exact for a few distinct classes. For many, classes must be ordered: who is exposed more in one stage is exposed at
    least as much in every other; then one number along that order certifies them all (see ``owner_epsilons``).

    Examples:
      >>> from evenhand.accounting.plan import PlannedLevel, Stage
      >>> level = PlannedLevel(100, 1.0, 1.0)
      >>> one = Stage((0.01, 0.02), (1.0, 1.0), (level,))
      >>> once, twice = (epsilon_by_class((one,) * n, 1e-5, (None, None)) for n in (1, 2))
      >>> twice[0] == accountant.epsilon([(0.01, 1.0, 200)], 1e-5) > once[0]
      True
    """
    by_rate = all(len(set(stage.scales)) == 1 for stage in stages)
    if not by_rate and any(len(set(stage.rates)) > 1 for stage in stages):
        raise UsageError("Owners differ in their sampling rate or in their clip bound, not in both.")
    columns = [stage.rates if by_rate else stage.scales for stage in stages]
    rows, place = np.unique(np.array(columns).T, axis=0, return_inverse=True)

    def events(row: Sequence[float]) -> list[Event]:
        return [
            event
            for stage, value in zip(stages, row, strict=True)
            for event in (stage.events(value, stage.scales[0]) if by_rate else stage.events(stage.rates[0], value))
        ]

    ordered = bool((np.diff(rows, axis=0) >= 0).all() and (rows > 0).all())
    if len(rows) <= FEW or (not ordered and len(rows) <= _ONE_BY_ONE):
        spent = [accountant.epsilon(events(row.tolist()), delta, cap=cap) for row in rows]
        return tuple(spent[index] for index in place.reshape(-1).tolist())
    if cap > 1:
        raise UsageError(MANY_WITH_CAP.format(len(rows)))
    if not ordered:
        raise UsageError(
            f"The budgets of {len(rows)} owner classes changed in different orders, which cannot be certified. "
            f"Keep their order (who had more has at least as much), or use at most {_ONE_BY_ONE} classes."
        )
    along = np.exp(np.log(rows).mean(axis=1)) if len(stages) > 1 else rows[:, 0]
    points = along[place.reshape(-1)].tolist()
    return tuple(
        owner_epsilons(points, lambda t: events(_row_at(t, along, rows)), delta, by_rate=by_rate, candidates=budgets)
    )


def _row_at(point: float, along: np.ndarray, rows: np.ndarray) -> list[float]:
    """Return the class at a point of the order: between two classes the mixture of both in every stage."""
    return [float(np.interp(point, along, column)) for column in rows.T] if rows.shape[1] > 1 else [point]
