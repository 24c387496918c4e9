"""A run that died while its ledger's first row was written: nothing is spent, and it can be begun or started over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from commands import evenhand
from evenhand.data import Data
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger
from evenhand.runs.ledger_rows import GENESIS, encode_row


class Killed(BaseException):
    """Stands for kill -9."""


def cut_off(out: Path, data: Data, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die when so many bytes of the first row are in the file."""

    def write(ledger: Ledger, written: bytes) -> None:
        ledger._file.write(written[: kept if kept >= 0 else len(written) + kept])
        ledger._file.close()
        raise Killed

    monkeypatch.setattr(Ledger, "_write", write)
    with pytest.raises(Killed):
        train(out, data)
    monkeypatch.undo()


def train(out: Path, data: Data) -> eh.Run:
    return eh.fit(torch.nn.Linear(3, 2), data, epsilon=3.0, delta=1e-3, epochs=1, batch_size=8, out=out)


@pytest.mark.parametrize("kept", [0, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (1, 15, 40)), -2])
@pytest.mark.parametrize("again", ["resume", "train"])
def test_it_can_be_begun_or_started_over(
    kept: int, again: str, tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    cut_off(out, tiny, kept, monkeypatch)
    assert not Folder(out).begun
    found = eh.verify(out)
    assert not found["ok"]
    assert "before anything was charged. `evenhand resume` begins it" in found["problems"][0]
    if again == "resume":
        eh.resume(out, model=torch.nn.Linear(3, 2), train=tiny)
    else:
        train(out, tiny)
    found = eh.verify(out)
    assert found["ok"], found["problems"]
    assert Folder(out).ledger().torn == 0
    assert len(Folder(out).ledger().segments) == 1


def test_a_whole_first_row_without_its_end_of_line_goes_on(
    tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(tmp_path, tiny, -1, monkeypatch)
    eh.resume(tmp_path, model=torch.nn.Linear(3, 2), train=tiny)
    assert eh.verify(tmp_path)["ok"]


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_crash_between_the_first_rows_is_mended(
    rows: int, tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that lie in the folder before the run begins are recorded by whoever begins it at last."""
    real, calls = Ledger._append, [0]

    def append(ledger: Ledger, *row: Any, **more: Any) -> None:
        calls[0] += 1
        if calls[0] > rows:
            raise Killed
        real(ledger, *row, **more)

    monkeypatch.setattr(Ledger, "_append", append)
    with pytest.raises(Killed):
        train(tmp_path, tiny)
    monkeypatch.undo()
    eh.resume(tmp_path, model=torch.nn.Linear(3, 2), train=tiny)
    found = eh.verify(tmp_path)
    assert found["ok"], found["problems"]


def test_a_cut_first_row_beside_a_checkpoint_is_a_shortened_ledger(tiny: Data, tmp_path: Path) -> None:
    """Otherwise cutting the ledger would make a run forget what it spent."""
    train(tmp_path, tiny)
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(eh.errors.LedgerError, match="missing, or was shortened"):
        eh.resume(tmp_path, model=torch.nn.Linear(3, 2), train=tiny)
    with pytest.raises(eh.errors.UsageError, match="whose ledger is missing"):
        train(tmp_path, tiny)
    assert file.stat().st_size == 40


def test_other_beginnings_are_damage(tmp_path: Path) -> None:
    whole = encode_row({"type": "open", "plan": "p", "steps": 9}, GENESIS)[0]
    for data in (b"\0" * 40, b"x", whole[:30] + b"\n", whole.replace(b"open", b"opem")[:40]):
        (tmp_path / "ledger.jsonl").write_bytes(data)
        with pytest.raises(eh.errors.LedgerError, match="damaged"):
            Folder(tmp_path).ledger()


def test_the_command_says_so(tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(tmp_path, tiny, 20, monkeypatch)
    done = evenhand("verify", tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
