"""Delta: the default is at most a tenth of one over the number of records, and above that the plan warns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evenhand as eh
from commands import evenhand, result
from edges.runs_made import RECORDS, begun, planned, records
from evenhand.mechanism.make_plan import default_delta
from evenhand.runs.folder import Folder
from evenhand.types import Facts


@given(st.integers(1, 10**12))
def test_the_default_is_the_largest_power_of_ten_up_to_a_tenth_of_one_over_n(count: int) -> None:
    found = default_delta(count)
    power = round(1 / found)
    assert str(power).strip("0") == "1"
    assert power >= 10 * count > power // 10


@pytest.mark.parametrize(("count", "expected"), [(9_900, 1e-5), (10_000, 1e-5), (10_001, 1e-6), (1_000, 1e-4)])
def test_plans_take_that_default(count: int, expected: float) -> None:
    made = eh.plan("dpsgd", eh.Privacy(3), data=Facts(count, (("all", count),)), epochs=1)
    assert made.delta == expected
    assert not any("delta" in text for text in made.warnings())


@pytest.mark.parametrize(("delta", "warned"), [(1.01e-5, True), (1e-5, False), (5e-5, True), (2e-4, True)])
def test_a_plan_warns_from_a_tenth_of_one_over_n_on(delta: float, warned: bool) -> None:
    made = eh.plan("dpsgd", eh.Privacy(3, delta), data=Facts(10_000, (("all", 10_000),)), epochs=1)
    found = [text for text in made.warnings() if "above 1/(10 N)" in text]
    assert bool(found) == warned == ("warning: delta" in str(made))
    assert all("Take at most delta 1e-05" in text for text in found)
    assert any("not below 1/N" in text for text in found) == (delta >= 1e-4)


def test_the_plan_command_warns_before_anything_is_spent() -> None:
    shown = evenhand("plan", "--records", "9900", "--epsilon", "3", "--delta", "1e-4")
    assert "warning: delta 0.0001 is above 1/(10 N)" in shown.stdout
    assert "0.99 of the 9900 on average" in shown.stdout
    assert result("plan", "--records", "9900", "--epsilon", "3")["delta"] == 1e-5


def test_the_statement_repeats_the_warning(tmp_path: Path) -> None:
    data = records()
    with begun(tmp_path, 2, data, planned(data, eh.Privacy(3, 1e-3))) as private:
        private.release()
    (found,) = [text for text in Folder.existing(tmp_path).statement()["warnings"] if "delta" in text]
    assert f"of the {RECORDS} on average" in found
    assert found in (tmp_path / "statement.md").read_text()
