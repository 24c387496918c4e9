"""``evenhand statement``: what is promised, to whom, and what is not covered."""

from __future__ import annotations

from evenhand.cli import options

NAME = "statement"
EXAMPLE = "evenhand statement runs/first"


def run(folder: options.RunFolder, json: options.Json = False) -> None:
    """Print the privacy statement for what the ledger charges now."""
    from evenhand.privacy.statement import markdown
    from evenhand.runs import Folder

    made = Folder.existing(folder).statement()
    options.emit(made, markdown(made), json)
