"""The published JSON schema of statement.json (draft 2020-12)."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def text() -> str:
    """The schema as it is published."""
    return resources.files("evenhand.privacy").joinpath("statement.schema.json").read_text(encoding="utf-8")


def schema() -> dict[str, Any]:
    """The schema as data, for any validator.

    Examples:
      >>> schema()["properties"]["guarantee"]["properties"]["unit"]["const"]
      'one record'
    """
    found: dict[str, Any] = json.loads(text())
    return found
