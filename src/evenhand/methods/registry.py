"""Where rules, queries and schedules make themselves known by name, ours and a user's alike."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from evenhand import _validate
from evenhand.errors import UsageError

Part = TypeVar("Part", bound=type)
_parts: dict[str, dict[str, type]] = {"rule": {}, "query": {}, "schedule": {}}
KINDS = tuple(_parts)
_packages = {
    "rule": "evenhand.methods.rules",
    "query": "evenhand.methods.queries",
    "schedule": "evenhand.methods.schedules",
}


def register(cls: Part) -> Part:
    """Register a frozen dataclass with a ``name`` and a ``kind``, as a decorator, so that the name works everywhere."""
    kind, name = getattr(cls, "kind", None), getattr(cls, "name", None)
    if kind not in _parts or not isinstance(name, str):
        raise UsageError(
            f"{cls.__name__} cannot be registered: derive it from SampleRule, BatchRule, Query or Schedule"
            " and give it a class attribute `name`."
        )
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UsageError(f"{cls.__name__} must be a frozen dataclass: write @register above @dataclass(frozen=True).")
    taken = _parts[kind].get(name)
    ours = taken is not None and taken.__module__.startswith("evenhand.") and taken.__module__ != cls.__module__
    if taken is not None and (ours or taken.__qualname__ != cls.__qualname__):
        raise UsageError(f"The {kind} name {name!r} is taken by {taken.__qualname__}: choose another.")
    _parts[kind][name] = cls
    return cls


def names(kind: str) -> tuple[str, ...]:
    """Return all registered names of one kind, in order of registration."""
    importlib.import_module(_packages[kind])
    return tuple(_parts[kind])


def built_in(kind: str) -> set[str]:
    """Return the names of one kind that are evenhand's own."""
    return {name for name in names(kind) if _parts[kind][name].__module__.startswith("evenhand.")}


def snapshot() -> dict[str, dict[str, type]]:
    """Return what is registered now, for ``restore``."""
    return {kind: dict(parts) for kind, parts in _parts.items()}


def restore(before: dict[str, dict[str, type]]) -> None:
    """Forget what was registered since ``before`` was taken."""
    for kind, parts in before.items():
        _parts[kind] = dict(parts)


def part(kind: str, name: str) -> Any:
    """Return the class registered as ``name``, here or by another package; else an error says the nearest name."""
    if name not in names(kind):
        importlib.import_module("evenhand.methods.plugins").adopt(name)
    return _parts[kind][_validate.known(name, names(kind), kind)]


def build(kind: str, name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Make the part called ``name`` with the given settings; unknown names and settings are errors with a hint."""
    part_class = part(kind, name)
    fields = {f.name for f in dataclasses.fields(part_class)}
    for key in settings or {}:
        _validate.known(key, fields, f"setting of {name}")
    return part_class(**(settings or {}))


def spec(instance: Any) -> dict[str, Any]:
    """Return the JSON form of a part: its name and settings. ``build(kind, **spec)`` makes an equal one."""
    settings = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}
    return {"name": instance.name, "settings": json.loads(json.dumps(settings))}
