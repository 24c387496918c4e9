"""The script in ``examples`` is short and does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "sklearn_pipeline.py"


def test_the_script_has_at_most_forty_lines() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 40


@pytest.mark.slow
def test_the_script_trains_verifies_and_writes_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(SCRIPT))
    assert names["pipeline"].score(names["X_test"], names["y_test"]) > 0.85
    assert "In total: epsilon 3.000" in capsys.readouterr().out
    assert (names["run"].path / "report.html").exists()
