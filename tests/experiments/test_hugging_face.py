"""The page of MiniLM: it is what its command writes of the figures beside it, and they meet the bar that was set."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from evenhand.reporting.group_metrics import wilson

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
LEAST = 0.10
"""The lower end of the interval lies at least this far above the share of the majority."""


def test_the_page_is_the_one_that_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    try:
        module = importlib.import_module("hugging_face")
        figures = json.loads((RESULTS / "hugging_face.json").read_text(encoding="utf-8"))
        assert (RESULTS / "hugging_face.md").read_text(encoding="utf-8") == module.page(figures)
    finally:
        sys.modules.pop("hugging_face", None)


@pytest.mark.parametrize("part", ["features", "lora"])
def test_minilm_is_clearly_above_the_majority_at_epsilon_3(part: str) -> None:
    row = json.loads((RESULTS / "hugging_face.json").read_text(encoding="utf-8"))[part]
    assert row["verified"]
    assert row["epsilon"] <= 3.0
    assert row["low"] == pytest.approx(wilson(row["accuracy"], row["held_out"])[0])
    assert row["low"] >= row["majority"] + LEAST
    assert set(row["groups"]) == {"tweets", "movie reviews", "product reviews", "editorials"}
