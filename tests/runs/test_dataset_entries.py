"""Entries of the dataset ledger: strays, damage, and thousands of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import evenhand as eh
from evenhand import untrusted
from evenhand.errors import EvenhandError
from evenhand.runs import dataset_entries
from evenhand.runs.dataset_ledger import DatasetLedger


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetLedger:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    return DatasetLedger("secret")


def plan(epsilon: float = 1.0) -> eh.Plan:
    facts = eh.data.wrap([[0.0]] * 99, [0, 1, 1] * 33).facts
    return eh.plan("dpsgd", eh.Privacy(epsilon, 1e-4), data=facts, epochs=1)


def test_a_stray_file_blocks_no_run(ledger: DatasetLedger) -> None:
    ledger.enter(plan(), run="a")
    for name in ("notes.json", "000001 (copy).json", "x.json", "000000.json.swp"):
        (ledger.folder / name).write_text("not ours")
    (ledger.folder / "old.json").mkdir()
    assert ledger.enter(plan(), run="b")["runs"] == 2
    assert ledger.enter(plan(), run="c")["runs"] == 3


@pytest.mark.parametrize("text", [b"", b"[]", b'{"plan": {}}', b"\xff", b"[" * 100_000, b'{"plan": NaN}', None])
def test_a_damaged_entry_is_named_and_lowers_no_total(ledger: DatasetLedger, text: bytes | None) -> None:
    for run in "abc":
        ledger.enter(plan(), run=run)
    file = ledger.folder / "000002.json"
    if text is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(text)
    with pytest.raises(EvenhandError, match=r"000002\.json.*rename it to 000002\.json\.damaged"):
        ledger.enter(plan(), run="d")
    assert len(list(ledger.folder.glob("*.json"))) == 3, "nothing was entered"
    assert DatasetLedger("other").enter(plan(), run="e")["runs"] == 1, "other data are not concerned"
    file.rename(file.with_name("000002.json.damaged"))
    found = ledger.enter(plan(), run="d")
    assert (found["runs"], found["uncounted"]) == (4, 1), "also the last entry leaves its number behind"


@pytest.mark.parametrize("seeded", ["yes", 1, None])
def test_an_entry_is_left_out_only_for_a_true_public_seed(ledger: DatasetLedger, seeded: Any) -> None:
    ledger.enter(plan(), run="a")
    file = ledger.folder / "000000.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seeded": seeded}))
    with pytest.raises(EvenhandError, match="damaged"):
        ledger.enter(plan(), run="b")


def test_damaged_heads_count_a_run_once_more(ledger: DatasetLedger) -> None:
    ledger.enter(plan(), run="a")
    heads = ledger.folder / "heads"
    heads.mkdir(exist_ok=True)
    for text in (b"", b"[" * 10**5, b'{"heads": 3, "seeded": true}'):
        (heads / "a.json").write_bytes(text)
        assert not ledger.has("a")
        assert ledger.enter(plan(), run="b")["uncounted"] == 0


def many(ledger: DatasetLedger, count: int) -> None:
    """Entries as earlier runs left them, under a few plans, some with a public seed."""
    plans = [plan(1.0 + place / 10) for place in range(4)]
    ledger.enter(plans[0], run="run0")
    (ledger.folder / "heads").mkdir(exist_ok=True)
    for place in range(1, count):
        entry = dataset_entries.Entry(plans[place % 4], None, place % 7 == 0, f"run{place}")
        (ledger.folder / f"{place:06d}.json").write_text(json.dumps(entry.to_json()))
        marks = {"heads": ["0" * 64], "seeded": place % 11 == 0}
        (ledger.folder / "heads" / f"run{place}.json").write_text(json.dumps(marks))


def test_many_entries_are_read_once(ledger: DatasetLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    many(ledger, 60)
    read: list[str] = []
    plain = untrusted.read_json

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        read.append(path.name)
        return plain(path, *args, **options)

    monkeypatch.setattr(untrusted, "read_json", counted)
    first = ledger.enter(plan(2), run="x")
    assert len(read) > 100
    read.clear()
    second = ledger.enter(plan(2), run="y")
    assert read == [dataset_entries.MERGED, "000060.json"]
    (ledger.folder / dataset_entries.MERGED).unlink()
    again = ledger.enter(plan(2), run="z")
    assert first["uncounted"] == second["uncounted"] == again["uncounted"] > 10
    assert first["epsilons"]["all"] < second["epsilons"]["all"] < again["epsilons"]["all"]


def test_an_entry_that_changed_is_read_again(ledger: DatasetLedger) -> None:
    many(ledger, 60)
    ledger.enter(plan(), run="x")
    file = ledger.folder / "000005.json"
    text = file.read_text()
    file.write_text(text.replace('"run5"', '"run6"'))
    assert dataset_entries.read(ledger.folder).found[5].run == "run6", "of the same size"
    file.write_text(text[:-9])
    with pytest.raises(EvenhandError, match=r"000005\.json"):
        ledger.enter(plan(), run="y")


@pytest.mark.parametrize("change", [b"", b"{}", b'{"plans": [], "entries": {}, "seeded": {}, "sha256": ""}', b"edit"])
def test_a_damaged_merged_file_is_done_without(ledger: DatasetLedger, change: bytes) -> None:
    many(ledger, 60)
    before = ledger.enter(plan(), run="x")
    file = ledger.folder / dataset_entries.MERGED
    file.write_bytes(file.read_bytes().replace(b"false", b"true") if change == b"edit" else change)
    after = ledger.enter(plan(), run="y")
    assert after["runs"] == before["runs"] + 1
    assert after["uncounted"] == before["uncounted"], "no entry is left out for what the merged file says"
