"""``evenhand resume``: take the steps that remain of a run that was stopped or killed, or whose budgets changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options
from evenhand.cli.train import interruptible, show
from evenhand.errors import UsageError

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
    json: options.Json = False,
) -> None:
    """Continue a run, with new budgets if any are given; exit code 3 if it has no budget left for a step."""
    from evenhand.training import resume

    if epsilon is not None or budgets is not None:
        _rebudget(folder, epsilon, budgets, epochs)
    elif epochs is not None:
        raise UsageError("Going on for longer spends more: say what is promised then, with --epsilon or --budgets.")
    with interruptible():
        finished = resume(folder)
    show(finished, json)


def _rebudget(folder: Path, epsilon: float | None, budgets: str | None, epochs: float | None) -> None:
    from evenhand.privacy.budgets import Budgets, Privacy
    from evenhand.rebudgeting import rebudget

    if epsilon is not None and budgets is not None:
        raise UsageError("Give one of --epsilon and --budgets.")
    found = options.budgets(budgets).get("budgets")
    if budgets is not None and not found:
        raise UsageError("--budgets takes NAME=NUMBER,NAME=NUMBER or a .toml file here: owners are known already.")
    rebudget(folder, Budgets(found) if found else Privacy(float(epsilon or 0.0)), epochs=epochs)
