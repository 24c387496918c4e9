"""What a loader was made of is read; what it would do to the draws is refused; ours are the plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import evenhand as eh
from evenhand.data import Data
from evenhand.data.fingerprint import fingerprint
from evenhand.errors import BatchReuseError, DataError, ForeignLoaderError
from evenhand.integrations.loaders import EpochLoader, read_loader, wrap_dataset
from evenhand.mechanism.make_plan import Plan

ROWS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1] * 3))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


class Odd(SequentialSampler):
    """A sampler of somebody's own."""


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}])
def test_a_plain_loader_gives_its_records_and_batch_size(options: dict[str, Any]) -> None:
    rows = read_loader(DataLoader(ROWS, batch_size=4, **options))
    assert (rows.data.facts.records, rows.batch_size) == (6, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 6, 6)},
        {"sampler": RandomSampler(ROWS, replacement=True)},
        {"sampler": RandomSampler(ROWS, num_samples=3)},
        {"sampler": Odd(ROWS)},
        {"batch_size": None},
    ],
)
def test_a_sampler_that_weights_or_leaves_out_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ForeignLoaderError, match="Poisson"):
        read_loader(DataLoader(ROWS, **{"batch_size": 2, **options}))


def test_other_sources_of_batches_are_refused() -> None:
    class Grouped(BatchSampler):
        """Batches of somebody's own."""

    for loader in (DataLoader(Stream(), batch_size=2), DataLoader(ROWS, batch_sampler=Grouped(range(6), 2, False))):
        with pytest.raises(ForeignLoaderError):
            read_loader(loader)
    for loader in (ROWS, [DataLoader(ROWS, batch_size=2)], {"a": 1}):
        with pytest.raises(ForeignLoaderError, match="pass a DataLoader"):
            read_loader(loader)
    own = DataLoader(ROWS, batch_size=2, collate_fn=lambda pairs: pairs)
    with pytest.raises(DataError, match="collate_fn"):
        read_loader(own)
    given = read_loader(own, data=(torch.zeros(4, 2), [0, 1, 0, 1]), owners=["x", "x", "x", "y"]).data
    assert given.facts.owners == (("x", 3), ("y", 1))
    with pytest.raises(DataError, match="wrapped already"):
        read_loader(own, data=given, owners=["x"] * 4)


def test_parts_of_a_dataset_keep_names_and_add_up_with_the_whole() -> None:
    part = Subset(Subset(ROWS, [5, 4, 3, 2]), [0, 2])
    data = wrap_dataset(part, ["a", "b", "c", "d", "e", "f"], ["x", "y"])
    assert data.group_names() == ["f", "d"]
    assert data.facts.owners == (("x", 1), ("y", 1))
    assert data.fetch(torch.arange(2))[0].tolist() == [[10.0, 11.0], [6.0, 7.0]]
    assert fingerprint(data) == fingerprint(wrap_dataset(ROWS, None, None))


def test_every_pass_is_the_next_epoch_and_nothing_is_drawn_before_it_is_asked_for(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, nn.CrossEntropyLoss(reduction="none"), tiny_plan, out=tmp_path) as private:
        loader = EpochLoader(private, tiny)
        unused = [iter(loader) for _ in range(3)]
        assert private.folder.ledger().reserved == 0
        assert [sum(1 for batch in loader if len(private.step(batch)) >= 0) for _ in range(4)] == [5, 5, 5, 0]
        assert [list(batches) for batches in unused] == [[], [], []]


def test_a_pass_whose_batches_are_thrown_away_is_refused(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, nn.CrossEntropyLoss(reduction="none"), tiny_plan, out=tmp_path) as private:
        with pytest.raises(BatchReuseError, match="drawn but not stepped"):
            list(EpochLoader(private, tiny))
        assert private.folder.ledger().reserved == 2


def test_a_look_at_the_first_batch_leaves_the_epoch_as_it_is(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, nn.CrossEntropyLoss(reduction="none"), tiny_plan, out=tmp_path) as private:
        loader = EpochLoader(private, tiny)
        looks = [next(iter(loader)) for _ in range(2)]
        assert looks[0] is looks[1], "the draw of a step is one draw"
        assert private.folder.ledger().reserved == 1
        assert [sum(1 for batch in loader if len(private.step(batch)) >= 0) for _ in range(4)] == [5, 5, 5, 0]
    assert private.folder.ledger().committed == private.plan.steps
