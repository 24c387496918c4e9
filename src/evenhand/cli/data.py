"""``evenhand data``: which data sets can be named, whether their files are there, and getting them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.cli import options
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from evenhand.data.sources.base import Watch

NAME = "data"
EXAMPLE = "evenhand data fetch mnist"


def run(
    action: Annotated[str | None, typer.Argument(metavar="fetch", help="fetch: get the files of NAME.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A data set of the list.")] = None,
    data_dir: options.DataDir = None,
    json: options.Json = False,
) -> None:
    """List the built-in data sets and whether their files are there, or fetch those of one."""
    if action is None:
        rows = listed(data_dir)
        options.emit(rows, "\n".join(_line(row) for row in rows), json)
        return
    if action != "fetch" or name is None:
        raise UsageError("Type `evenhand data` for the list, or `evenhand data fetch NAME`, for example fetch mnist.")
    from evenhand.data import sources
    from evenhand.data.sources import base

    source = sources.source(name)
    place = sources.place(source, data_dir)
    with _bar() as watch:
        written = base.fetch(source, place, watch)
    text = f"{len(written)} file(s) of {name} written to {place.folder}" if written else f"{name} is there already."
    options.emit({"name": name, "folder": str(place.folder), "written": [file.name for file in written]}, text, json)


def listed(data_dir: str | None = None) -> list[dict[str, Any]]:
    """Return the facts of every source, and whether its files are there."""
    from evenhand.data import sources

    places = {name: sources.place(source, data_dir) for name, source in sources.SOURCES.items()}
    return [
        {
            "name": name,
            "present": source.present(places[name]),
            "folder": str(places[name].folder) if source.files else None,
            "records": source.records,
            "groups": source.groups,
            "licence": source.licence,
            "public": source.public,
            "fetch": source.fetchable,
            "options": [*source.options, *sources.SHARED],
        }
        for name, source in sources.SOURCES.items()
    ]


def _line(row: dict[str, Any]) -> str:
    state = "there" if row["present"] else "fetch" if row["fetch"] else "absent"
    return f"{row['name']:<17} {state:<7} {row['records']}; groups: {row['groups']} [{row['licence']}]"


@contextmanager
def _bar() -> Iterator[Watch]:
    """Yield a callback that moves a progress bar on stderr, in a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as progress:

        def watch(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        yield watch
