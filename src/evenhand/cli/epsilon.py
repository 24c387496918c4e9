"""``evenhand epsilon``: what a training costs, from its rate, noise and steps; or what a paper says that it costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from evenhand.cli import options
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from evenhand.methods.schedules import Schedule

NAME = "epsilon"
EXAMPLE = "evenhand epsilon --rate 0.01 --noise 1 --steps 1000 --delta 1e-5"


def run(
    rate: Annotated[float | None, typer.Option("--rate", help="Expected batch size / number of records.")] = None,
    noise: Annotated[float | None, typer.Option("--noise", help="Noise multiplier; the first one of a decay.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps executed (not epochs).")] = None,
    delta: Annotated[float, typer.Option("--delta", help="Probability that the bound may fail.")] = 1e-5,
    records: Annotated[int | None, typer.Option("--records", help="With --batch-size and --epochs.")] = None,
    batch_size: options.BatchSize = None,
    epochs: options.Epochs = None,
    schedule: options.ScheduleName = None,
    decay: options.ScheduleDecay = None,
    every: options.ScheduleEvery = None,
    phases: options.SchedulePhases = None,
    plot: options.SpendingPlot = None,
    as_published: Annotated[
        str | None,
        typer.Option("--as-published", metavar="PAPER", help="000, 002, 003 or 004: its formula and the truth."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="With --as-published: what the paper claims.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Compute epsilon of Poisson-subsampled Gaussian steps: per record, add/remove. Exit code 2 if it is infinite."""
    from evenhand import _validate
    from evenhand._numbers import rounded_up
    from evenhand.accounting import accountant

    shape = options.built_schedule(schedule, decay, every, phases)
    if as_published is not None:
        return _published(as_published, (records, batch_size, epochs), delta, shape, (epsilon, noise), json)
    sampled, count, per_epoch = _training(rate, steps, records, batch_size, epochs)
    level = _validate.number(noise, "noise", low=0, open_low=False) if noise is not None else _missing("--noise")
    events = [(sampled, level * part.noise, number) for number, part in shape.segments(count, per_epoch)]
    value = accountant.epsilon(events, _validate.delta(delta))
    words = (
        f"noise multiplier {level:g}"
        if len(events) < 2
        else f"{shape.name} noise from {level:g} to {events[-1][1]:.4g}"
    )
    if plot is not None and math.isfinite(value):
        options.draw_spending(plot, {"all": accountant.curve(events, delta)}, {}, delta)
    bounded = math.isfinite(value)
    shown = rounded_up(value) if bounded else f"{rounded_up(value)}, or above a million: this promises nothing,"
    text = (
        f"epsilon {shown} at delta {delta:g} (unit: one record; adjacency: add/remove; Poisson "
        f"sampling with rate {sampled:.6g}, {words}, {count} steps)"
    )
    json_value = value if bounded else "infinite"
    terms = {"delta": delta, "unit": "one record", "adjacency": "add/remove", "steps": count}
    options.emit({"epsilon": json_value, **terms}, text, json)
    if not bounded:
        raise typer.Exit(2)


def _training(
    rate: float | None, steps: int | None, records: int | None, batch: float | None, epochs: float | None
) -> tuple[float, int, float]:
    """Return rate, steps and steps per epoch, from either way of giving them."""
    from evenhand import _validate
    from evenhand.comparison.paper_claims import Setting

    if rate is not None and steps is not None and records is None and batch is None and epochs is None:
        _validate.number(rate, "rate", low=0)
        return rate, _validate.whole(steps, "steps", low=0), 1 / rate
    if rate is None and steps is None and records is not None and batch is not None and epochs is not None:
        setting = Setting(records, batch, epochs, 1e-5)
        return setting.rate, math.ceil(epochs * records / batch), records / batch
    raise UsageError("Say what runs: --rate with --steps, or --records with --batch-size and --epochs.")


def _missing(flag: str) -> float:
    raise UsageError(f"{flag} is missing: pass for example {flag} 1.")


def _published(
    paper: str,
    training: tuple[int | None, float | None, float | None],
    delta: float,
    shape: Schedule,
    claim: tuple[float | None, float | None],
    as_json: bool,
) -> None:
    from evenhand.cli.claims import row, table
    from evenhand.comparison.paper_claims import Setting, as_published

    records, batch, epochs = training
    if records is None or batch is None or epochs is None:
        raise UsageError("A paper's formula needs its setting: --records, --batch-size and --epochs.")
    claims = as_published(paper, Setting(records, batch, epochs, delta), shape, *claim)
    options.emit([row(entry) for entry in claims], table(claims), as_json)
