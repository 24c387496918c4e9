"""``evenhand plan``: every number that decides privacy, before anything is spent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from evenhand.cli import options, schedules
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from evenhand.privacy.budgets import Promise
    from evenhand.types import Facts

NAME = "plan"
EXAMPLE = "evenhand plan --owners strict=400,open=600 --budgets strict=1,open=8 --method idp_sample --epochs 30"


def run(
    data: options.Data = None,
    records: Annotated[int | None, typer.Option("--records", help="Number of records, instead of --data.")] = None,
    owners: Annotated[str | None, typer.Option("--owners", help="Records per owner, e.g. strict=400,open=600.")] = None,
    budgets: Annotated[str | None, typer.Option("--budgets", help="Epsilon per owner, e.g. strict=1,open=8.")] = None,
    method: options.MethodName = "dpsgd",
    settings: options.Settings = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    epochs: options.Epochs = 30.0,
    batch_size: options.BatchSize = None,
    schedule: schedules.Name = None,
    decay: schedules.Decay = None,
    every: schedules.Every = None,
    phases: schedules.Phases = None,
    plot: schedules.Plot = None,
    json: options.Json = False,
) -> None:
    """Print the plan for a promise (--epsilon, --budgets), or the cost of a noise (--noise)."""
    from evenhand import methods
    from evenhand.planning import plan

    chosen = methods.method(method or "dpsgd", options.parsed(settings))
    if schedule is not None:
        shape = schedules.built(schedule, decay, every, phases, bound=getattr(chosen.schedule, "bound", None))
        chosen = dataclasses.replace(chosen, schedule=shape)
    facts = _facts(data, records, owners)
    made = plan(
        chosen, _promise(epsilon, delta, noise, budgets), data=facts, epochs=epochs or 0.0, batch_size=batch_size
    )
    if plot is not None:
        shown = list(enumerate(facts.owner_names[:12]))
        spending = {name: made.spending(index) for index, name in shown}
        promised = {name: made.budgets[index] for index, name in shown}
        schedules.draw(plot, spending, {k: v for k, v in promised.items() if v is not None}, made.delta)
    options.emit({**made.to_json(), "digest": made.digest, "warnings": made.warnings()}, str(made), json)


def _facts(data: str | None, records: int | None, owners: str | None) -> Facts:
    from evenhand.types import Facts

    if sum(given is not None for given in (data, records, owners)) != 1:
        raise UsageError("Say what the plan is for, in one way: --data digits, --records N, or --owners a=400,b=600.")
    if data is not None:
        from evenhand.data import load

        return load(data)[0].facts
    if owners is not None:
        sizes = {name: int(count) for name, count in options.pairs(owners, "--owners").items()}
        return Facts(sum(sizes.values()), tuple(sizes.items()))
    return Facts(records or 0, (("all", records or 0),))


def _promise(epsilon: float | None, delta: float | None, noise: float | None, budgets: str | None) -> Promise | None:
    from evenhand.privacy.budgets import Budgets, FixedNoise, Privacy

    if sum(given is not None for given in (epsilon, noise, budgets)) > 1:
        raise UsageError("Give one of --epsilon, --budgets and --noise: one follows from the other.")
    if budgets is not None:
        return Budgets(options.pairs(budgets, "--budgets"), delta)
    if noise is not None:
        return FixedNoise(noise, delta)
    return None if epsilon is None else Privacy(epsilon, delta)
