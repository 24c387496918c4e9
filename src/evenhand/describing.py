"""A plan in words, for people who must decide before anything is spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenhand.privacy.statement import rounded_up

if TYPE_CHECKING:
    from evenhand.planning import Plan


def describe(made: Plan) -> str:
    """The plan in words: promise, mechanism, and the public facts it relies on."""
    lines = [
        f"Plan {made.digest[:12]}: {made.method} ({made.guarantee}), "
        f"{made.steps} steps of about {made.expected_batch:g} records"
    ]
    for index, (name, count) in enumerate(made.facts.owners):
        epsilon, budget = made.epsilons[index], made.budgets[index]
        spends = "no epsilon is established" if epsilon is None else f"spends epsilon {rounded_up(epsilon)}"
        promise = "" if budget is None or epsilon is None else f" of {budget:g} promised"
        lines.append(
            f"  each of {count} records of owner {name!r}: {spends}{promise} at delta {made.delta:g}"
            f" ({made.adjacency} {made.unit}); sampled with rate {made.rates[index]:.6g}, "
            f"bound x{made.scales[index]:.4g}"
        )
    for level in made.levels[:6]:
        queries = f", side queries {', '.join(f'{noise:.4g}' for noise in level.queries)}" if level.queries else ""
        lines.append(
            f"  {level.count} steps with noise multiplier {level.noise:.4f} and clip bound {level.bound:g}{queries}"
        )
    if len(made.levels) > 6:
        lines.append(f"  ... and {len(made.levels) - 6} more levels")
    facts = made.facts
    lines.append(
        f"  relies on these public facts: {facts.records} records; owners {len(facts.owners)}; groups "
        f"{_listed(facts.groups)}; labels {_listed(facts.labels)}; inputs {facts.inputs or 'not declared'}"
    )
    lines += [f"  warning: {text}" for text in made.warnings()]
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "not declared"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
