"""Describe a plan in words, for people who must decide before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenhand._numbers import promised, rounded_up
from evenhand.accounting import owner_classes
from evenhand.methods.catalogue import DENSITIES

if TYPE_CHECKING:
    from evenhand.mechanism.make_plan import Plan


def describe(made: Plan) -> str:
    """Return the plan in words: promise, mechanism, and the public facts it relies on."""
    lines = [
        f"Plan {made.digest[:12]}: {made.method} ({made.guarantee}), "
        + (
            f"{made.steps} release{'s' if made.steps > 1 else ''} over all {made.facts.records} records"
            if made.method in DENSITIES
            else f"{made.steps} steps of about {made.expected_batch:g} records"
        )
    ]
    if made.earlier:
        before = sum(stage.steps for stage in made.earlier)
        lines.append(f"  {before} of them were charged under earlier budgets and stay charged; for the rest:")
    lines += _owners(made)
    lines += _levels(made)
    facts = made.facts
    lines.append(
        f"  relies on these public facts: {facts.records} records; owners {len(facts.owners)}; groups "
        f"{_listed(facts.groups)}; labels {_listed(facts.labels)}; inputs {facts.inputs or 'not declared'}"
    )
    lines += [f"  warning: {text}" for text in warnings(made)]
    return "\n".join(lines)


def warnings(made: Plan) -> list[str]:
    """Return the plan's warnings, and for some methods the epsilon for replacing a record instead of removing it.

    The statement of the run contains the same sentences.
    """
    return [*made.warnings(), *made.replacement_warnings(made.steps)]


def _levels(made: Plan) -> list[str]:
    """Return a line per level of the schedule, at most six; the releases of a density are named."""
    names = list(DENSITIES[made.method].releases[-made.steps :]) if made.method in DENSITIES else []
    lines = []
    for level in made.levels[:6]:
        queries = f", side queries {', '.join(f'{noise:.4g}' for noise in level.queries)}" if level.queries else ""
        what = f"release of the {' and the '.join(names[: level.count])}" if names else f"{level.count} steps"
        names = names[level.count :]
        lines.append(f"  {what} with noise multiplier {level.noise:.4f} and clip bound {level.bound:g}{queries}")
    if len(made.levels) > 6:
        lines.append(f"  ... and {len(made.levels) - 6} more levels")
    return lines


def _owners(made: Plan) -> list[str]:
    """Return a line per owner class; of many classes, quantiles over them."""
    found = owner_classes.rows(made, made.epsilons)
    if len(found) > owner_classes.LISTED:
        first, *rest = owner_classes.in_words(owner_classes.summary(found))
        terms = f"at delta {made.delta:g} ({made.adjacency} {made.unit})"
        return [f"  {first}, {terms}:", *(f"    {line}" for line in rest)]
    return [f"  {_owner(row, made)}" for row in found]


def _owner(row: Mapping[str, Any], made: Plan) -> str:
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
    sampled = "in every release" if made.method in DENSITIES else f"sampled with rate {row['rate']:.6g}"
    return (
        f"each of {row['records']} records of owner {row['name']!r}: {spends} at delta {made.delta:g}"
        f" ({made.adjacency} {made.unit}); {sampled}{seen}"
    )


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "not declared"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
