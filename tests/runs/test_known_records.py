"""Folds, samples and parts of the same arrays add up as one dataset, and arrays without a common row do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenhand.accounting.budgets import Privacy
from evenhand.data import wrap
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import fingerprint
from evenhand.mechanism.make_plan import plan
from evenhand.runs.dataset_ledger import DatasetLedger
from evenhand.runs.known_records import origin_of
from evenhand.runs.ledger import Ledger, read

PEOPLE = torch.rand(90, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path))


def rows(*numbers: int) -> Data:
    return wrap(PEOPLE[list(numbers)], [number % 2 for number in numbers])


def test_every_part_that_shares_a_row_has_the_name_of_the_first() -> None:
    first = rows(*range(60))
    name = origin_of(first)
    assert name == fingerprint(first), "so that it adds up with eh.fit on these arrays"
    assert origin_of(rows(*range(59, 90))) == name, "one common row is enough"
    assert origin_of(rows(*range(80, 90))) == name, "also by way of another part"
    assert origin_of(rows(*reversed(range(60)))) == name, "in any order"


def test_others_have_their_own_name_and_a_source_keeps_its_own() -> None:
    assert origin_of(rows(*range(30))) != origin_of(rows(*range(30, 60)))
    whole = rows(*range(90))
    part = whole.take(torch.arange(5))
    assert origin_of(part) == fingerprint(whole), "parts that were taken by evenhand know where they are from"


def test_parts_that_were_apart_are_joined_with_all_their_runs(tmp_path: Path) -> None:
    left, right = rows(*range(45)), rows(*range(45, 90))
    spent = plan("dpsgd", Privacy(1.0, 1e-4), data=left.facts, epochs=1)
    for part, runs in ((left, 1), (right, 2)):
        for _ in range(runs):
            DatasetLedger(origin_of(part)).enter(spent)
    whole = origin_of(rows(*range(90)))
    assert origin_of(left) == origin_of(right) == whole
    counted = DatasetLedger(whole).enter(spent)
    assert counted["runs"] == 4
    assert counted["epsilons"]["all"] > 1.5
    again = origin_of(rows(*range(90)))
    assert DatasetLedger(again).enter(spent)["runs"] == 5, "entries are joined once"


def test_lost_and_seeded_runs_stay_so_when_ledgers_are_joined(tmp_path: Path) -> None:
    spent = plan("dpsgd", Privacy(1.0, 1e-4), data=rows(*range(45)).facts, epochs=1)
    one, other = DatasetLedger("one"), DatasetLedger("other")
    for seeded in (False, True, False):
        other.enter(spent, seeded=seeded)
    (other.folder / "000000.json").unlink()
    one.join(other)
    counted = one.enter(spent)
    assert (counted["runs"], counted["uncounted"]) == (4, 2)


def test_what_is_noted_is_for_its_owner_only(tmp_path: Path) -> None:
    origin_of(rows(*range(9)))
    files = [file for file in (tmp_path / "records").iterdir() if file.suffix in ("", ".npz", ".json")]
    assert {file.stat().st_mode & 0o077 for file in files if file.name != ".lock"} == {0}
    assert (tmp_path / "records").stat().st_mode & 0o077 == 0


def test_runs_of_fit_on_the_whole_are_counted_with_those_on_its_parts() -> None:
    part, whole = rows(*range(60)), rows(*range(90))
    spent = plan("dpsgd", Privacy(1.0, 1e-4), data=part.facts, epochs=1)
    assert DatasetLedger.of(whole).enter(spent)["runs"] == 1, "as eh.fit counts, before any part came by"
    assert DatasetLedger(origin_of(part)).enter(spent)["runs"] == 1, "nothing tells yet that it is a part"
    assert DatasetLedger(origin_of(whole)).enter(spent)["runs"] == 3
    assert DatasetLedger.of(whole).enter(spent)["runs"] == 4, "as eh.fit counts afterwards"
    assert DatasetLedger.of(part).enter(spent)["runs"] == 5


def test_a_run_that_went_on_after_its_ledger_was_joined_is_not_counted_again(tmp_path: Path) -> None:
    spent = plan("dpsgd", Privacy(1.0, 1e-4), data=rows(*range(45)).facts, epochs=1)
    file = tmp_path / "ledger.jsonl"
    with Ledger.open(file, plan=spent.digest, steps=spent.steps, key="k1", insecure=False) as ledger:
        ledger.reserve(1)
    reading = read(file)
    one, other = DatasetLedger("one"), DatasetLedger("other")
    other.enter(spent, run="a" * 32)
    other.note([("a" * 32, reading)])
    one.join(other)
    assert other.current.knows([("a" * 32, reading)]) == [True]
