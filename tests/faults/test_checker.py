"""The checker of the campaign sees what it must see: tried on folders that are wrong in one way each."""

from __future__ import annotations

import json
from pathlib import Path

import checker
import pytest
import recovery
import shim
from host import Ended, Place

SEGMENT: dict[str, object] = {"type": "segment", "key": "k1"}
RESERVE: dict[str, object] = {"type": "reserve", "first": 0, "count": 2}


def made(root: Path, rows: list[dict[str, object]], noise: list[str], tail: str = "") -> Place:
    place = Place(root).made()
    place.run.mkdir()
    (place.run / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    (place.side / "witness").write_text("".join(f"{line}\n" for line in noise))
    return place


def kinds(findings: list[checker.Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def test_noise_that_is_charged_once_is_right(tmp_path: Path) -> None:
    place = made(tmp_path, [SEGMENT, RESERVE], ["k1 gradient 0 0 a", "k1 gradient 1 0 b", "k1 queries 1 0 c"])
    assert checker.privacy(place) == []


@pytest.mark.parametrize(
    ("rows", "tail"),
    [
        ([SEGMENT], ""),
        ([SEGMENT, {**RESERVE, "count": 1}], ""),
        ([RESERVE, SEGMENT], ""),
        ([{**SEGMENT, "key": "k2"}, RESERVE], ""),
        ([SEGMENT], json.dumps(RESERVE)),
    ],
    ids=["no charge", "too few", "of another segment", "of another key", "torn"],
)
def test_noise_without_a_charge_is_found(tmp_path: Path, rows: list[dict[str, object]], tail: str) -> None:
    place = made(tmp_path, rows, ["k1 gradient 1 0 b"], tail)
    assert kinds(checker.privacy(place)) == {checker.UNDER}


@pytest.mark.parametrize("again", ["k1 gradient 0 0 b", "k1 gradient 1 0 a"], ids=["address", "values"])
def test_noise_that_repeats_is_found(tmp_path: Path, again: str) -> None:
    place = made(tmp_path, [SEGMENT, RESERVE], ["k1 gradient 0 0 a", again])
    assert kinds(checker.privacy(place)) == {checker.REPEATED}


def test_what_is_left_behind_or_written_elsewhere_is_found(tmp_path: Path) -> None:
    place = made(tmp_path, [], [])
    (place.run / "report.html.part").touch()
    found = checker.leftovers(place, {"run/ledger.jsonl"})
    assert [finding.detail for finding in found] == ["run/report.html.part"]
    inside, outside = shim.Call(0, "open", f"{place.state}/x"), shim.Call(0, "open", f"{place.state}-x")
    assert [finding.detail for finding in checker.outside(place, [inside, outside])] == [f"open {place.state}-x"]


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended(1, "", "Traceback (most recent call last):\n  ...\nOSError: no", 1.0), checker.TRACEBACK),
        (Ended(-9, "", "", 45.0, hung=True), checker.HANG),
        (Ended(-1, "", "a plan", 1.0), checker.WORDLESS),
    ],
)
def test_how_a_command_ends_is_judged(ended: Ended, kind: str) -> None:
    assert kinds(recovery.judged(ended, "train")) == {kind}
    assert recovery.judged(Ended(1, "", "evenhand: the disk is full.", 1.0), "train") == []


def test_a_file_that_is_renamed_counts_under_its_last_name() -> None:
    logged = [
        shim.Call(1, "open", "/a.part"),
        shim.Call(2, "write", "/a.part"),
        shim.Call(3, "rename", "/a", "/a.part"),
        shim.Call(4, "open", "/a.part"),
        shim.Call(5, "rename", "/b", "/a.part"),
    ]
    assert shim.final_names(logged) == {1: "/a", 2: "/a", 3: "/a", 4: "/b", 5: "/b"}
