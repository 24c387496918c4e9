"""Datasets whose inputs are dicts or tuples go through training like tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import evenhand as eh


class Dicts(Dataset):
    """Records as language models have them."""

    def __init__(self, pairs: bool) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> object:
        inputs = {"words": torch.tensor([index % 7, index % 5]), "weight": torch.tensor(1.0)}
        return (inputs, index % 2) if self.pairs else inputs | {"labels": index % 2}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).mean(1) * weight[:, None])


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "key"])
def test_dict_batches_train(pairs: bool, tmp_path: Path) -> None:
    data = eh.data.wrap(Dicts(pairs), None if pairs else "labels")
    run = eh.fit(Words(), data, epsilon=3, epochs=2, batch_size=10, out=tmp_path / "run")
    assert eh.verify(run.path)["ok"]


def test_tuple_inputs_are_the_arguments_of_the_model(tmp_path: Path) -> None:
    class Pairs(Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> object:
            return (torch.tensor([index % 7, 1]), torch.tensor(1.0)), index % 2

    run = eh.fit(Words(), Pairs(), epsilon=3, epochs=1, batch_size=10, out=tmp_path / "run")
    assert eh.verify(run.path)["ok"]


def test_a_dataset_of_something_else_is_refused() -> None:
    with pytest.raises(eh.errors.DataError, match="pairs"):
        eh.data.wrap(Dicts(pairs=False))
    with pytest.raises(eh.errors.DataError, match="named"):
        eh.data.wrap(Dicts(pairs=False), "label")
