"""``evenhand methods``: what can be trained, with what guarantee, from which paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from evenhand.cli import options

NAME = "methods"
EXAMPLE = "evenhand methods --json"
ONCE = "Densities, released once instead of many gradient steps:"


def run(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    json: options.Json = False,
) -> None:
    """List every method and density with its guarantee level, settings and reference."""
    listing = rows()
    options.emit(listing, table(listing) if markdown else _two(listing, _listed), json)


def rows() -> list[dict[str, Any]]:
    """Return every method that takes gradient steps, then every density; settings are what ``--set`` may change."""
    from evenhand import density
    from evenhand.methods.catalogue import DENSITIES, catalogue

    steps = [
        {
            "name": recipe.name,
            "kind": "steps",
            "guarantee": recipe.guarantee,
            "reference": recipe.reference,
            "summary": recipe.summary,
            "settings": dict(recipe.defaults),
        }
        for recipe in catalogue()
    ]
    once = [
        {
            "name": method.name,
            "kind": "density",
            "guarantee": method.guarantee,
            "reference": method.source.text,
            "summary": method.summary,
            "settings": density.settings(method.name) if method.name in density.METHODS else {},
        }
        for method in DENSITIES.values()
    ]
    return [*steps, *once]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the methods and the densities as Markdown tables."""
    return _two(rows, _table)


def _two(rows: Sequence[dict[str, Any]], shown: Callable[[Sequence[dict[str, Any]]], str]) -> str:
    """Return the methods that take steps, then the densities under a line that says what they are."""
    steps, once = ([row for row in rows if row["kind"] == kind] for kind in ("steps", "density"))
    return f"{shown(steps)}\n\n{ONCE}\n\n{shown(once)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| method | what it does | guarantee | reference |", "|---|---|---|---|"]
    lines += [f"| `{row['name']}` | {row['summary']} | {row['guarantee']} | {row['reference']} |" for row in rows]
    return "\n".join(lines)


def _listed(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"{row['name']:<24} {row['guarantee']:<18} {row['summary']} [{row['reference']}]" for row in rows)
