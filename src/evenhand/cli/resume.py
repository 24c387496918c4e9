"""``evenhand resume``: take the steps that remain of a run that was stopped or killed, or whose budgets changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options, processes, result
from evenhand.cli.train import interruptible, signed
from evenhand.errors import UsageError
from evenhand.terminal import say

NAME = "resume"
EXAMPLE = "evenhand resume runs/first --budgets strict=1,open=12"


def run(
    folder: options.RunFolder,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="A new promise to every record, for all steps together.")
    ] = None,
    budgets: Annotated[
        str | None, typer.Option("--budgets", help="New budgets per owner: strict=1,open=12 or FILE.toml.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Further passes under new budgets; default what remains.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Budgets below what is spent: a new folder, from the last checkpoint that fits."),
    ] = None,
    release_untrained: Annotated[
        bool,
        typer.Option("--release-untrained", help="Release the model although a crash took every step it had learnt."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FILE.py:FACTORY", help="If the model file moved or changed: it is executed."),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option("--features", metavar="FILE.py:FACTORY", help="If the file of the features did, likewise."),
    ] = None,
    sign: options.Sign = None,
    json: options.Json = False,
) -> None:
    """Continue a run, with new budgets if any are given; exit code 3 if it has no budget left for a step."""
    from evenhand.runs.signatures import read_private_key
    from evenhand.training.config import of_run
    from evenhand.training.fit import resume

    key = None if sign is None else read_private_key(sign)
    if processes.several() and (epsilon, budgets, epochs, out) != (None,) * 4:
        raise UsageError(
            "New budgets are given in one process, without torchrun: evenhand resume RUN --epsilon ... trains on too. "
            "Nothing was spent."
        )
    if epsilon is not None or budgets is not None:
        _rebudget(folder, epsilon, budgets, epochs, out)
    elif epochs is not None:
        raise UsageError("Going on for longer spends more: say what is promised then, with --epsilon or --budgets.")
    elif out is not None:
        raise UsageError("--out is for budgets below what is spent: give them too. A run goes on in its own folder.")
    with interruptible(), processes.joined(lambda: of_run(folder).device):
        finished = resume(
            folder if out is None else out, model=model, features=features, release_untrained=release_untrained
        )
    if not processes.leads():
        return
    if key is not None:
        signed(finished, key)
    result.show(finished, json)


def _rebudget(folder: Path, epsilon: float | None, budgets: str | None, epochs: float | None, out: Path | None) -> None:
    from evenhand.accounting.budgets import Budgets, Privacy
    from evenhand.training.rebudget import rebudget

    if epsilon is not None and budgets is not None:
        raise UsageError("Give one of --epsilon and --budgets.")
    owner_budgets = options.budgets(budgets).get("budgets")
    if budgets is not None and not owner_budgets:
        raise UsageError("--budgets takes NAME=NUMBER,NAME=NUMBER or a .toml file here: owners are known already.")
    plan = rebudget(
        folder, Budgets(owner_budgets) if owner_budgets else Privacy(float(epsilon or 0.0)), epochs=epochs, out=out
    )
    if out is not None:
        step = sum(stage.steps for stage in plan.earlier)
        left = (
            f"{plan.steps - step} steps remain" if plan.steps > step else "no step remains, the model is taken as it is"
        )
        say(
            f"Gone back to step {step}: {left}. {folder} is withdrawn: delete what it computed after that step, "
            "weights and metrics, and never release it."
        )
