"""``evenhand keys``: make a key pair to sign run folders with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options

NAME = "keys"
EXAMPLE = "evenhand keys new --out trainer"


def run(
    action: Annotated[str, typer.Argument(metavar="new", help="What to do: new makes a key pair.")],
    out: Annotated[
        Path, typer.Option("--out", help="Private key file; the public key lies beside it, with .pub added.")
    ] = Path("evenhand.key"),
    passphrase: Annotated[
        bool,
        typer.Option("--passphrase", help="Protect the private key: asked for, or taken from EVENHAND_KEY_PASSPHRASE."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Make an Ed25519 key pair. Keep the private key to yourself; give the .pub file to whoever is to verify."""
    import os

    from evenhand import _validate
    from evenhand.runs import signatures

    _validate.known(action, ("new",), "action of keys")
    options.refuse_nameless(out)
    word = None
    if passphrase:
        word = os.environ.get(signatures.PASSPHRASE) or typer.prompt(
            "Passphrase", hide_input=True, confirmation_prompt=True
        )
    name = signatures.new_key(out, word)
    summary = {"private": str(out), "public": f"{out}.pub", "fingerprint": name}
    text = f"private key: {out} (keep it to yourself)\npublic key:  {out}.pub\nfingerprint: {name}"
    options.emit(summary, text, json)
