"""``evenhand resume``: take the steps that remain of a run that was stopped or killed."""

from __future__ import annotations

from evenhand.cli import options
from evenhand.cli.train import interruptible, show

NAME = "resume"
EXAMPLE = "evenhand resume runs/first"


def run(folder: options.RunFolder, json: options.Json = False) -> None:
    """Continue a run; exit code 3 if it has no budget left for a step."""
    from evenhand.training import resume

    with interruptible():
        finished = resume(folder)
    show(finished, json)
