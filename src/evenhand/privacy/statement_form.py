"""How the owner classes of a statement stand in its file: one by one for some, as columns for thousands.

As columns a class is two numbers and its name, and what classes have in common stands once. Both forms say the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evenhand import untrusted
from evenhand.errors import VerificationError

LISTED = 1000
"""Classes up to which each stands for itself, with the name of every figure."""
_OWN = ("name", "records")
_SHAPE: untrusted.Shape = {"names": [str], "records": [int], "kind": [int], "kinds": {str: list}}


def packed(statement: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the form for the file; with few classes, or already in that form, it is the statement itself.

    Examples:
      >>> row = {"records": 2, "epsilon": 1.0}
      >>> rows = [{"name": str(place), **row} for place in range(LISTED + 1)]
      >>> made = packed({"owners": rows})
      >>> made["owners"]["kinds"], unpacked(made)["owners"] == rows, packed({"owners": rows[:3]})["owners"] == rows[:3]
      ({'epsilon': [1.0]}, True, True)
    """
    rows = statement.get("owners")
    if not isinstance(rows, list) or len(rows) <= LISTED:
        return statement
    figures = [key for key in rows[0] if key not in _OWN]
    places: dict[str, int] = {}
    kinds: list[Mapping[str, Any]] = []
    kind = []
    for row in rows:
        text = json.dumps([row[key] for key in figures])
        if text not in places:
            places[text] = len(kinds)
            kinds.append(row)
        kind.append(places[text])
    table = {
        "names": [row["name"] for row in rows],
        "records": [row["records"] for row in rows],
        "kind": kind,
        "kinds": {key: [row[key] for row in kinds] for key in figures},
    }
    return {**statement, "owners": table}


def unpacked(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement with one row per class, whatever its form.

    Raises:
      VerificationError: the columns do not fit each other.
    """
    table = written["owners"]
    if isinstance(table, list):
        return dict(written)
    if not untrusted.fits(table, _SHAPE):
        raise VerificationError("statement.json cannot be read: it was damaged or edited.")
    columns, count = table["kinds"], len(table["names"])
    size = min((len(column) for column in columns.values()), default=0)
    whole = all(len(column) == size for column in columns.values())
    if not whole or not count == len(table["records"]) == len(table["kind"]) or count <= LISTED:
        raise VerificationError("statement.json cannot be read: its columns of owners have different lengths.")
    if not all(0 <= place < size for place in table["kind"]):
        raise VerificationError("statement.json cannot be read: a class of owners has no figures.")
    kinds = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    rows = [
        {"name": name, "records": records, **kinds[place]}
        for name, records, place in zip(table["names"], table["records"], table["kind"], strict=True)
    ]
    return {**written, "owners": rows}


def lines(form: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with thousands of classes: one line for each part of the statement."""
    parts = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in form.items())
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()
