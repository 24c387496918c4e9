"""Long runs, many runs and runs side by side: neither memory nor time per step grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import endurance

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


@pytest.mark.slow
def test_a_run_of_some_length_holds_no_more_memory_at_its_end(tmp_path: Path) -> None:
    megabytes, times = endurance.alone("steps", 3000, tmp_path / "run").growth()
    assert megabytes < 15
    assert times < 3


@pytest.mark.slow
def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    measured = endurance.alone("steps", 100_000, tmp_path / "run")
    print(measured)
    megabytes, times = measured.growth()
    assert megabytes < 20
    assert times < 1.3


@pytest.mark.slow
def test_two_hundred_runs_in_one_process(tmp_path: Path) -> None:
    measured = endurance.alone("runs", 200, tmp_path / "run")
    print(measured)
    megabytes, times = measured.growth()
    assert megabytes < 30
    assert times < 1.5


@pytest.mark.slow
def test_eight_processes_at_once(tmp_path: Path) -> None:
    found = endurance.beside(8, tmp_path)
    print(found)
    assert len(found) == 8
    assert all(measured.growth()[0] < 20 for measured in found)
