"""``evenhand plan``: every number that decides privacy, before anything is spent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.cli import options
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from evenhand.accounting.budgets import Promise
    from evenhand.accounting.plan import Plan
    from evenhand.methods.catalogue import Density
    from evenhand.methods.schedules import Schedule
    from evenhand.types import Facts

NAME = "plan"
EXAMPLE = "evenhand plan --owners strict=400,open=600 --budgets strict=1,open=8 --method idp_sample --epochs 30"


def run(
    data: options.Data = None,
    data_dir: options.DataDir = None,
    source: options.Source = None,
    features: options.Features = None,
    records: Annotated[int | None, typer.Option("--records", help="Number of records, instead of --data.")] = None,
    owners: Annotated[
        str | None,
        typer.Option("--owners", help="Records per owner, e.g. strict=400,open=600; with --data: label, or a file."),
    ] = None,
    persons: options.Persons = None,
    records_per_person: options.RecordsPerPerson = None,
    person_cap: options.PersonCap = None,
    budgets: options.Budgets = None,
    method: options.MethodName = "dpsgd",
    settings: options.Settings = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    epochs: options.Epochs = 30.0,
    batch_size: options.BatchSize = None,
    schedule: options.ScheduleName = None,
    decay: options.ScheduleDecay = None,
    every: options.ScheduleEvery = None,
    phases: options.SchedulePhases = None,
    plot: options.SpendingPlot = None,
    json: options.Json = False,
) -> None:
    """Print the plan for a promise (--epsilon, --budgets), or the cost of a noise (--noise)."""
    from evenhand.accounting.owner_classes import chosen_few, rows
    from evenhand.mechanism.describe_plan import warnings
    from evenhand.mechanism.ways_by_person import compare_ways
    from evenhand.methods.catalogue import DENSITIES
    from evenhand.runs import statement_files

    name = method or "dpsgd"
    shape = None if schedule is None else partial(options.built_schedule, schedule, decay, every, phases)
    planner = _planner(name, options.parsed(settings), shape, epochs or 0.0, batch_size)
    asked = options.budgets(budgets)
    named = options.given(data=data, data_dir=data_dir, source=options.source(source), features=features)
    named |= options.given(persons=persons, records_per_person=records_per_person, person_cap=person_cap)
    facts = _facts(named, records, owners, asked.get("record_budgets"))
    promise = _promise(epsilon, delta, noise, asked, facts)
    if name in DENSITIES and DENSITIES[name].guarantee == "not established":
        _unproven(DENSITIES[name], facts, json)
        return
    plan = planner(facts, promise)
    if plot is not None:
        shown = {facts.owner_names[index]: index for index in chosen_few(plan.epsilons)}
        spending = {name: plan.spending(index) for name, index in shown.items()}
        promised = {name: plan.budgets[index] for name, index in shown.items()}
        limits = {name: value for name, value in promised.items() if value is not None}
        options.draw_spending(plot, spending, limits, plan.delta, plan.facts.promised)
    owner_figures = statement_files.as_json(rows(plan, plan.epsilons), {}) if json else {}
    ways = compare_ways(plan)
    compared = {} if ways is None else {"by_person_in_two_ways": {**dataclasses.asdict(ways), "better": ways.better}}
    told = {**plan.to_json(), **owner_figures, **compared, "digest": plan.digest, "warnings": warnings(plan)}
    options.emit(told, str(plan), json)


def _planner(
    name: str,
    settings: Mapping[str, Any],
    shape: Callable[..., Schedule] | None,
    epochs: float,
    batch_size: float | None,
) -> Callable[[Facts, Promise | None], Plan]:
    """Return a function that plans the method called ``name``; names are checked here, before data are loaded."""
    from evenhand.mechanism.make_plan import plan
    from evenhand.methods import catalogue
    from evenhand.methods.catalogue import DENSITIES

    if name in DENSITIES:
        from evenhand.training.config import Config
        from evenhand.training.from_config import planned

        if shape is not None:
            raise UsageError(f"{name!r} takes no steps that could follow a schedule: leave out --schedule.")
        return partial(planned, Config(method=name, settings=settings))
    chosen = catalogue.method(name, settings)
    if shape is not None:
        chosen = dataclasses.replace(chosen, schedule=shape(bound=getattr(chosen.schedule, "bound", None)))
    return lambda facts, promise: plan(chosen, promise, data=facts, epochs=epochs, batch_size=batch_size)


def _unproven(density: Density, facts: Facts, json: bool) -> None:
    """Print that nothing can be promised, and why: there is no noise to plan and no epsilon to print."""
    from evenhand.density.published_smoothing import WHY

    nothing = [None] * len(facts.owners)
    told = {
        "method": density.name,
        "guarantee": density.guarantee,
        "budgets": nothing,
        "epsilons": nothing,
        "warnings": list(WHY),
    }
    said = (
        f"{density.name} ({density.guarantee}): no epsilon is established for any promise, so nothing can be planned."
    )
    options.emit(told, "\n  ".join([said, *WHY]), json)


def _facts(named: Mapping[str, Any], records: int | None, owners: str | None, by_record: str | None) -> Facts:
    from evenhand.types import Facts

    if "person_cap" in named and "persons" not in named:
        raise UsageError("--person-cap is about persons: name the column of --data that tells them apart, --persons.")
    if "persons" in named and "data" not in named:
        raise UsageError("--persons names a column of --data. Without data count persons: --records N is their number.")
    sizes = None if "data" in named or owners is None else options.pairs(owners, "--owners")
    if sum(given is not None for given in (named.get("data"), records, sizes)) != 1:
        raise UsageError("Say what the plan is for, in one way: --data digits, --records N, or --owners a=400,b=600.")
    if "data" in named:
        from evenhand.training.config import Config, merged

        return merged(Config(owners=owners, record_budgets=by_record), named).load_data()[0].facts
    if sizes is not None:
        counts = {name: int(count) for name, count in sizes.items()}
        return Facts(sum(counts.values()), tuple(counts.items()))
    return Facts(records or 0, (("all", records or 0),))


def _promise(
    epsilon: float | None, delta: float | None, noise: float | None, budgets: Mapping[str, Any], facts: Facts
) -> Promise | None:
    from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy

    if sum(given is not None for given in (epsilon, noise, budgets or None)) > 1:
        raise UsageError("Give one of --epsilon, --budgets and --noise: one follows from the other.")
    if "record_budgets" in budgets:
        return Budgets.named(facts.owner_names, delta)
    if budgets:
        return Budgets(budgets["budgets"], delta)
    if noise is not None:
        return FixedNoise(noise, delta)
    return None if epsilon is None else Privacy(epsilon, delta)
