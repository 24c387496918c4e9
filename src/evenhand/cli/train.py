"""``evenhand train``: from data to a private model, a statement and a report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.cli import options

if TYPE_CHECKING:
    from evenhand.results import Run

NAME = "train"
EXAMPLE = (
    "evenhand train --data digits --method dpsgd --epsilon 3 --delta 1e-4 --epochs 30 --batch-size 128 --out runs/first"
)


def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Settings; flags override them.")
    ] = None,
    data: options.Data = None,
    model: Annotated[str | None, typer.Option("--model", help="Built-in model: linear or mlp.")] = None,
    method: options.MethodName = None,
    settings: options.Settings = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Learning rate of SGD with momentum 0.9; falls linearly to 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Initialisation and splits only, never noise.")] = None,
    insecure_seed: Annotated[
        int | None, typer.Option("--insecure-seed", help="Reproducible noise: research only, the statement says so.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; default a new one in runs/.")] = None,
    json: options.Json = False,
) -> None:
    """Train privately and write model, statement and report into a run folder."""
    from evenhand.config import Config, from_toml, merged

    asked = options.given(
        data=data,
        model=model,
        method=method,
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        insecure_seed=insecure_seed,
        settings=options.parsed(settings),
    )
    chosen = merged(from_toml(config) if config is not None else Config(), asked)
    from evenhand.training import fit

    training, held_out = chosen.load_data()
    with interruptible():
        finished = fit(
            chosen.build_model(training.facts),
            training,
            epsilon=chosen.epsilon,
            delta=chosen.delta,
            noise=chosen.noise,
            method=chosen.method,
            settings=chosen.settings,
            epochs=chosen.epochs,
            batch_size=chosen.batch_size,
            lr=chosen.lr,
            test=held_out,
            out=out,
            insecure_seed=chosen.insecure_seed,
            config=chosen,
        )
    show(finished, json)


@contextmanager
def interruptible() -> Iterator[None]:
    """A run stopped by a signal says how to go on and exits with the signal's code."""
    from evenhand.training import Interrupted

    try:
        yield
    except Interrupted as stop:
        print(f"\nevenhand: {stop}", file=sys.stderr)
        raise typer.Exit(128 + stop.number) from None


def show(finished: Run, as_json: bool) -> None:
    """The end of ``train`` and ``resume``: where the run is, who is served how well, what is promised."""
    found = summary(finished)
    lines = [f"accuracy {found['accuracy']:.1%}" if found["accuracy"] is not None else "no held-out data"]
    lines += [f"  {name}: {value:.1%}" for name, value in found["groups"].items()]
    lines += ["", str(finished.privacy), "", f"report: {finished.path / 'report.html'}"]
    if as_json and sys.stderr.isatty():
        print("\n".join(lines), file=sys.stderr)
    options.emit(found, "\n".join(lines), as_json)


def summary(finished: Run) -> dict[str, Any]:
    """What scripts rely on."""
    last = finished.metrics[-1] if finished.metrics else {"accuracy": None, "groups": {}}
    statement = finished.privacy.data
    return {
        "epsilon": statement["guarantee"]["epsilon"],
        "delta": statement["guarantee"]["delta"],
        "accuracy": last["accuracy"],
        "groups": last["groups"],
        "steps": statement["mechanism"]["steps_charged"],
        "method": statement["mechanism"]["method"],
        "guarantee": statement["guarantee"]["level"],
        "run": str(finished.path),
    }
