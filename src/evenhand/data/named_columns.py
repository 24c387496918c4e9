"""Wraps a ``datasets.Dataset`` of Hugging Face by the names of its columns, fetched in batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenhand import _validate
from evenhand.data.map_style import RAGGED, Collate, Rows, checked, from_dataset, split
from evenhand.data.record_seeds import Guarded
from evenhand.errors import DataError, ForeignLoaderError, UsageError

ROLES = ("label", "label_ids", "labels")
"""Columns that a model must not see: it would compute a mean loss of its own."""


def refuse_unusable(data: Any) -> None:
    """Raise for a dataset that only streams, and for a dict of several datasets."""
    if isinstance(data, Mapping):
        parts = ", ".join(repr(str(name)) for name in data)
        raise DataError(f"This is a dict of datasets ({parts}): pass one of them, for example data['train'].")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ForeignLoaderError(
            "A dataset that streams has no rows to sample from: load it without streaming=True, as a datasets.Dataset "
            "with a length."
        )


@dataclass(frozen=True)
class Columns:
    """A dataset, the column to predict, and the columns that the model sees; collated by a function if there is one."""

    dataset: Any
    label: str
    inputs: Sequence[str] | None = None
    collate_fn: Collate | None = None

    def __post_init__(self) -> None:
        refuse_unusable(self.dataset)
        if not len(self.dataset):
            raise DataError("There are no records: the dataset has length 0.")
        if not self.collate_fn or self.label in self.names:
            self.known(self.label)
        for name in self.inputs or ():
            self.known(name)
        wrong = [name for name in self.inputs or () if name == self.label]
        if wrong:
            raise UsageError(f"{wrong[0]!r} is the label and an input too: the model must not see what it predicts.")

    @property
    def names(self) -> list[str]:
        """Return the names of all columns."""
        return [str(name) for name in self.dataset.column_names]

    def known(self, name: str) -> str:
        """Return the name of a column; raise with the nearest one if there is none.

        A dataset with a transform of its own may make columns that it does not list.
        """
        if self.dataset.format["type"] == "custom":
            return name
        return _validate.known(name, self.names, "column")

    def column(self, name: str) -> list[Any]:
        """Return all cells of a column, names of classes in place of their numbers."""
        cells = list(self.dataset.with_format(None)[_validate.known(name, self.names, "column")][:])
        classes = getattr(self.dataset.features[name], "names", None)
        if classes is None:
            return cells
        if any(cell is None or not 0 <= cell < len(classes) for cell in cells):
            raise DataError(f"Some records have no value in {name!r}: leave them out, or give every record one.")
        return [classes[cell] for cell in cells]

    def cells(self, role: Any) -> Any:
        """Return all cells of a column that is named, else what was given: one value per record."""
        return self.column(role) if isinstance(role, str) else role

    def described(self, inputs: Sequence[str]) -> str:
        """Return the columns that the model sees, in words."""
        return f"{', '.join(inputs) or 'items'} of {type(self.dataset).__name__}"

    @property
    def labelled(self) -> bool:
        """Return whether the column of the label has one value per record that is no sequence."""
        if self.label not in self.names or self.dataset.format["type"] == "custom":
            return False
        first = self.dataset.with_format(None)[0][self.label]
        return not isinstance(first, list | tuple | dict)

    def chosen(self, roles: Iterable[Any]) -> list[str]:
        """Return the columns that the model sees: those declared, or those that ``with_format`` chose."""
        if self.inputs is not None:
            return list(self.inputs)
        hidden = {self.label, *ROLES, *(role for role in roles if isinstance(role, str))}
        formatted = [str(name) for name in self.dataset.format["columns"] or self.names]
        if self.dataset.format["type"] == "custom":
            return []
        if len(formatted) < len(self.names):
            return [name for name in formatted if name not in hidden]
        candidates = [name for name in self.names if name not in hidden]
        raise UsageError(
            f"Say which columns the model sees: inputs={candidates!r}, or fewer of them. They are handed over by name."
        )

    def fetch(self, inputs: Sequence[str], codes: Tensor | None, shared: Mapping[str, Any]) -> Guarded:
        """Return how rows are read; ``codes`` are the targets, else the column or the collate function makes them."""
        if self.dataset.format["type"] == "custom":
            return self._transformed(codes, shared)
        needed = [*inputs, *([self.label] if codes is None and self.label in self.names else [])]
        source, collate_fn = self._formatted(needed), self.collate_fn

        def read(numbers: list[int]) -> Rows:
            columns = source[numbers]
            targets = None if codes is None else codes[torch.tensor(numbers)]
            if collate_fn is None:
                batch = {name: _tensor(name, columns[name]) for name in needed}
                return split(batch, self.label) if targets is None else (batch, targets)
            columns = columns if targets is None else {**columns, self.label: targets.tolist()}
            rows = zip(*columns.values(), strict=True)
            return split(collate_fn([dict(zip(columns, row, strict=True)) for row in rows]), self.label, targets)

        return checked(lambda number: number, read, read, len(self.dataset), shared, compared=True)

    def _formatted(self, needed: Sequence[str]) -> Any:
        """Return the dataset with tensors as cells; a collate function gets cells in the format that it has."""
        kind = self.dataset.format
        if self.collate_fn is None and kind["type"] != "torch":
            return self.dataset.with_format("torch", columns=list(needed))
        return self.dataset.with_format(kind["type"], columns=list(needed), **kind["format_kwargs"])

    def _transformed(self, codes: Tensor | None, shared: Mapping[str, Any]) -> Guarded:
        """Return how rows of a dataset with a transform are read: its rows are dicts like those of any Dataset."""
        if codes is not None or self.inputs is None:
            return from_dataset(self.dataset, self.label, self.collate_fn, shared)
        wanted = (*self.inputs, self.label)
        return from_dataset(_Chosen(self.dataset, wanted), self.label, self.collate_fn, shared)


@dataclass(frozen=True)
class _Chosen:
    """Some columns of a dataset whose transform makes them."""

    dataset: Any
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._of(self.dataset[index])

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [self._of(item) for item in self.dataset.__getitems__(numbers)]

    def _of(self, item: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in self.names if name not in item]
        if missing:
            raise DataError(f"There is no column {missing[0]!r}: the dataset's transform makes no such column.")
        return {name: item[name] for name in self.names}


def _tensor(name: str, cells: Any) -> Tensor:
    if isinstance(cells, Tensor):
        return cells
    if isinstance(cells, list) and all(isinstance(cell, Tensor) for cell in cells):
        raise DataError(f"The column {name!r} cannot be stacked, since {RAGGED}.")
    raise DataError(
        f"The column {name!r} holds no numbers: tokenise it first (data.map(tokenizer, ...)), or leave it out of "
        "inputs=."
    )
