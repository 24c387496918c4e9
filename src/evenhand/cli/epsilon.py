"""``evenhand epsilon``: what a training costs, from its rate, noise and steps."""

from __future__ import annotations

from typing import Annotated

import typer

from evenhand.cli import options

NAME = "epsilon"
EXAMPLE = "evenhand epsilon --rate 0.01 --noise 1 --steps 1000 --delta 1e-5"


def run(
    rate: Annotated[float, typer.Option("--rate", help="Sampling rate: expected batch size / number of records.")],
    noise: Annotated[float, typer.Option("--noise", help="Noise multiplier: standard deviation / clip bound.")],
    steps: Annotated[int, typer.Option("--steps", help="Steps executed (not epochs).")],
    delta: Annotated[float, typer.Option("--delta", help="Probability that the bound may fail.")],
    json: options.Json = False,
) -> None:
    """Epsilon of Poisson-subsampled Gaussian steps: per record, add/remove."""
    from evenhand import _validate
    from evenhand.privacy import accountants
    from evenhand.privacy.statement import rounded_up

    _validate.whole(steps, "steps", low=0)
    value = accountants.epsilon([(rate, noise, steps)], _validate.delta(delta))
    text = (
        f"epsilon {rounded_up(value)} at delta {delta:g} (unit: one record; adjacency: add/remove; Poisson "
        f"sampling with rate {rate:g}, noise multiplier {noise:g}, {steps} steps)"
    )
    options.emit({"epsilon": value, "delta": delta, "unit": "one record", "adjacency": "add/remove"}, text, json)
