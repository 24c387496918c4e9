"""The command line: one file per command, each thin. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys

import typer

from evenhand.cli import (
    check,
    claims,
    compare,
    data,
    doctor,
    epsilon,
    init,
    keys,
    methods,
    plan,
    predict,
    recommend,
    report,
    resume,
    statement,
    train,
    verify,
)
from evenhand.errors import EvenhandError

app = typer.Typer(
    name="evenhand",
    help="Differentially private training that leaves no group behind.",
    epilog="Start: evenhand train --data digits --epsilon 3 --out runs/first",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    init,
    train,
    compare,
    recommend,
    predict,
    resume,
    plan,
    epsilon,
    claims,
    verify,
    statement,
    keys,
    report,
    methods,
    data,
    doctor,
    check,
):
    app.command(command.NAME, epilog=f"Example: {command.EXAMPLE}")(command.run)


def main() -> None:
    """Entry point: errors raised on purpose become one message and an exit code, never a traceback."""
    try:
        app()
    except EvenhandError as error:
        print(f"evenhand: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        print(f"evenhand: this command needs the package {error.name!r}: pip install {error.name}", file=sys.stderr)
        sys.exit(2)
