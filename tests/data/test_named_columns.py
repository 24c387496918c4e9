"""Datasets of named columns are wrapped by name and read in batches; what cannot be read is one clear line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import evenhand as eh
from data.columnar import Columnar
from evenhand.errors import DataError, ForeignLoaderError, UsageError


def reviews(**changed: Any) -> Columnar:
    columns = {
        "input_ids": [[number % 7, number % 5, 1] for number in range(40)],
        "attention_mask": [[1, 1, 0]] * 40,
        "label": [number % 2 for number in range(40)],
        "region": ["north" if number % 3 else "south" for number in range(40)],
        "text": ["words"] * 40,
    }
    return Columnar({**columns, **changed}, {"label": ["bad", "good"]})


INPUTS = ["input_ids", "attention_mask"]


def test_columns_are_inputs_targets_groups_and_owners_by_name() -> None:
    data = eh.data.wrap(reviews(), label="label", inputs=INPUTS, groups="region", owners="region")
    inputs, targets = data.fetch(torch.tensor([5, 2]))
    assert inputs["input_ids"].tolist() == [[5, 0, 1], [2, 2, 1]]
    assert sorted(inputs) == sorted(INPUTS)
    assert targets.tolist() == [1, 0]
    assert data.facts.labels == ("bad", "good")
    assert data.facts.groups == ("north", "south")
    assert data.facts.owner_names == ("north", "south")


def test_rows_are_read_in_one_batch() -> None:
    source = reviews()
    data = eh.data.wrap(source, label="label", inputs=INPUTS)
    source.reads.clear()
    data.fetch(torch.arange(30))
    assert source.reads == [30]


def test_columns_chosen_by_the_format_are_the_inputs() -> None:
    shown = reviews().with_format("torch", columns=[*INPUTS, "label"])
    assert sorted(eh.data.wrap(shown, label="label").fetch(torch.arange(1))[0]) == sorted(INPUTS)


def test_the_statement_names_the_tokenizer_without_the_folder_it_came_from() -> None:
    data = eh.data.wrap(reviews(), label="label", inputs=INPUTS, tokenizer="/home/somebody/bert-tiny")
    assert "tokens of bert-tiny, declared as a public tokenizer" in data.facts.inputs
    assert "somebody" not in data.facts.inputs


def test_a_collate_function_gets_lists_of_records_and_the_codes_of_labels() -> None:
    seen: list[Any] = []

    def collate(records: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(records)
        ids = torch.tensor([record["input_ids"] for record in records])
        return {"input_ids": ids, "labels": torch.tensor([record["label"] for record in records])}

    data = eh.data.wrap(reviews(), label="label", inputs=["input_ids"], collate_fn=collate)
    assert sorted(seen[0]) == ["input_ids", "label"]
    assert data.fetch(torch.tensor([3]))[1].tolist() == [1]


def test_a_collate_function_may_leave_the_label_out() -> None:
    pad = eh.data.Pad(4, {"input_ids": 0})
    data = eh.data.wrap(
        reviews(), label="label", inputs=["input_ids"], collate_fn=lambda rows: {"input_ids": pad(rows)["input_ids"]}
    )
    inputs, targets = data.fetch(torch.tensor([3]))
    assert inputs["input_ids"].tolist() == [[3, 3, 1, 0]]
    assert targets.tolist() == [1]


WRONG = {
    "no label": ({"inputs": INPUTS}, UsageError, "Name the column to predict"),
    "unknown label": ({"label": "lable", "inputs": INPUTS}, UsageError, "label"),
    "unknown input": ({"label": "label", "inputs": ["input_id"]}, UsageError, "input_ids"),
    "unknown group": ({"label": "label", "inputs": INPUTS, "groups": "regions"}, UsageError, "region"),
    "label as input": ({"label": "label", "inputs": ["label"]}, UsageError, "must not see what it predicts"),
    "no inputs": ({"label": "label"}, UsageError, "Say which columns the model sees"),
    "text": ({"label": "label", "inputs": ["text"]}, DataError, "holds no numbers: tokenise it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_names_are_one_clear_line(case: str) -> None:
    settings, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        eh.data.wrap(reviews(), **settings)


def test_ragged_columns_are_refused_with_what_pads_them() -> None:
    ragged = reviews(input_ids=[[1] * (1 + number % 3) for number in range(40)])
    with pytest.raises(DataError, match=r"eh\.data\.Pad"):
        eh.data.wrap(ragged, label="label", inputs=INPUTS)
    with pytest.raises(DataError, match="no numbers"):
        eh.data.wrap(reviews(), label="label", inputs=["region"])


def test_lengths_that_differ_later_on_are_refused_when_they_are_read() -> None:
    late = reviews(input_ids=[[1, 2, 3]] * 39 + [[1]], attention_mask=[[1, 1, 1]] * 40)
    data = eh.data.wrap(late, label="label", inputs=INPUTS)
    with pytest.raises(DataError, match="different shapes"):
        data.fetch(torch.tensor([39]))


def test_a_missing_class_is_refused() -> None:
    with pytest.raises(DataError, match="no value in 'label'"):
        eh.data.wrap(reviews(label=[-1] * 40), label="label", inputs=INPUTS)


def test_a_dict_of_datasets_and_a_stream_are_refused() -> None:
    class Dict(dict[str, Any]):
        column_names, with_format = None, None

    class Stream:
        column_names, with_format = None, None

    with pytest.raises(DataError, match="data\\['train'\\]"):
        eh.data.wrap(Dict(train=reviews()), label="label", inputs=INPUTS)
    with pytest.raises(ForeignLoaderError, match="no rows to sample from"):
        eh.data.wrap(Stream(), label="label", inputs=INPUTS)


def test_inputs_are_for_named_columns_only() -> None:
    with pytest.raises(UsageError, match="inputs="):
        eh.data.wrap(torch.zeros(4, 2), [0, 1, 0, 1], inputs=["x"])
