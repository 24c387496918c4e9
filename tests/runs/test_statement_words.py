"""What the statement says about files, checkpoints, early stops and many owners."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from evenhand.accounting.owner_classes import further_owners
from evenhand.runs import folder as runs
from evenhand.runs.audits import record
from evenhand.runs.folder import Folder
from evenhand.runs.statement import markdown, paragraphs
from evenhand.runs.statement_files import DECISION, FROM_FACTS, FROM_NOISE, KEPT, sharing

UNAUDITED = [name for name in FROM_FACTS if name != record.FILE]


def words(folder: Folder) -> str:
    return "\n".join(paragraphs(folder.statement()))


def test_the_files_are_those_of_the_readme() -> None:
    shared, kept = runs._README.split("Must not be shared:")
    names = set(re.findall(r"[\w-]+\.(?:safetensors|jsonl?|md|html|csv)", shared))
    assert sorted(names) == sorted([*FROM_FACTS, *FROM_NOISE])
    assert all(name in kept for name in KEPT)


def test_a_private_run_may_share_its_model_and_every_checkpoint_at_no_extra_cost(folders: dict[str, Folder]) -> None:
    text = words(folders["dpsgd"])
    assert f"May be shared: {', '.join([*FROM_NOISE, *UNAUDITED])}" in text
    assert "Must not be shared: private/, config.toml, env.json." in text
    assert "Intermediate checkpoints: no extra cost" in text
    assert "the noisy gradient of every step as published" in text
    assert "checkpoints in private/ are not for sharing" in text


@pytest.mark.parametrize(
    ("kind", "reason"), [("sgd", "not covered by any guarantee"), ("insecure", "whoever knows the seed")]
)
def test_an_unprotected_run_may_not(kind: str, reason: str, folders: dict[str, Folder]) -> None:
    text = words(folders[kind])
    decided = (folders[kind].path / DECISION).exists()
    assert decided == (kind == "insecure"), "a run that is not private counts no labels, so it has no decision"
    kept = re.escape(", ".join([*(name for name in FROM_NOISE if decided or name != DECISION), "private/"]))
    assert re.search(rf"Must not be shared[^.]*: {kept}", text)
    assert reason in text
    assert "no extra cost" not in text


def test_a_run_that_is_not_private_covers_nothing(folders: dict[str, Folder]) -> None:
    made = folders["sgd"].statement()
    assert made["covers"] == []
    assert made["mechanism"]["noise_multiplier"] is None


def test_updates_from_elsewhere_are_a_condition_on_checkpoints() -> None:
    assert "used no data" in sharing(certified=True, foreign=True)["intermediate_checkpoints"]
    assert "used no data" not in sharing(certified=True)["intermediate_checkpoints"]


def test_an_early_release_is_warned_about(folders: dict[str, Folder]) -> None:
    (warning,) = [text for text in folders["early"].statement()["warnings"] if "released after" in text]
    assert "released after 2 of 6 planned steps" in warning
    for kind in ("dpsgd", "resumed", "unreleased"):
        assert not any("released after" in text for text in folders[kind].statement()["warnings"])
    assert "stopping early" in words(folders["dpsgd"])


def owners(count: int, **last: Any) -> list[dict[str, Any]]:
    rows = [{"name": f"o{i}", "records": 1, "epsilon": 1.0, "budget": 2.0} for i in range(count)]
    return [*rows[:-1], rows[-1] | last]


def test_more_than_fifty_owners_end_in_a_sentence_that_is_true(folders: dict[str, Folder]) -> None:
    made = copy.deepcopy(folders["owners"].statement())
    made["owners"] = owners(60)
    text = paragraphs(made)
    assert sum(line.startswith("Each of the") for line in text) == 50
    assert "And 10 more owners, each within its own budget." in text
    assert further_owners(owners(50)) == []
    for wrong in ({"epsilon": 2.1}, {"budget": None}, {"epsilon": None}):
        assert further_owners(owners(60, **wrong)) == ["And 10 more owners, listed in statement.json."]


def test_names_cannot_become_markup_in_the_words(folders: dict[str, Folder]) -> None:
    text = markdown(folders["hostile"].statement())
    assert "<" not in text
    assert not re.search(r"(?<!\\)\[", text)
    assert "\n# heading" not in text
