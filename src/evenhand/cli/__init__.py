"""The command line: one file per command, each thin. Heavy imports happen inside the commands."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
import typer.core

from evenhand import __version__, terminal
from evenhand.cli import (
    adjust,
    audit,
    check,
    claims,
    compare,
    data,
    doctor,
    epsilon,
    hints,
    init,
    keys,
    methods,
    plan,
    predict,
    processes,
    recommend,
    report,
    resume,
    statement,
    train,
    verify,
)
from evenhand.cli import open as open_command
from evenhand.errors import EvenhandError


class _Commands(typer.core.TyperGroup):
    """The commands; a wrong argument is shown without characters that control a terminal."""

    def make_context(self, info_name: str | None, args: list[str], *further: Any, **options: Any) -> Any:
        """Parse the arguments before the command; ``--quiet`` may also stand after it."""
        with _plainly():
            return super().make_context(info_name, _quiet_first(args), *further, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments after the command, and run it."""
        with _plainly():
            return super().invoke(ctx)


def _quiet_first(arguments: list[str]) -> list[str]:
    """Return the arguments with ``--quiet`` in front, wherever it stands before a ``--``.

    Examples:
      >>> _quiet_first(["train", "--quiet", "--", "--quiet"])
      ['--quiet', 'train', '--', '--quiet']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--quiet" not in arguments[:end]:
        return arguments
    return ["--quiet", *(word for word in arguments[:end] if word != "--quiet"), *arguments[end:]]


@contextmanager
def _plainly() -> Iterator[None]:
    """Print a wrong command, flag or argument in one line that says where help is, instead of a box of six."""
    try:
        yield
    except Exception as error:
        shown: Any = error
        if not hasattr(shown, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        context = getattr(shown, "ctx", None)
        command = "" if context is None or context.parent is None else f" {context.info_name}"
        terminal.say(f"evenhand: {_sentence(shown.format_message())} Help: evenhand{command} --help")
        raise SystemExit(shown.exit_code) from None


def _sentence(text: str) -> str:
    """Return a message of the parser on one line, ending in a full stop."""
    line = " ".join(text.split())
    return line if line.endswith((".", "?")) else f"{line}."


def _show_version(wanted: bool) -> None:
    """Print the version if it was asked for, and end."""
    if wanted:
        print(f"evenhand {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="evenhand",
    help="Differentially private training that leaves no group behind.",
    epilog="Start: evenhand train --data digits --epsilon 3 --out runs/first",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    cls=_Commands,
)


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Before or after a command: results and errors only.")
    ] = False,
) -> None:
    terminal.set_quiet(quiet)


_SILENT = 1
"""Exit code when the reader of stdout is gone."""
for command in (
    init,
    train,
    adjust,
    compare,
    recommend,
    predict,
    resume,
    plan,
    epsilon,
    claims,
    audit,
    verify,
    statement,
    keys,
    report,
    open_command,
    methods,
    data,
    doctor,
    check,
):
    app.command(command.NAME, epilog=f"Example: {command.EXAMPLE}")(command.run)


def main() -> None:
    """Run the command line: every error becomes one message and an exit code, never a traceback."""
    _open_standard_streams()
    terminal.accept_all_characters()
    sys.exit(_finished(_exit_code()))


def _open_standard_streams() -> None:
    """Open the null device for standard streams that are closed: else a file of the run would get the stream's number.

    What a library then writes to standard error would land in that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere())


def _nowhere() -> TextIO:
    """Return the null device, open until the end. In this module ``open`` is the command of that name."""
    return Path(os.devnull).open("w", encoding="utf-8")


def _exit_code() -> int | str | None:
    """Run the command that was typed; return the exit code."""
    try:
        if processes.several():
            processes.speak_once()
            processes.refuse_other_commands(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        app()
    except SystemExit as end:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # typer found that nobody reads it
            _say_unread()
        return end.code
    except BrokenPipeError:
        _say_unread()
        return _SILENT
    except (OSError, MemoryError, RuntimeError) as error:
        return _refused(error)
    except EvenhandError as error:
        if not error.reported:
            terminal.say(f"evenhand: {error}")
        return error.exit_code
    except UnicodeEncodeError:
        terminal.say(
            "evenhand: a path has characters that this locale does not have, so that no file can be found by it: set "
            "LC_ALL=C.UTF-8 or PYTHONUTF8=1. What was charged before stays charged; a run is continued with: evenhand "
            "resume RUN"
        )
        return 2
    except ModuleNotFoundError as error:
        terminal.say(f"evenhand: this command needs the package {error.name!r}: pip install {error.name}")
        return 2
    except ImportError as error:
        terminal.say(f"evenhand: a library cannot be loaded: {error}")
        return 1
    except Exception as error:
        return _unforeseen(error)
    return 0


def _refused(error: OSError | MemoryError | RuntimeError) -> int:
    """Print what the operating system refused, or that the error is of another kind; return the exit code."""
    from evenhand.runs.os_errors import boundary

    try:
        with boundary():
            raise error
    except EvenhandError as said:
        if not said.reported:
            terminal.say(f"evenhand: {said}")
        return said.exit_code
    except Exception as other:
        return _unforeseen(other)


def _unforeseen(error: Exception) -> int:
    """Print kind and place of an error that nobody foresaw; return the exit code."""
    if os.environ.get(hints.VARIABLE):
        raise error
    terminal.say(f"evenhand: {hints.said(error)}")
    return 1


def _finished(code: int | str | None) -> int | str | None:
    """Flush stdout and stderr, which may have no reader any more. Return the exit code."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError as error:
            setattr(sys, name, _nowhere())
            if name == "stdout":
                code = code or _SILENT
                if error.errno not in (errno.EPIPE, errno.EIO):
                    terminal.say(f"evenhand: the output cannot be written ({error.strerror}).")
                else:
                    _say_unread()
    return code


def _say_unread() -> None:
    """Say where the results are if nobody reads those of a command that trains; other commands end without a word."""
    if sys.argv[1:2] in (["train"], ["resume"], ["compare"]):
        terminal.say(
            "evenhand: nobody reads the output any more. What was trained is in the run folder (--out): evenhand "
            "verify RUN says what was spent, and evenhand resume RUN goes on."
        )
