"""``evenhand report``: write the page of a run again from its recorded evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options
from evenhand.errors import UsageError

NAME = "report"
EXAMPLE = "evenhand report runs/first --out report.html --card model-card.md"


def run(
    folder: options.RunFolder,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write; default report.html in the run.")] = None,
    card: Annotated[Path | None, typer.Option("--card", help="Also write the model card, as Markdown.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With figures of small groups: private/report-full.html.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Write one self-contained HTML page: accuracy per group, learning curves, spent epsilon, the statement in words.

    In the run folder its digest goes into the ledger, so that `verify` covers it. A model card that a full disk kept
    out of the folder is written too.
    """
    from evenhand.runs.folder import Folder, write_durably
    from evenhand.training.run import Run

    options.refuse_nameless(out, card)
    run_folder = Folder.existing(folder)
    finished_run = Run(run_folder)
    research = bool(run_folder.metrics(training_records=True)) and not run_folder.metrics()
    closed = research or full
    target = out or (run_folder.private / "report-full.html" if closed else run_folder.path / "report.html")
    if card is None and out is None and not (run_folder.path / "model-card.md").exists():
        card = run_folder.path / "model-card.md"
    try:
        written = {"report": finished_run.report(training_records=research, full=full).save(target)}
        if card is not None:
            write_durably(card, finished_run.card().encode())
            written["card"] = card
    except OSError as error:
        raise UsageError(f"{target.parent} cannot be written ({error.strerror}). Choose another --out.") from None
    text = "\n".join(f"{name}: {path}" for name, path in written.items())
    options.emit({name: str(path) for name, path in written.items()}, text, json)
