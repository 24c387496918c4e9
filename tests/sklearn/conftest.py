from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenhand.training.guards import model_guards


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run folders go elsewhere, each test has a dataset ledger of its own, and nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


@pytest.fixture
def people() -> tuple[Any, Any]:
    """Three hundred records of two classes with names."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(300, 4))
    return inputs, np.where(inputs[:, 0] + 0.3 * generator.normal(size=300) > 0, "yes", "no")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the model before the first step, which is the same in every fit here, is taken as done."""
    monkeypatch.setattr(model_guards, "probe", lambda *arguments, **options: None)
