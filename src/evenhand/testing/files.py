"""A user's file: run it, and take what it registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenhand import usercode
from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.testing.subjects import Subject, made


def subjects_in(path: Path) -> tuple[Subject, ...]:
    """Every rule and query that the file registers, with default settings. The file is executed: use your own only."""
    module = usercode.executed(path, "rule")
    rules, queries = (_registered(kind, module.__name__) for kind in ("rule", "query"))
    if not rules and not queries:
        raise UsageError(
            f"{path.name} registers no rule and no query: derive a frozen dataclass from SampleRule, BatchRule or "
            "Query and write @register above it."
        )
    subjects = [Subject.of(made(cls)) for cls in rules]
    seen = {query.name for subject in subjects for query in subject.queries}
    return (*subjects, *(Subject.of(made(cls)) for cls in queries if cls.name not in seen))


def _registered(kind: str, module: str) -> list[Any]:
    found = [registry.part(kind, name) for name in registry.names(kind)]
    return [cls for cls in found if cls.__module__ == module]
