"""Sequences are padded to a declared length, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from evenhand.data import Pad, next_words
from evenhand.errors import DataError, UsageError


def test_rows_have_the_declared_length_whatever_the_batch() -> None:
    pad, short, longer = Pad(5, {"x": 9}), {"x": [1, 2]}, {"x": [1, 2, 3, 4]}
    assert pad([short])["x"].tolist() == pad([short, longer])["x"][:1].tolist() == [[1, 2, 9, 9, 9]]


def test_records_longer_than_declared_are_refused_or_cut() -> None:
    with pytest.raises(DataError, match="longer than 2"):
        Pad(2, {"x": 0})([{"x": [1, 2, 3]}])
    assert Pad(2, {"x": 0}, cut=True)([{"x": [1, 2, 3]}])["x"].tolist() == [[1, 2]]


def test_an_empty_record_is_all_padding() -> None:
    assert Pad(2, {"x": 7})([{"x": []}])["x"].tolist() == [[7, 7]]


def test_the_next_word_is_the_target_up_to_a_records_last_word() -> None:
    batch = Pad(4, {"x": 0}, next_of="x")([{"x": [5, 6]}, {"x": [5, 6, 7, 8]}])
    assert batch["labels"].tolist() == [[6, -100, -100, -100], [6, 7, 8, -100]]
    assert next_words(torch.tensor([[3, 4]]), torch.tensor([0])).tolist() == [[-100, -100]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [((4, {}), "what fills each column"), ((0, {"x": 0}), "length"), ((4, {"x": 0}, False, "y"), "y")],
)
def test_wrong_settings_are_refused(settings: tuple[object, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Pad(*settings)  # type: ignore[arg-type]


def test_a_column_that_records_do_not_have_is_named() -> None:
    with pytest.raises(DataError, match="'y'"):
        Pad(4, {"y": 0})([{"x": [1]}])
