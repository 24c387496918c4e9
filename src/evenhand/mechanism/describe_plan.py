"""Describe a plan in words, for people who must decide before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenhand._numbers import promised, rounded_up
from evenhand.accounting import owner_classes
from evenhand.methods.catalogue import DENSITIES

if TYPE_CHECKING:
    from evenhand.mechanism.make_plan import Plan


def describe(plan: Plan) -> str:
    """Return the plan in words: promise, mechanism, and the public facts it relies on."""
    lines = [
        f"Plan {plan.digest[:12]}: {plan.method} ({plan.guarantee}), "
        + (
            f"{plan.steps} release{'s' if plan.steps > 1 else ''} over all {plan.facts.records} records"
            if plan.method in DENSITIES
            else f"{plan.steps} steps of about {plan.expected_batch:g} records"
        )
    ]
    if plan.earlier:
        before = sum(stage.steps for stage in plan.earlier)
        lines.append(f"  {before} of them were charged under earlier budgets and stay charged; for the rest:")
    lines += _owners(plan)
    lines += _levels(plan)
    facts = plan.facts
    lines.append(
        f"  relies on these public facts: {facts.records} records; owners {len(facts.owners)}; groups "
        f"{_listed(facts.groups)}; labels {_listed(facts.labels)}; inputs {facts.inputs or 'not declared'}"
        + (f", features of {facts.features}" if facts.features else "")
    )
    lines += [f"  warning: {text}" for text in warnings(plan)]
    return "\n".join(lines)


def warnings(plan: Plan) -> list[str]:
    """Return the plan's warnings, and for some methods the epsilon for replacing a record instead of removing it.

    The statement of the run contains the same sentences.
    """
    return [*plan.warnings(), *plan.replacement_warnings(plan.steps)]


def _levels(plan: Plan) -> list[str]:
    """Return a line per level of the schedule, at most six; the releases of a density are named."""
    names = list(DENSITIES[plan.method].releases[-plan.steps :]) if plan.method in DENSITIES else []
    lines = []
    for level in plan.levels[:6]:
        queries = f", side queries {', '.join(f'{noise:.4g}' for noise in level.queries)}" if level.queries else ""
        what = f"release of the {' and the '.join(names[: level.count])}" if names else f"{level.count} steps"
        names = names[level.count :]
        lines.append(f"  {what} with noise multiplier {level.noise:.4f} and clip bound {level.bound:g}{queries}")
    if len(plan.levels) > 6:
        lines.append(f"  ... and {len(plan.levels) - 6} more levels")
    return lines


def _owners(plan: Plan) -> list[str]:
    """Return a line per owner class; of many classes, quantiles over them."""
    rows = owner_classes.rows(plan, plan.epsilons)
    if len(rows) > owner_classes.LISTED:
        first, *rest = owner_classes.in_words(owner_classes.summary(rows))
        terms = f"at delta {plan.delta:g} ({plan.adjacency} {plan.unit})"
        return [f"  {first}, {terms}:", *(f"    {line}" for line in rest)]
    return [f"  {_owner(row, plan)}" for row in rows]


def _owner(row: Mapping[str, Any], plan: Plan) -> str:
    """Return the line of one owner class."""
    spends = (
        "no epsilon is established"
        if row["epsilon"] is None
        else f"spends epsilon {rounded_up(row['epsilon'])}"
        + ("" if row["budget"] is None else f" of {promised(row['budget'])} promised")
    )
    seen = ""
    if row["bound"] is not None:
        bound, noise = owner_classes.span(row["bound"]), owner_classes.span(row["noise_multiplier"])
        seen = f", bound {bound}, noise multiplier {noise}"
    sampled = "in every release" if plan.method in DENSITIES else f"sampled with rate {row['rate']:.6g}"
    return (
        f"each of {row['records']} records of owner {row['name']!r}: {spends} at delta {plan.delta:g}"
        f" ({plan.adjacency} {plan.unit}); {sampled}{seen}"
    )


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "not declared"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
