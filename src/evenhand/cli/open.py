"""``evenhand open``: runs beside each other in the browser, on this machine only, or as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options
from evenhand.errors import UsageError
from evenhand.terminal import say

NAME = "open"
EXAMPLE = "evenhand open runs/first runs/second"


def run(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, as given to --out.")],
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE.html", help="Write the page as one file instead.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Default: any free one.")] = 0,
) -> None:
    """Show runs side by side: promise, spent, worst group; compare two; move tau; plan with other settings.

    Only released values are read, nothing of private/. The address works on this machine only and is secret: it has a
    random token. End it with Ctrl-C.
    """
    from evenhand.comparison.viewer import page, released

    options.refuse_nameless(export)
    runs = [released.read(folder) for folder in folders]
    if export is not None:
        from evenhand.runs.folder import Folder, write_durably

        if Folder(export.parent).ledger_file.exists():
            raise UsageError(
                f"{export.parent} is a run folder, whose files its ledger covers. Choose another --export."
            )
        try:
            write_durably(export, page.exported(runs).encode())
        except OSError as error:
            raise UsageError(f"{export} cannot be written ({error.strerror}). Choose another --export.") from None
        print(f"page: {export}")
        return
    from evenhand.comparison.viewer.server import Viewer

    with Viewer(folders, port) as server:
        print(f"Open {server.address}", flush=True)
        say("Only this machine can see it. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("Ended.")
