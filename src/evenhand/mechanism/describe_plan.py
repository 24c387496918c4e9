"""Describe a plan in words, for people who must decide before anything is spent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenhand._numbers import promised, rounded_up
from evenhand.accounting import owner_classes
from evenhand.mechanism.ways_by_person import compare_ways
from evenhand.methods.averages import noise_left
from evenhand.methods.densities import DENSITIES
from evenhand.methods.queries import GroupCounts, GroupLosses, GroupSizes

if TYPE_CHECKING:
    from evenhand.mechanism.make_plan import Plan
    from evenhand.types import Facts

_ABOUT_GROUPS = {query.name: query.sensitivity for query in (GroupCounts, GroupLosses, GroupSizes)}
"""Side queries whose answers are by group, with their sensitivity."""


def describe(plan: Plan) -> str:
    """Return the plan in words: promise, mechanism, and the public facts it relies on."""
    lines = [
        f"Plan {plan.digest[:12]}: {plan.method}{_packages(plan)} ({plan.guarantee}), "
        + (
            f"{plan.steps} release{'s' if plan.steps > 1 else ''} over all {plan.facts.records} {plan.facts.units}"
            if plan.method in DENSITIES
            else f"{plan.steps} steps of about {plan.expected_batch:g} {plan.facts.units}"
        )
    ]
    if plan.earlier:
        before = sum(stage.steps for stage in plan.earlier)
        lines.append(f"  {before} of them were charged under earlier budgets and stay charged; for the rest:")
    lines += _owners(plan)
    lines += _levels(plan) + _prior(plan)
    facts = plan.facts
    lines.append(
        f"  relies on these public facts: {facts.records} {facts.units}{_used(facts)}; owners {len(facts.owners)}; "
        f"groups {_listed(facts.groups)}; labels {_listed(facts.labels)}; inputs {facts.inputs or 'not declared'}"
        + (f", features of {facts.features}" if facts.features else "")
    )
    lines += _ways(plan)
    lines += [f"  warning: {text}" for text in warnings(plan)]
    return "\n".join(lines)


def warnings(plan: Plan) -> list[str]:
    """Return the plan's warnings, and for some methods the epsilon for replacing a record instead of removing it.

    The statement of the run contains the same sentences, except those on groups that noise hides: they cost no privacy.
    """
    return [*plan.warnings(), *plan.replacement_warnings(plan.steps), *_hidden_groups(plan)]


def _ways(plan: Plan) -> list[str]:
    """Return a line on the other way to train by person, of a plan that draws a person's records one by one."""
    ways = compare_ways(plan) if plan.facts.person_cap else None
    return [] if ways is None else [f"  by person in two ways: {ways}"]


def _used(facts: Facts) -> str:
    """Return how many records of a person a step uses, or there are, if it may be several."""
    several, cap = facts.records_per_person, facts.person_cap
    if cap:
        return f" of {facts.persons} persons, at most {cap} of each, drawn one by one"
    return f", of each at most {several} records a step" if several > 1 else ""


def _packages(plan: Plan) -> str:
    return f" of the package {' and '.join(plan.packages)}" if plan.packages else ""


def _hidden_groups(plan: Plan) -> list[str]:
    """Return a warning if the noise of a side query about groups hides a group of a tenth of the average size.

    The sizes of groups are not public, so it says from which size on a group is seen.
    """
    settings = plan.rule.get("settings", {})
    inner = settings["over"]["settings"] if isinstance(settings.get("over"), Mapping) else settings
    memory, lines = inner.get("memory", "none"), []
    for place, spec in enumerate(plan.queries):
        if spec["name"] not in _ABOUT_GROUPS:
            continue
        noise = max(level.queries[place] for level in plan.levels) * _ABOUT_GROUPS[spec["name"]]
        left = noise * noise_left(memory, plan.steps)
        if left > plan.expected_batch / (10 * len(plan.facts.groups)):
            size = math.ceil(left / plan.expected_batch * plan.facts.records)
            averaged = "" if memory == "none" else f", {left:.2g} after averaging"
            advice = "average the answers (memory=full), " if memory == "none" else ""
            lines.append(
                f"the noise of the side query {spec['name']!r} ({noise:.3g} per step{averaged}) is larger than what a "
                f"group of fewer than {size} records adds to it: such a group is treated by noise. To see smaller "
                f"groups {advice}give the query a larger share, or take larger batches."
            )
    return lines


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


def _prior(plan: Plan) -> list[str]:
    """Return a line on the counts that are released beside the steps, and on what they cost."""
    if plan.prior is None:
        return []
    what = {"each label": "records with each label"}.get(plan.prior.kind, plan.prior.kind)
    if not plan.certified:
        return [f"  counts of {what}, once, with noise multiplier {plan.prior.noise:.4g}"]
    dearest = max(range(len(plan.epsilons)), key=lambda owner: plan.epsilons[owner] or 0.0)
    alone = dataclasses.replace(plan, prior=None).composed(dearest).epsilon(plan.delta)
    spends = f"{rounded_up(alone)} of {rounded_up(plan.epsilons[dearest] or 0.0)} (delta {plan.delta:g})"
    return [
        f"  counts of {what}, released once with noise multiplier {plan.prior.noise:.4g}, part of the same promise: "
        f"the steps alone would spend epsilon {spends}"
    ]


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
    each = "each of" if plan.facts.promised == plan.facts.unit else f"each {plan.facts.promised} behind"
    return (
        f"{each} {row['records']} {plan.facts.units} of owner {row['name']!r}: {spends} at delta {plan.delta:g}"
        f" ({plan.adjacency} {plan.unit}); {sampled}{seen}"
    )


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "not declared"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
