"""``evenhand verify``: check a run folder against itself, without torch and without the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options

NAME = "verify"
EXAMPLE = "evenhand verify runs/first --key trainer.pub"


def run(
    folder: options.RunFolder,
    key: Annotated[
        Path | None, typer.Option("--key", help="Public key: the folder must be signed with it, as it is now.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Recompute epsilon from the ledger; compare plan, noise, statement and files; exit code 1 if anything differs."""
    from evenhand._numbers import rounded_up
    from evenhand.runs.verify import verify

    found = verify(folder, key)
    epsilon = (
        "no epsilon is established"
        if found["epsilon"] is None
        else f"epsilon {rounded_up(found['epsilon'])} at delta {found['delta']:g} (add/remove one record)"
    )
    signer = f", signed by {found['signed_by']}" if key is not None else ""
    lines = [f"NOT verified: {problem}" for problem in found["problems"]]
    if found["epsilon"] not in (None, found["charged"]):
        epsilon += f", which is that of the whole plan; charged so far: {rounded_up(found['charged'])}"
    lines = lines or [f"verified: {found['steps']} of {found['planned']} steps charged, {epsilon}{signer}"]
    options.emit(found, "\n".join([*lines, *(f"note: {note}" for note in found["notes"])]), json)
    if not found["ok"]:
        raise typer.Exit(1)
