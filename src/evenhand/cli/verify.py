"""``evenhand verify``: check a run folder against itself, without torch and without the data."""

from __future__ import annotations

import typer

from evenhand.cli import options

NAME = "verify"
EXAMPLE = "evenhand verify runs/first"


def run(folder: options.RunFolder, json: options.Json = False) -> None:
    """Recompute epsilon from the ledger; compare plan, noise, statement and model; exit code 1 if anything differs."""
    from evenhand.privacy.statement import rounded_up
    from evenhand.verification import verify

    found = verify(folder)
    epsilon = (
        "no epsilon is established"
        if found["epsilon"] is None
        else f"epsilon {rounded_up(found['epsilon'])} at delta {found['delta']:g} (add/remove one record)"
    )
    if found["epsilon"] not in (None, found["charged"]):
        epsilon += f", which is that of the whole plan; charged so far: {rounded_up(found['charged'])}"
    text = (
        f"verified: {found['steps']} of {found['planned']} steps charged, {epsilon}"
        if found["ok"]
        else "\n".join(["NOT verified:", *(f"  {problem}" for problem in found["problems"])])
    )
    text = "\n".join([text, *(f"note: {note}" for note in found["notes"])])
    options.emit(found, text, json)
    if not found["ok"]:
        raise typer.Exit(1)
