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

    findings = verify(folder, key)
    whom = "one person" if findings["unit"] == "person" else "one record"
    epsilon = (
        "no epsilon is established"
        if findings["epsilon"] is None
        else f"epsilon {rounded_up(findings['epsilon'])} at delta {findings['delta']:g} (add/remove {whom})"
    )
    signer = f", signed by {findings['signed_by']}" if key is not None else ""
    lines = [f"NOT verified: {problem}" for problem in findings["problems"]]
    if findings["epsilon"] not in (None, findings["charged"]):
        epsilon += f", which is that of the whole plan; charged so far: {rounded_up(findings['charged'])}"
    lines = lines or [f"verified: {findings['steps']} of {findings['planned']} steps charged, {epsilon}{signer}"]
    options.emit(findings, "\n".join([*lines, *(f"note: {note}" for note in findings["notes"])]), json)
    if not findings["ok"]:
        raise typer.Exit(1)
