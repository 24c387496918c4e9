"""Encodings follow from what was declared and from the record itself, never from other records."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand.data import Category, Declaration, Number, Table, wrap
from evenhand.data.columns import as_table, declared
from evenhand.data.tables import guarded, split
from evenhand.errors import DataError, UsageError

NONE = {""}
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=20), FINITE, FINITE)
def test_numbers_end_up_between_minus_one_and_one(cells: list[float], low: float, high: float) -> None:
    if not low < high or not math.isfinite(high - low):
        with pytest.raises(UsageError):
            Number(low, high)
        return
    encoded = Number(low, high).encode("x", [repr(cell) for cell in cells], NONE)
    assert encoded.shape == (len(cells), 1)
    assert np.isfinite(encoded).all()
    assert abs(encoded).max() <= 1


@given(st.lists(st.text(max_size=6), min_size=1, max_size=20), st.text(max_size=6))
def test_a_record_is_encoded_the_same_in_any_company(cells: list[str], own: str) -> None:
    column = Category(("a", "b"), other="else", missing="category")
    alone = column.encode("x", [own], NONE)
    assert (column.encode("x", [*cells, own], NONE)[-1] == alone[0]).all()
    assert alone.sum() == 1


def test_every_choice_for_missing_values() -> None:
    cells = ["50", "", "?"]
    assert Number(0, 100, missing="middle").encode("x", cells, {"", "?"}).tolist() == [[0.0], [0.0], [0.0]]
    assert Number(0, 100, missing="flag").encode("x", cells, {"", "?"}).tolist() == [[0, 0], [0, 1], [0, 1]]
    assert Category(["a"], missing="category").encode("x", ["a", "?"], {"?"}).tolist() == [[1, 0], [0, 1]]
    with pytest.raises(DataError, match="missing"):
        Number(0, 100).encode("x", cells, {"", "?"})
    with pytest.raises(DataError, match="missing"):
        Category(["a"]).encode("x", ["a", "?"], {"?"})
    assert Number(0, 100, missing="middle").encode("x", np.array([100.0, math.nan]), NONE).tolist() == [[1.0], [0.0]]


def test_what_a_label_cannot_be_is_mended_where_labels_are_declared() -> None:
    known = Declaration({"age": Number(0, 100)}, label="ill", labels=("no", "yes"))
    for cells, words in ((["no", "yes", "perhaps"], "Add it to labels"), (["no", "yes", ""], "the label, has missing")):
        with pytest.raises(DataError, match=words) as raised:
            known.data(Table({"age": ["1", "2", "3"], "ill": cells}))
        assert "[columns.ill]" not in str(raised.value)


@pytest.mark.parametrize("cell", [1, 1.0, "1", " 1 ", np.int64(1), np.float32(1)])
def test_a_whole_number_is_the_same_category_however_it_is_stored(cell: object) -> None:
    assert Category([0, 1]).codes("x", [cell], NONE) == [1]


def test_arrays_with_a_value_that_is_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="record 2, have no finite number"):
        Number(0, 1).encode("x", np.array([[0.0, 1.0], [0.0, math.nan]]), NONE)


@pytest.mark.parametrize("column", [Number(0, 1.5, "flag"), Category(("a", "b"), "c", "category", False)])
def test_a_column_survives_its_table(column: Number | Category) -> None:
    assert declared("x", as_table(column)) == column


def test_a_declaration_survives_its_file() -> None:
    known = Declaration(
        {"age": Number(0, 100), "sex": Category(("f", "m"))}, label="ill", labels=[0, 1], groups="sex", owners="ill"
    )
    assert Declaration.from_json(known.to_json()) == known


def test_declared_groups_keep_their_order_and_absent_ones_their_place() -> None:
    known = Declaration({"a": Number(0, 1), "g": Category(("z", "y", "x"))}, label="l", labels=("0", "1"), groups="g")
    data = known.data(Table({"a": [0, 1], "g": ["x", "z"], "l": [0, 1]}))
    assert data.facts.groups == ("z", "y", "x")
    assert data.group.tolist() == [2, 0]


def test_whether_a_row_is_held_out_does_not_depend_on_later_rows() -> None:
    values = torch.arange(200.0)[:, None]
    short = split(wrap(values[:150], [0, 1] * 75), 0.3, seed=4)[1]
    long = split(wrap(values, [0, 1] * 100), 0.3, seed=4)[1]
    inputs = [part.fetch(torch.arange(len(part)))[0].flatten().tolist() for part in (short, long)]
    assert inputs[1][: len(inputs[0])] == inputs[0]
    other = split(wrap(values, [0, 1] * 100), 0.3, seed=5)[1]
    assert other.fetch(torch.arange(len(other)))[0].flatten().tolist() != inputs[1]


def test_taking_rows_keeps_owners_groups_and_targets_together() -> None:
    data = wrap(torch.arange(6.0)[:, None], [0, 1] * 3, groups=list("aabbcc"), owners=list("xyzxyz"))
    some = data.take(torch.tensor([5, 3, 2]))
    assert some.facts.owners == (("x", 1), ("z", 2))
    assert [some.facts.owner_names[index] for index in some.owner.tolist()] == ["z", "x", "z"]
    assert some.group_names() == ["c", "b", "b"]
    assert some.fetch(torch.arange(3))[0].flatten().tolist() == [5, 3, 2]
    assert some.fetch(torch.arange(0))[0].shape == (0, 1)


@given(st.text())
def test_no_guarded_cell_starts_a_formula(cell: str) -> None:
    made = guarded(cell)
    if made.startswith(("=", "@", "\t", "\r")):
        pytest.fail("a spreadsheet would run this cell")
    if made.startswith(("+", "-")):
        assert math.isfinite(float(made)) or "n" in made.lower()
    assert made.removeprefix("'") == cell.removeprefix("'")
