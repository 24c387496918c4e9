"""``evenhand methods``: what can be trained, with what guarantee, from which paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from evenhand.cli import options

NAME = "methods"
EXAMPLE = "evenhand methods --json"


def run(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
    json: options.Json = False,
) -> None:
    """List every method with its guarantee level, settings and reference."""
    from evenhand.methods import catalogue

    rows = [
        {
            "name": recipe.name,
            "guarantee": recipe.guarantee,
            "reference": recipe.reference,
            "summary": recipe.summary,
            "settings": dict(recipe.defaults),
        }
        for recipe in catalogue()
    ]
    text = table(rows) if markdown else "\n".join(_line(row) for row in rows)
    options.emit(rows, text, json)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The methods as a Markdown table."""
    lines = ["| method | what it does | guarantee | reference |", "|---|---|---|---|"]
    lines += [f"| `{row['name']}` | {row['summary']} | {row['guarantee']} | {row['reference']} |" for row in rows]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    return f"{row['name']:<18} {row['guarantee']:<18} {row['summary']} [{row['reference']}]"
