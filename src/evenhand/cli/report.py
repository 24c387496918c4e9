"""``evenhand report``: write the page of a run again from its recorded evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options

NAME = "report"
EXAMPLE = "evenhand report runs/first --out report.html"


def run(
    folder: options.RunFolder,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write; default report.html in the run.")] = None,
    json: options.Json = False,
) -> None:
    """One self-contained HTML page: accuracy per group, learning curves, spent epsilon, the statement in words."""
    from evenhand.results import Run
    from evenhand.runs import Folder

    found = Folder.existing(folder)
    written = Run(found).report().save(out or found.path / "report.html")
    options.emit({"report": str(written)}, f"report: {written}", json)
