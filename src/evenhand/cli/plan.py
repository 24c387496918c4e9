"""``evenhand plan``: every number that decides privacy, before anything is spent."""

from __future__ import annotations

from typing import Annotated

import typer

from evenhand.cli import options
from evenhand.errors import UsageError

NAME = "plan"
EXAMPLE = "evenhand plan --records 60000 --epsilon 3 --delta 1e-5 --epochs 30 --batch-size 512"


def run(
    data: options.Data = None,
    records: Annotated[int | None, typer.Option("--records", help="Number of records, instead of --data.")] = None,
    method: options.MethodName = "dpsgd",
    settings: options.Settings = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    epochs: options.Epochs = 30.0,
    batch_size: options.BatchSize = None,
    json: options.Json = False,
) -> None:
    """Print the plan for a promise (--epsilon), or the cost of a noise (--noise)."""
    from evenhand import methods
    from evenhand.planning import plan
    from evenhand.privacy.budgets import FixedNoise, Privacy
    from evenhand.types import Facts

    if (data is None) == (records is None):
        raise UsageError("Say what the plan is for: --data digits, or --records N.")
    if epsilon is not None and noise is not None:
        raise UsageError("Give --epsilon or --noise, not both: one follows from the other.")
    if data is not None:
        from evenhand.data import load

        facts = load(data)[0].facts
    else:
        facts = Facts(records or 0, (("all", records or 0),))
    promise = FixedNoise(noise, delta) if noise is not None else None if epsilon is None else Privacy(epsilon, delta)
    chosen = methods.method(method or "dpsgd", options.parsed(settings))
    made = plan(chosen, promise, data=facts, epochs=epochs or 0.0, batch_size=batch_size)
    options.emit({**made.to_json(), "digest": made.digest, "warnings": made.warnings()}, str(made), json)
