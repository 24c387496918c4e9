"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from evenhand.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as given to --out.")]
Data = Annotated[
    str | None,
    typer.Option("--data", help="digits, or a file or image folder of your own (declare it with `evenhand init`)."),
]
MethodName = Annotated[str | None, typer.Option("--method", help="A name from `evenhand methods`.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method, e.g. bound=0.5.")
]
Epsilon = Annotated[float | None, typer.Option("--epsilon", help="Promise to every record.")]
Delta = Annotated[float | None, typer.Option("--delta", help="Default: the largest power of ten below 1/N.")]
Noise = Annotated[float | None, typer.Option("--noise", help="A fixed noise multiplier instead of --epsilon.")]
Epochs = Annotated[float | None, typer.Option("--epochs", help="Expected passes over the data.")]
BatchSize = Annotated[float | None, typer.Option("--batch-size", help="EXPECTED records per step (Poisson sampling).")]


def parsed(settings: list[str] | None) -> dict[str, Any]:
    """``["bound=0.5"]`` -> ``{"bound": 0.5}``; values are JSON where they can be, else text."""
    result: dict[str, Any] = {}
    for entry in settings or []:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise UsageError("--set takes KEY=VALUE, for example --set bound=0.5.")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def given(**values: Any) -> dict[str, Any]:
    """Only what the user typed."""
    return {key: value for key, value in values.items() if value is not None and value != {}}


def emit(data: Any, text: str, as_json: bool) -> None:
    """Print for a program or for a person."""
    print(json.dumps(data) if as_json else text)


def pairs(text: str, flag: str) -> dict[str, float]:
    """``"strict=1,open=8"`` -> ``{"strict": 1.0, "open": 8.0}``."""
    result: dict[str, float] = {}
    for entry in text.split(","):
        name, equals, value = entry.strip().rpartition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals or not name or name in result:
            raise UsageError(f"{flag} takes NAME=NUMBER,NAME=NUMBER with each name once, for example strict=1,open=8.")
        result[name] = number
    return result
