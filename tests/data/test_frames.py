"""DataFrames by the names of their columns: pandas, polars, whole numbers, missing values, and clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import evenhand as eh
from evenhand.data.fingerprint import fingerprint
from evenhand.errors import EvenhandError

COLUMNS: dict[str, list[Any]] = {
    "age": [20 + row * 7 % 60 for row in range(80)],
    "sex": ["f", "m"] * 40,
    "race": ["a", "b", "b", "c"] * 20,
    "ill": [int(row * 7 % 60 > 30) for row in range(80)],
}
KNOWN: dict[str, Any] = {
    "label": "ill",
    "numbers": {"age": (0, 100)},
    "categories": {"sex": ["f", "m"], "race": ["a", "b", "c"]},
}


@pytest.fixture(params=["pandas", "polars"])
def frame(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param).DataFrame(COLUMNS)


def test_a_frame_is_wrapped_trained_and_predicted_by_column_names(frame: Any, tmp_path: Path) -> None:
    data = eh.data.wrap(frame, groups=["race"], **KNOWN)
    assert data.facts.groups == ("a", "b", "c")
    assert data.facts.labels == ("0", "1")
    assert "labels" in data.facts.derived, "labels that were read off are said to be"
    assert data.facts.inputs == "(6,) float32"
    run = eh.fit(torch.nn.Linear(6, 2), data, epsilon=3.0, epochs=1, out=tmp_path / "run")
    told = run.predict(frame)
    assert len(told.predicted) == 80
    assert set(told.predicted) <= {"0", "1"}
    inputs = data.fetch(torch.arange(80))[0]
    assert run.predict(inputs).probabilities == told.probabilities == run.predict(inputs.numpy()).probabilities
    assert run.group_column == "race"


def test_several_columns_make_one_group_per_combination(frame: Any) -> None:
    data = eh.data.wrap(frame, groups=["sex", "race"], **KNOWN)
    assert data.facts.groups[:2] == ("sex = f, race = a", "sex = f, race = b")
    assert len(data.facts.groups) == 6
    assert data.group_names()[:2] == ["sex = f, race = a", "sex = m, race = b"]


@pytest.mark.parametrize("role", ["persons", "keep_together", "groups", "owners"])
def test_a_name_that_pandas_knows_to_be_missing_is_one_line(role: str) -> None:
    for values in (pandas.array(["a", None, "b"], dtype="string"), pandas.Series([1, None, 2], dtype="Int64")):
        given: dict[str, Any] = {role: values}
        with pytest.raises(EvenhandError, match=r"have no name|are missing"):
            eh.data.wrap(torch.zeros(3, 1), [0, 1, 1], **given)


def test_nullable_and_text_columns_of_pandas() -> None:
    frame = pandas.DataFrame(COLUMNS).astype({"age": "Int64", "sex": "category", "race": "string"})
    assert eh.data.wrap(frame, groups="sex", **KNOWN).facts.groups == ("f", "m")
    frame.loc[3, "age"] = pandas.NA
    with pytest.raises(EvenhandError, match=r"'age': \d+ record\(s\), the first being record \d+, have no value"):
        eh.data.wrap(frame, **KNOWN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": "il"}, "Did you mean 'ill'"),
        ({"groups": ["rase"]}, "Did you mean 'race'"),
        ({"numbers": {"aeg": (0, 100)}}, "Did you mean 'age'"),
        ({"numbers": {"age": 100}}, "numbers={'age': (0, 100)}"),
        ({"categories": {"sex": ["f"]}}, "not declared"),
        ({"groups": ["age"]}, "names are not declared"),
        ({"label": "age"}, "also declared"),
        ({"labels": ["yes", "no"]}, "not declared"),
        ({"owners": ["sex"]}, "one column"),
        ({"numbers": None, "categories": None}, "No column is declared"),
    ],
)
def test_what_does_not_fit_the_frame_is_said(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EvenhandError) as raised:
        eh.data.wrap(pandas.DataFrame(COLUMNS), **{**KNOWN, **change})
    assert words in str(raised.value)


def test_columns_of_no_frame_are_refused() -> None:
    with pytest.raises(EvenhandError, match="these data are none"):
        eh.data.wrap(np.zeros((4, 2)), label="ill")
    with pytest.raises(EvenhandError, match="label='ill'"):
        eh.data.wrap(np.zeros((4, 2)), [0, 1, 0, 1], numbers={"age": (0, 1)})


def test_predicting_another_width_is_refused(tmp_path: Path) -> None:
    run = eh.fit(
        torch.nn.Linear(6, 2), eh.data.wrap(pandas.DataFrame(COLUMNS), **KNOWN), epsilon=3.0, epochs=1, out=tmp_path
    )
    for wrong in (np.zeros((3, 5)), np.zeros(3), [["a"] * 6]):
        with pytest.raises(EvenhandError):
            run.predict(wrong)


def test_a_frame_is_the_same_data_whatever_is_declared_about_it() -> None:
    frame = pandas.DataFrame({"age": [20, 40, 60], "bmi": [20.5, 21.5, 22.5], "ill": ["no", "yes", "no"]})
    narrow, wide, fewer, other = (
        fingerprint(eh.data.wrap(one, label="ill", labels=["no", "yes"], numbers=numbers))
        for one, numbers in (
            (frame, {"age": (0, 90)}),
            (frame, {"age": (0, 120)}),
            (frame[["ill", "age", "bmi"]].assign(age=[20.0, 40.0, 60.0]), {"age": (0, 90)}),
            (frame.assign(age=[20, 40, 61]), {"age": (0, 90)}),
        )
    )
    assert narrow == wide == fewer != other


def test_arrays_are_the_same_data_in_any_shape_and_kind_of_number() -> None:
    rows = torch.arange(32).reshape(4, 8)
    shapes = (rows, rows.float(), rows.double(), rows.to(torch.uint8), rows.reshape(4, 1, 2, 4))
    assert len({fingerprint(eh.data.wrap(one, [0, 1, 0, 1])) for one in shapes}) == 1
    assert fingerprint(eh.data.wrap(rows + 1, [0, 1, 0, 1])) != fingerprint(eh.data.wrap(rows, [0, 1, 0, 1]))
