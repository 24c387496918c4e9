"""What tests of budgets share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def slow_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is charged alone, as in slow training; no clock decides what is saved; the dataset ledger is new."""
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("evenhand.runs.recorder.BLOCK_SECONDS", 1e-9)
    monkeypatch.setattr("evenhand.training.loop.CHECKPOINT_SECONDS", 1e9)
