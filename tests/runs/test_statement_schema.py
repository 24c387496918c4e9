"""Real statements follow the published schema, and the schema leaves nothing unsaid."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from evenhand.runs.folder import Folder
from evenhand.runs.statement_files import schema
from evenhand.runs.verify import verify

Validator = jsonschema.Draft202012Validator


def objects(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        if isinstance(part.get("properties"), dict) and part.get("type") == "object":
            yield part
        for value in part.values():
            yield from objects(value)
    elif isinstance(part, list):
        for value in part:
            yield from objects(value)


def test_the_schema_is_a_schema_and_describes_every_key() -> None:
    Validator.check_schema(schema())
    found = list(objects(schema()))
    assert len(found) == 13
    for part in found:
        assert part["additionalProperties"] is False
        optional = ("prior", "features", "persons", "person_cap", "number_of_persons", "packages")
        assert part["required"] == [key for key in part["properties"] if key not in optional]
        assert [key for key, value in part["properties"].items() if not value.get("description")] == []


def test_every_kind_of_statement_follows_it(folder: Folder) -> None:
    Validator(schema()).validate(json.loads(json.dumps(folder.statement())))
    if folder.statement_file.exists():
        Validator(schema()).validate(json.loads(folder.statement_file.read_bytes()))
    assert verify(folder.path)["problems"] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["surplus"], 1),
        (["guarantee", "surplus"], 1),
        (["guarantee", "level"], "certified"),
        (["guarantee", "epsilon"], None),
        (["guarantee", "delta"], 0),
        (["guarantee", "profile", 0], [1.0]),
        (["owners"], []),
        (["owners", 0, "rate"], 2),
        (["mechanism", "steps_charged"], 1.5),
        (["plan"], "abc"),
        (["schema"], 2),
        (["sharing", "may_be_shared"], "all"),
    ],
)
def test_what_is_wrong_does_not_pass(path: list[Any], value: Any, folders: dict[str, Folder]) -> None:
    wrong = copy.deepcopy(folders["dpsgd"].statement())
    part: Any = wrong
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert not Validator(schema()).is_valid(wrong)


def test_no_key_may_be_missing(folders: dict[str, Folder]) -> None:
    made = folders["dpsgd"].statement()
    for key in made:
        assert not Validator(schema()).is_valid({name: value for name, value in made.items() if name != key})


def test_a_run_without_a_guarantee_cannot_carry_an_epsilon(folders: dict[str, Folder]) -> None:
    made = copy.deepcopy(folders["sgd"].statement())
    made["guarantee"]["epsilon"] = 1.0
    assert not Validator(schema()).is_valid(made)
