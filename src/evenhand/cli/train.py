"""``evenhand train``: from data to a private model, a statement and a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenhand.cli import early_checks, options, processes, result
from evenhand.errors import UsageError
from evenhand.terminal import note, say

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from evenhand.mechanism.make_plan import Plan
    from evenhand.training.loggers import Logger
    from evenhand.training.run import Run

NAME = "train"
EXAMPLE = (
    "evenhand train --data digits --method dpsgd --epsilon 3 --delta 1e-5 --epochs 30 --batch-size 128 --out runs/first"
)


def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Settings; flags override them.")
    ] = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    source: options.Source = None,
    features: options.Features = None,
    label: Annotated[str | None, typer.Option("--label", help="Column to predict, in a file of your own.")] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", help="Who is reported on: label, a column, or a file of names.")
    ] = None,
    owners: options.Owners = None,
    budgets: options.Budgets = None,
    test_data: Annotated[str | None, typer.Option("--test-data", help="Held-out file, instead of a share.")] = None,
    test_share: Annotated[float | None, typer.Option("--test-share", help="Share that is held out.")] = None,
    keep_together: options.KeepTogether = None,
    persons: options.Persons = None,
    records_per_person: options.RecordsPerPerson = None,
    person_cap: options.PersonCap = None,
    delimiter: Annotated[str | None, typer.Option("--delimiter", help="Between the cells of a CSV file.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="linear, mlp, cnn, tanh_cnn ..., or your own: file.py:factory."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, mps: where to compute.")] = None,
    method: options.MethodName = None,
    settings: options.Settings = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = None,
    lr: options.Lr = None,
    lr_schedule: options.LrSchedule = None,
    momentum: options.Momentum = None,
    weight_decay: options.WeightDecay = None,
    average: options.Average = None,
    augment: options.Augment = None,
    views: options.Views = None,
    micro_batch: options.MicroBatch = None,
    lean: options.Lean = None,
    precision: options.Precision = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Initialisation and splits only, never noise.")] = None,
    insecure_seed: Annotated[
        int | None, typer.Option("--insecure-seed", help="Reproducible noise: research only, the statement says so.")
    ] = None,
    compose: Annotated[
        bool | None, typer.Option("--compose/--no-compose", help="Add up with earlier runs on the same data.")
    ] = None,
    training_records: Annotated[
        bool | None,
        typer.Option("--training-records", help="Held-out data hold training records; figures stay in private/."),
    ] = None,
    allow_not_finite: Annotated[
        bool | None, typer.Option("--allow-not-finite", help="Train although many records are not finite.")
    ] = None,
    no_prior: Annotated[
        bool | None,
        typer.Option("--no-prior", help="Release no noisy counts of the labels: they cost under 1 % of the promise."),
    ] = None,
    least_records: options.LeastRecords = None,
    prior: options.PriorCounts = None,
    goal: options.GoalName = None,
    tau: options.Tau = None,
    audit: Annotated[
        str | None,
        typer.Option("--audit", help="quick or thorough: attack the plan before the first step, without data."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; default a new one in runs/.")] = None,
    log: Annotated[
        list[str] | None, typer.Option("--log", help="Released values to: tensorboard, wandb (in --out), mlflow.")
    ] = None,
    metric: options.MetricNames = None,
    sign: options.Sign = None,
    json: options.Json = False,
) -> None:
    """Train privately and write model, statement and report into a run folder."""
    first = options.metrics(metric)
    asked = options.given(
        data=data,
        data_dir=data_dir,
        source=options.source(source),
        features=features,
        label=label,
        groups=groups,
        owners=owners,
        test_data=test_data,
        test_share=test_share,
        keep_together=keep_together,
        persons=persons,
        records_per_person=records_per_person,
        person_cap=person_cap,
        delimiter=delimiter,
        model=model,
        device=device,
        method=method,
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        epochs=epochs,
        batch_size=batch_size,
        loss=loss,
        optimizer=optimizer,
        lr=lr,
        lr_schedule=lr_schedule,
        momentum=momentum,
        weight_decay=weight_decay,
        average=average,
        augment=augment,
        views=views,
        micro_batch=micro_batch,
        lean=lean,
        precision=precision,
        seed=seed,
        insecure_seed=insecure_seed,
        compose=compose,
        training_records=training_records,
        allow_not_finite=allow_not_finite,
        prior=False if no_prior else None,
        prior_counts=options.counts(prior),
        goal=goal,
        tau=options.strength(tau),
        least_records=least_records,
        audit=audit,
        settings=options.parsed(settings),
    ) | options.budgets(budgets)
    early_checks.train(config, asked, out, log or ())
    from evenhand.training.config import Config, absolute, from_toml, merged

    chosen = absolute(merged(from_toml(config) if config is not None else Config(), asked), Path.cwd())
    from evenhand.runs.signatures import read_private_key
    from evenhand.training.from_config import train

    key = None if sign is None else read_private_key(sign)
    told = [logger(name, out) for name in log or () if processes.leads()]
    options.tell_unit(chosen.keep_together)
    with interruptible(), processes.joined(lambda: chosen.device):
        finished = train(chosen, *chosen.load_data(), out, on_start=None if json else announce, loggers=told)
    if not processes.leads():
        return
    if key is not None:
        signed(finished, key)
    result.show(finished, json, tips=True, first=first)


def signed(finished: Run, key: Ed25519PrivateKey) -> None:
    """Sign a finished run and say by which key, so that it can be compared."""
    from evenhand.runs.verify import sign

    note(f"signed by {sign(finished.path, key)}")


def logger(name: str, out: Path | None) -> Logger:
    """Return the logger called ``name``; refuse an unknown or missing one before anything is spent."""
    from evenhand import _validate
    from evenhand.training import loggers

    if _validate.known(name, early_checks.LOGGERS, "logger") == "mlflow":
        return loggers.MlflowLogger()
    if out is None:
        raise UsageError(f"--log {name} writes into the run folder: say which, with --out.")
    return loggers.WandbLogger(out) if name == "wandb" else loggers.TensorBoardLogger(out / "tensorboard")


def announce(plan: Plan, seconds: float) -> None:
    """Print what is about to be spent, and how long it will take."""
    from evenhand.training.progress import words

    note(f"{plan}\n\nThis will take {words(seconds)}; nothing is spent yet.\n")


@contextmanager
def interruptible() -> Iterator[None]:
    """Say how to go on when a signal stops the run, and exit with the signal's code."""
    from evenhand.training.loop import Interrupted

    try:
        yield
    except Interrupted as stop:
        say(f"\nevenhand: {stop}")
        raise typer.Exit(128 + stop.number) from None
    except KeyboardInterrupt:
        say("\nevenhand: Stopped at once. What was charged stays charged; steps since the last checkpoint are lost.")
        say("Continue a run that has begun with: evenhand resume RUN")
        raise typer.Exit(130) from None
