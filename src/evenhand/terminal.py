"""Prints to the terminal: without control characters of a path or a name, and without an error if nobody listens."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
)
"""Control characters but tab and newline, marks of direction, line separators, bytes that are no character."""


def plain(text: str) -> str:
    r"""Return a text in which characters that control a terminal are written out.

    Examples:
      >>> plain("runs/\x1b[2Jfirst\n")
      'runs/\\x1b[2Jfirst\n'
    """
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_ASKED: list[Callable[[str], bool]] = []


def ask_before_saying(wanted: Callable[[str], bool]) -> None:
    """Ask ``wanted`` before every text whether to print it: another process may have said it already."""
    _ASKED[:] = [wanted]


def say(text: str) -> None:
    """Print to the person at the terminal, on stderr; if nobody listens any more the program goes on."""
    if _ASKED and not _ASKED[0](text):
        return
    with contextlib.suppress(OSError, ValueError):
        print(plain(text), file=sys.stderr, flush=True)


_STATE = {"quiet": False}


def set_quiet(quiet: bool) -> None:
    """Leave out plans, progress and tips from now on, or print them again; results and errors are always printed."""
    _STATE["quiet"] = quiet


def is_quiet() -> bool:
    """Return whether plans, progress and tips are left out.

    Examples:
      >>> is_quiet()
      False
    """
    return _STATE["quiet"]


def note(text: str) -> None:
    """Print what a person may like to know, on stderr, unless the program is to be quiet."""
    if not is_quiet():
        say(text)


def shows_progress(asked: bool | None = None) -> bool:
    """Return whether to draw a progress bar: as asked, else in a terminal only, and never when quiet."""
    return not is_quiet() and (sys.stderr.isatty() if asked is None else asked)


@contextlib.contextmanager
def progress_bar(what: str, asked: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that draws one bar on stderr; it does nothing where none is to be shown."""
    if not shows_progress(asked):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what, markup=False), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        entry = shown.add_task(what, total=None)

        def draw(done: int, total: int) -> None:
            with contextlib.suppress(OSError):
                shown.update(entry, completed=done, total=total)

        yield draw


def accept_all_characters() -> None:
    r"""Let stdout and stderr write what their encoding lacks as \xNN, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            with suppress(OSError):  # of a terminal that is gone
                stream.reconfigure(errors="backslashreplace")
