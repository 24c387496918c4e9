"""Batches of map-style datasets have one row per record, in their order, and no row depends on the other records."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import evenhand as eh
from evenhand.data.record_seeds import seeds
from evenhand.errors import DataError, ForeignLoaderError, UnsupportedModelError, UsageError
from evenhand.model_io import Shared
from evenhand.runs.folder import Folder


class Texts(Dataset[Any]):
    """Records of three words, as dicts; with ``__getitems__`` where it is asked for."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": [index % 7, index % 5, 1], "labels": index % 2}


class Pairs(Texts):
    """Records of an input without a name, and a target."""

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2), index % 2


class Encoding(UserDict[str, Tensor]):
    """A Mapping that is no dict, as ``BatchEncoding``."""


class Scores:
    """An output with logits, as ``ModelOutput``."""

    def __init__(self, logits: Tensor, loss: Tensor | None = None) -> None:
        self.logits, self.loss = logits, loss


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor, positions: Tensor | None = None, scaled: bool = False) -> Scores:
        seen = self.words(words)
        seen = seen if positions is None else seen + self.places(positions)
        return Scores(self.head(seen.mean(1)) * (0.5 if scaled else 1.0))


def encoded(records: list[dict[str, Any]]) -> Encoding:
    return Encoding(
        words=torch.tensor([record["words"] for record in records]),
        labels=torch.tensor([record["labels"] for record in records]),
    )


def test_a_mapping_of_a_collate_function_trains_a_model_with_logits(tmp_path: Path) -> None:
    shared = {"positions": torch.arange(3)[None], "scaled": True}
    data = eh.data.wrap(Texts(), label="labels", labels=["a", "b"], collate_fn=encoded, shared=shared)
    test = data.take(torch.arange(0, 60, 3))
    train = data.take(torch.tensor([row for row in range(60) if row % 3]))
    run = eh.fit(Reader(), train, epsilon=3, epochs=1, batch_size=20, out=tmp_path / "run", test=test)
    assert eh.verify(run.path)["problems"] == []
    predicted = run.predict({**test.fetch(torch.arange(20))[0]}).predicted
    assert predicted == run.predict(test).predicted
    assert set(predicted) <= {"a", "b"}


def test_what_all_records_share_is_handed_over_unchanged_and_belongs_to_no_record() -> None:
    positions = torch.arange(3)[None]
    data = eh.data.wrap(Texts(), label="labels", collate_fn=encoded, shared={"positions": positions})
    inputs, _ = data.fetch(torch.tensor([1, 2]))
    assert isinstance(inputs["positions"], Shared)
    assert inputs["positions"].value is positions
    assert sorted(data.fetch(torch.tensor([], dtype=torch.long))[0]) == ["positions", "words"]


def test_what_is_shared_needs_a_name_of_its_own() -> None:
    with pytest.raises(DataError, match="'words' is an input of every record"):
        eh.data.wrap(Texts(), label="labels", collate_fn=encoded, shared={"words": torch.ones(1)})
    with pytest.raises(DataError, match="need names"):
        eh.data.wrap(Pairs(), shared={"x": 1})
    with pytest.raises(UsageError, match="leave them out for arrays"):
        eh.data.wrap(torch.ones(4, 2), [0, 1, 0, 1], shared={"x": 1})


def dropping(records: list[dict[str, Any]]) -> Encoding:
    return encoded(records[:-1] or records)


def sorting(records: list[dict[str, Any]]) -> Encoding:
    return encoded(sorted(records, key=lambda record: -record["words"][0]))


def centring(records: list[dict[str, Any]]) -> Encoding:
    batch = encoded(records)
    batch["words"] = batch["words"] - batch["words"].min(0).values
    return batch


def flat(records: list[dict[str, Any]]) -> Encoding:
    return Encoding(words=encoded(records)["words"], place=torch.arange(3)[None], labels=encoded(records)["labels"])


def unlabelled(records: list[dict[str, Any]]) -> Encoding:
    return Encoding(words=encoded(records)["words"])


def texts(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {**encoded(records), "text": ["words"] * len(records)}


def longest(records: list[dict[str, Any]]) -> Encoding:
    batch = encoded(records)
    width = int(batch["words"].max())
    return Encoding(words=torch.nn.functional.pad(batch["words"], (0, width)), labels=batch["labels"])


@pytest.mark.parametrize(
    ("collate_fn", "words"),
    [
        (dropping, "7 row\\(s\\) for 8 record"),
        (sorting, "drops, reorders or mixes"),
        (centring, "drops, reorders or mixes"),
        (flat, "shared="),
        (unlabelled, "no target"),
        (texts, "'text' is a str, not a tensor"),
        (longest, "Pad every record to one declared length"),
    ],
)
def test_batches_whose_rows_are_not_the_records_are_refused(collate_fn: Callable[..., Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        eh.data.wrap(Texts(), label="labels", collate_fn=collate_fn)


def test_records_of_different_length_without_a_collate_function_are_refused() -> None:
    class Ragged(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"words": torch.ones(1 + index % 3), "labels": 0}

    data = eh.data.wrap(Ragged(), "labels")
    with pytest.raises(DataError, match=r"different shapes.*eh\.data\.Pad"):
        data.fetch(torch.arange(3))


def test_records_are_read_together_where_they_can_be() -> None:
    class Batched(Texts):
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            self.sizes.append(len(indices))
            return [self[index] for index in indices]

    dataset = Batched()
    data = eh.data.wrap(dataset, label="labels", collate_fn=encoded)
    dataset.sizes.clear()
    assert data.fetch(torch.tensor([9, 4]))[0]["words"].tolist() == [[2, 4, 1], [4, 4, 1]]
    assert dataset.sizes == [2]
    assert eh.data.wrap(Subset(dataset, [3, 1]), "labels").fetch(torch.tensor([1]))[1].tolist() == [1]


def test_records_read_together_in_another_order_are_read_alone_instead() -> None:
    class Reversed(Texts):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [self[index] for index in reversed(indices)]

    data = eh.data.wrap(Reversed(), "labels")
    assert data.fetch(torch.tensor([0, 1]))[1].tolist() == [0, 1]


def test_too_few_records_read_together_are_an_error() -> None:
    class Short(Texts):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [self[index] for index in indices[1:]]

    with pytest.raises(DataError, match="returned 7 records for 8"):
        eh.data.wrap(Short(), "labels")


def test_what_a_collate_function_draws_for_a_record_depends_on_that_record_alone() -> None:
    def masked(records: list[dict[str, Any]]) -> Encoding:
        batch = encoded(records)
        batch["words"] = batch["words"] * (torch.rand(batch["words"].shape) < 0.5)
        return batch

    data = eh.data.wrap(Texts(), label="labels", collate_fn=masked)
    with seeds(lambda numbers: numbers):
        alone, among = data.fetch(torch.tensor([7]))[0], data.fetch(torch.tensor([3, 5, 7]))[0]
        other = data.fetch(torch.tensor([14]))[0]
    assert torch.equal(alone["words"][0], among["words"][2])
    assert not torch.equal(alone["words"], other["words"])


class Priced(Reader):
    """A model that computes a loss of its own, and nothing else."""

    def forward(self, words: Tensor, **_: Any) -> Any:
        return {"loss": super().forward(words).logits.square().mean()}


class Wordless(Reader):
    def forward(self, words: Tensor, **_: Any) -> Any:
        return {"hidden": super().forward(words).logits}


@pytest.mark.parametrize(("model", "words"), [(Priced(), "a loss of its own"), (Wordless(), "without logits")])
def test_models_without_logits_are_refused_before_anything_is_spent(
    model: nn.Module, words: str, tmp_path: Path
) -> None:
    data = eh.data.wrap(Texts(), label="labels", labels=["0", "1"], collate_fn=encoded)
    with pytest.raises(UnsupportedModelError, match=words):
        eh.fit(model, data, epsilon=3, epochs=1, batch_size=10, out=tmp_path / "run")
    assert Folder(tmp_path / "run").ledger().reserved == 0


def test_a_loader_over_wrapped_data_is_told_how_rows_are_had() -> None:
    data = eh.data.wrap(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ForeignLoaderError, match=r"private\.batches\(data\)"):
        next(iter(DataLoader(data, batch_size=2)))
