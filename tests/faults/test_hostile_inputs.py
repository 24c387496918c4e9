"""The quick part of the campaigns on inputs, and the whole of them behind ``-m slow``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import fuzz_configs
import fuzz_tables
import hostile_files
import pytest
from inputs_harness import Watch, told

Campaign = Callable[[int, random.Random, Path], Watch]
CAMPAIGNS: dict[str, tuple[Campaign, int, int]] = {
    "configs": (fuzz_configs.campaign, 200, 20_000),
    "tables": (fuzz_tables.campaign, 60, 5_000),
    "files": (hostile_files.campaign, 40, 10_000),
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_part_of_the_campaign_finds_nothing(name: str, tmp_path: Path) -> None:
    campaign, few, _ = CAMPAIGNS[name]
    watch = campaign(few, random.Random(20), tmp_path)
    assert not watch.faults, told(watch, few)
    assert sum(watch.ends.values()) >= few * 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_whole_campaign_finds_nothing(name: str, tmp_path: Path) -> None:
    campaign, _, all_of_them = CAMPAIGNS[name]
    watch = campaign(all_of_them, random.Random(0), tmp_path)
    assert not watch.faults, told(watch, all_of_them)


def test_the_watch_sees_values_code_and_errors_that_nobody_foresaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evenhand.cli import methods
    from evenhand.data import tables

    (tmp_path / "people.csv").write_text("alpha-secret,beta-secret\n1,2\n")
    watch = Watch()
    monkeypatch.setattr(tables, "HINT", "The columns are alpha-secret")
    ask = ("init", "people.csv", "--label", "gamma")
    watch.command("value", tmp_path, *ask, secrets=frozenset(("alpha-secret",)))
    assert "printed 'alpha-secret'" in watch.faults[-1]
    hostile_files.evil(tmp_path / "evil.py")
    watch.command("code", tmp_path, "check", "evil.py")
    assert "code was executed" in watch.faults[-1]
    monkeypatch.setattr("evenhand.methods.catalogue.RECIPES", None)
    monkeypatch.setattr(methods, "options", None)
    watch.command("error", tmp_path, "methods")
    assert "unforeseen" in watch.faults[-1]
