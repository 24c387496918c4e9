"""Accuracy per group: values, intervals, and the inputs that are not tidy."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import binomtest

from evenhand.errors import DataError
from evenhand.reporting.group_metrics import accuracy_by_group, estimate, wilson


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 7), (33, 44), (449, 450), (99_000, 100_000)])
def test_wilson_equals_scipy(right: int, count: int) -> None:
    reference = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right / count, count) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_the_value_lies_in_its_interval() -> None:
    for count in (1, 2, 3, 10, 1000):
        for right in range(0, count + 1, max(1, count // 10)):
            found = estimate(right / count, count)
            assert 0 <= found.low <= found.value <= found.high <= 1


def test_values_and_counts_per_group() -> None:
    frame = accuracy_by_group([0, 1, 2, 3], [0, 1, 2, 0], ["a", "b", "a", "b"])
    assert {name: (e.value, e.count) for name, e in frame.by_group.items()} == {"a": (1.0, 2), "b": (0.5, 2)}
    assert (frame.overall.value, frame.overall.count) == (0.75, 4)


def test_groups_count_in_their_order() -> None:
    names = [f"class {i}" for i in (10, 2, 1, 11, 0)]
    frame = accuracy_by_group([1] * 5, [1] * 5, names)
    assert list(frame.by_group) == ["class 0", "class 1", "class 2", "class 10", "class 11"]


def test_names_of_any_kind_become_text() -> None:
    groups = [3, 3.5, None, ("a", 1), np.int64(3), "\ud800", "", float("nan")]
    frame = accuracy_by_group([1] * 8, [1] * 8, groups)
    assert set(frame.by_group) == {"3", "3.5", "None", "('a', 1)", "\ud800", "", "nan"}
    assert frame.by_group["3"].count == 2


def test_a_group_without_records_is_not_measured() -> None:
    frame = accuracy_by_group(["x"], ["x"], ["a"], names=["b", "a"])
    assert list(frame.by_group) == ["b", "a"]
    missing = frame.by_group["b"]
    assert math.isnan(missing.value)
    assert (missing.low, missing.high, missing.count, missing.measured) == (0.0, 1.0, 0, False)


def test_no_records_at_all() -> None:
    frame = accuracy_by_group([], [], [], names=["a"])
    assert not frame.overall.measured
    assert frame.by_group["a"].count == 0


def test_columns_of_different_length_are_refused_without_values() -> None:
    with pytest.raises(DataError, match="y_true has 2 records, y_pred 1 and groups 1") as caught:
        accuracy_by_group(["secret", "b"], ["a"], ["private"])
    assert "secret" not in str(caught.value)
    assert "private" not in str(caught.value)


def test_importing_the_report_loads_no_heavy_library() -> None:
    code = (
        "import sys, evenhand.reporting.run_page; "
        "print([m for m in ('torch', 'sklearn', 'fairlearn', 'numpy', 'scipy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
