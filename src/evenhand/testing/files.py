"""A user's file: run it, and take what it registers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from evenhand import registry
from evenhand.errors import EvenhandError, UsageError
from evenhand.testing.subjects import Subject, made


def subjects_in(path: Path) -> tuple[Subject, ...]:
    """Every rule and query that the file registers, with default settings. The file is executed: use your own only."""
    module = _run(path)
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


def _run(path: Path) -> Any:
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"There is no Python file {path}: pass the file that defines the rule, such as my_rule.py.")
    spec = importlib.util.spec_from_file_location(f"evenhand_checked_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except EvenhandError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path.name} cannot be imported: {type(error).__name__}: {error}") from error
    return module
