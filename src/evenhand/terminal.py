"""Prints to the terminal: without control characters of a path or a name, and without an error if nobody listens."""

from __future__ import annotations

import contextlib
import re
import sys
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


def say(text: str) -> None:
    """Print to the person at the terminal, on stderr; if nobody listens any more the program goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(plain(text), file=sys.stderr, flush=True)


def accept_all_characters() -> None:
    r"""Let stdout and stderr write what their encoding lacks as \xNN, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            with suppress(OSError):  # of a terminal that is gone
                stream.reconfigure(errors="backslashreplace")
