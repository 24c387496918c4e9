"""Settings as TOML writes them, and whether a value read from there fits its annotation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def literal(value: Any) -> str:
    """A value as TOML writes it.

    Examples:
      >>> print(literal("50 €"), literal([1, "a"]), literal(True))
      "50 €" [1, "a"] true
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(entry) for entry in value)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def key(name: str) -> str:
    """A table or setting name as TOML writes it.

    Examples:
      >>> key("age"), key("hours per week")
      ('age', '"hours per week"')
    """
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else literal(name)


def tables(name: str, value: Mapping[str, Any]) -> list[str]:
    r"""The lines of a table and of those within it.

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
    """Whether a value read from TOML can stand where ``kind`` is annotated.

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
    """What an annotation asks for.

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
