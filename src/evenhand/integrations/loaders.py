"""Read what a DataLoader was made of, and give a trainer our own draws in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, default_collate

from evenhand.data.dataset import Data, wrap
from evenhand.data.fingerprint import fingerprint, survey
from evenhand.data.record_checks import refuse_training_records
from evenhand.errors import DataError, ForeignLoaderError, UsageError
from evenhand.training.private import Private
from evenhand.training.steps.draws import Epoch
from evenhand.types import Batch

_GIVE = "give the data themselves, data=evenhand.data.wrap(...)"


@dataclass(frozen=True)
class Rows:
    """The records behind a loader, and the size of its batches, which becomes the expected one."""

    data: Data
    batch_size: float


def read_loader(
    loader: Any, *, data: Any = None, groups: Iterable[Any] | None = None, owners: Iterable[Any] | None = None
) -> Rows:
    """Return the records of a loader; its order is dropped, since a plan's Poisson draws take its place.

    Raises:
      ForeignLoaderError: it weights, repeats or leaves out records, which the draws of the plan would not do.
      DataError: it makes batches by code of its own, which the draws would not run.

    Examples:
      >>> import torch
      >>> set_of_four = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
      >>> rows = read_loader(DataLoader(set_of_four, batch_size=2, shuffle=True))
      >>> rows.data.facts.records, rows.batch_size
      (4, 2)
    """
    if not isinstance(loader, DataLoader):
        raise ForeignLoaderError(
            f"The training data are a {type(loader).__name__}, of which nothing tells which records there are: pass a "
            f"DataLoader over a map-style dataset, or {_GIVE}."
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler or not plain:
        names = f"{type(sampler).__name__} and {type(loader.batch_sampler).__name__}"
        raise ForeignLoaderError(
            f"The loader draws rows by {names}, whose weights or batches the accountant does not describe and the "
            "plan's Poisson draws would not follow: pass a loader with batch_size= and, at most, shuffle=True."
        )
    if data is not None:
        return Rows(wrap(data, groups=groups, owners=owners), loader.batch_size)
    if loader.collate_fn is not default_collate:
        raise DataError(
            f"The loader makes batches with a collate_fn of its own, which the plan's draws would not run: {_GIVE}, of "
            "records that are finished."
        )
    return Rows(wrap_dataset(loader.dataset, groups, owners), loader.batch_size)


def wrap_dataset(dataset: Any, groups: Iterable[Any] | None, owners: Iterable[Any] | None) -> Data:
    """Return the records of a dataset; runs on a part of it and runs on the whole add up.

    Names are those of the whole or, if there are as many of them, those of the part.
    """
    whole = whole_of(dataset)
    data = wrap(dataset, groups=_names(dataset, groups), owners=_names(dataset, owners))
    return data if whole is dataset else replace(data, origin=partial(_whole_fingerprint, whole))


def whole_of(dataset: Any) -> Any:
    """Return the dataset that a Subset is a part of; any other is returned as it is."""
    return whole_of(dataset.dataset) if isinstance(dataset, Subset) else dataset


def refuse_same_records(train: Data, held_out: Any) -> None:
    """Raise if validation data, one or several loaders or datasets, hold training records, as far as digests can tell.

    Data that cannot be read as records are left alone.
    """
    for part in tree_leaves(held_out):
        dataset = part.dataset if isinstance(part, DataLoader) else part
        try:
            data = wrap(dataset)
        except (DataError, ForeignLoaderError):
            continue
        try:
            refuse_training_records(survey(train), data)
        except UsageError:
            raise UsageError(
                "The validation data hold training records. Their metrics reveal them, reach loggers, and decide "
                "which checkpoint is best or when training stops, none of which the statement would cover: hold "
                "records out. Nothing was spent."
            ) from None


def _whole_fingerprint(whole: Any) -> str:
    return fingerprint(wrap(whole))


def _names(dataset: Any, names: Iterable[Any] | None) -> list[Any] | None:
    """Return the names of the records of a part of a dataset."""
    listed = None if names is None else list(names)
    if listed is None or not isinstance(dataset, Subset) or len(listed) == len(dataset):
        return listed
    return [_names(dataset.dataset, listed)[place] for place in dataset.indices]  # type: ignore[index]


@dataclass
class EpochLoader:
    """A loader of a run's batches for a trainer that iterates over it once an epoch, one batch ahead of its steps.

    It draws only when it is asked for a batch, and it has no length: epochs of a plan differ by a step. A pass in which
    nothing was stepped (a look at the first batch) leaves its epoch to the next one, which is given the same batches.
    """

    private: Private
    data: Data
    ahead: int = 1
    _epochs: Iterator[Epoch] | None = field(default=None, init=False)
    _first: int = field(default=-1, init=False)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches of the next epoch; nothing is drawn before the first is asked for."""
        if self._epochs is None or self._first == self.private.position:
            self._epochs = self.private.epochs(self.data, ahead=self.ahead)
        self._first = self.private.position
        yield from next(self._epochs, ())
