"""Run folders that older versions wrote: ``verify`` reads them and answers what it answered then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from evenhand.runs.verify import verify

HERE = Path(__file__).parent
EXPECTED = {
    (version.parent.name, name): answer
    for version in sorted(HERE.glob("*/expected.json"))
    for name, answer in json.loads(version.read_text(encoding="utf-8")).items()
}
NUMBERS = ("epsilon", "charged", "delta", "steps", "planned", "owners")


def test_there_are_folders_of_every_kind() -> None:
    assert {name for _, name in EXPECTED} == {"owners", "density", "rebudgeted"}


@pytest.mark.parametrize(("version", "name"), EXPECTED)
def test_a_folder_of_an_older_version_verifies_with_the_same_numbers(version: str, name: str) -> None:
    found, expected = verify(HERE / version / name), EXPECTED[version, name]
    assert found["problems"] == []
    assert found["ok"]
    for key in NUMBERS:
        assert found[key] == expected[key], key


@pytest.mark.parametrize(("version", "name"), EXPECTED)
def test_a_changed_byte_of_it_is_noticed(version: str, name: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(HERE / version / name, tmp_path / name))
    card = copy / "model-card.md"
    card.write_bytes(card.read_bytes().replace(b"epsilon", b"Epsilon", 1))
    assert not verify(copy)["ok"]
