"""Writes settings as TOML, reads them safely, and tests whether a value that was read fits its annotation."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.errors import UsageError, VerificationError

_encode = json.JSONEncoder(ensure_ascii=False).encode


def literal(value: Any) -> str:
    """Return a value as TOML text.

    Examples:
      >>> print(literal("50 €"), literal([1, "a"]), literal(True))
      "50 €" [1, "a"] true
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(entry) for entry in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    return _encode(value).replace("\x7f", "\\u007f")


def key(name: str) -> str:
    """Return the name of a table or setting as TOML text.

    Examples:
      >>> key("age"), key("hours per week")
      ('age', '"hours per week"')
    """
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else literal(name)


def tables(name: str, value: Mapping[str, Any]) -> list[str]:
    r"""Return the lines of a table and of the tables inside it.

    Examples:
      >>> tables("settings", {"bound": 0.5})
      ['\n[settings]', 'bound = 0.5']
    """
    plain = {entry: inner for entry, inner in value.items() if not isinstance(inner, Mapping)}
    lines = [f"\n[{name}]", *(f"{key(entry)} = {literal(inner)}" for entry, inner in plain.items())] if plain else []
    for entry, inner in value.items():
        if isinstance(inner, Mapping):
            lines += tables(f"{name}.{key(entry)}", inner)
    return lines


def fits(value: Any, kind: str) -> bool:
    """Return whether a value read from TOML fits the annotation ``kind``.

    Examples:
      >>> fits(3, "float | None"), fits("3", "float | None"), fits(True, "int")
      (True, False, False)
    """
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if "Sequence" in kind:
        return isinstance(value, list | tuple)
    wanted = {"str": str, "float": int | float, "int": int, "Mapping": Mapping}
    return any(isinstance(value, types) for name, types in wanted.items() if name in kind.partition("[")[0])


def words(kind: str) -> str:
    """Return in words the type that an annotation asks for.

    Examples:
      >>> words("float | None")
      'a number'
    """
    for name, words in (
        ("Sequence", "a list"),
        ("Mapping", "a table"),
        ("str", "text"),
        ("float", "a number"),
        ("int", "a whole number"),
        ("bool", "true or false"),
    ):
        if name in kind:
            return words
    return kind


LARGEST, MOST = 2**22, 400_000
"""Bytes, and marks between names and values; the budgets of a hundred thousand owners take three quarters of these."""
DEEPEST = 16
"""Levels of brackets, and of names joined by dots; no setting has more than four."""
LONGEST = 256
"""Characters of a number or of a name without quotes."""
_TOKENS = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<text>\"{3}(?:[^"\\]|\\.|\"(?!\"\"))*+\"{3,5}|'{3}(?:[^']|'(?!''))*+'{3,5}
        |"(?:[^"\\\n]|\\[^\n])*+"|'[^'\n]*+')
    |(?P<word>[^\s#"'.,=\[\]{}]++)
    |(?P<space>[^\S\n]++)
    |(?P<mark>.|\n)""",
    re.VERBOSE | re.DOTALL,
)
_PLACE = re.compile(r"at (line \d+, column \d+|end of document)")
_REASONS = (
    "Expected '=' after a key",
    "Expected newline or end of document",
    "Invalid value",
    "Invalid initial character for a key part",
    "Unterminated string",
    "Unclosed array",
    "Unclosed inline table",
    "Cannot overwrite a value",
)
"""How messages of the parser begin that quote nothing of the file."""


def read(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raise UsageError for a missing, odd, too large or damaged one."""
    if "\0" in str(path):
        raise UsageError("A file name cannot hold a NUL character.")
    try:
        if not os.path.lexists(path):
            raise UsageError(f"There is no file {path}.")
        data = untrusted.read_bytes(path, largest=LARGEST)
    except OSError as error:
        raise UsageError(f"This file cannot be read ({error.strerror}): {str(path)[:LONGEST]}") from None
    except VerificationError as error:
        raise UsageError(f"{path}: {error}") from None
    return parse(data, str(path))


def parse(data: bytes, name: str) -> dict[str, Any]:
    r"""Return the content of TOML bytes; ``name`` is the file's name, for messages.

    Examples:
      >>> parse(b"epochs = 3", "people.toml")
      {'epochs': 3}
      >>> try: parse(b"seed = " + b"9" * 1000, "people.toml")
      ... except UsageError as error: print(error)
      people.toml, line 1: a number or name of more than 256 characters. No setting takes one.
    """
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name} is not valid TOML: it is not UTF-8 (first on line {line}).") from None
    _refuse_bombs(text, name)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not valid TOML: {_reason(str(error))}.") from None
    except (ValueError, RecursionError, OverflowError):
        raise UsageError(f"{name} is not valid TOML: a value in it is none that TOML has.") from None


def _refuse_bombs(text: str, name: str) -> None:
    """Raise UsageError for text that takes parsers too long; one pass, in time proportional to the size."""
    line, depth, dots, marks = 1, 0, 0, 0
    for token in _TOKENS.finditer(text):
        kind, token_text = token.lastgroup, token.group()
        if kind == "word" and len(token_text) > LONGEST:
            raise UsageError(
                f"{name}, line {line}: a number or name of more than {LONGEST} characters. No setting takes one."
            )
        if kind == "mark":
            depth = max(0, depth + (token_text in "[{") - (token_text in "]}"))
            dots, marks = dots + 1 if token_text == "." else 0, marks + 1
            if marks > MOST:
                raise UsageError(f"{name}, line {line}: more names and values than any settings have.")
            if max(depth, dots) > DEEPEST:
                raise UsageError(f"{name}, line {line}: more than {DEEPEST} levels of tables or lists. No setting has.")
        line += token_text.count("\n")


def _reason(message: str) -> str:
    """Return the parser's message, without the text that it quotes.

    Examples:
      >>> _reason("Invalid value (at line 3, column 5)"), _reason("Illegal character 'x' (at line 1, column 2)")
      ('Invalid value (line 3, column 5)', 'it cannot be understood (line 1, column 2)')
    """
    words = next((reason for reason in _REASONS if message.startswith(reason)), "it cannot be understood")
    place = _PLACE.search(message)
    return words if place is None else f"{words} ({place.group(1)})"
