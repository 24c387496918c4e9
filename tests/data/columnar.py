"""A stand-in for ``datasets.Dataset``: the part of its interface that we use, so that CI needs no optional library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Classes:
    """A feature with names of classes, as ``ClassLabel``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)


class Columnar:
    """Named columns of equal length; a format makes tensors of the cells, as with ``with_format("torch")``."""

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],
        classes: Mapping[str, Sequence[str]] | None = None,
        kind: str | None = None,
        shown: Sequence[str] | None = None,
    ) -> None:
        self._columns, self._kind, self._classes = dict(columns), kind, dict(classes or {})
        self._shown = list(shown or self._columns)
        self.column_names = list(self._columns)
        self.features = {name: Classes(self._classes[name]) if name in self._classes else None for name in columns}
        self.reads: list[int] = []

    @property
    def format(self) -> dict[str, Any]:
        return {"type": self._kind, "columns": self._shown, "format_kwargs": {}}

    def with_format(self, kind: str | None = None, columns: Sequence[str] | None = None, **_: Any) -> Columnar:
        other = Columnar(self._columns, self._classes, kind, columns)
        other.reads = self.reads
        return other

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, int):
            return {name: self._cells(name, [key])[0] for name in self._shown}
        self.reads.append(len(key))
        return {name: self._cells(name, key) for name in self._shown}

    def _cells(self, name: str, numbers: Sequence[int]) -> Any:
        cells = [self._columns[name][number] for number in numbers]
        if self._kind != "torch" or isinstance(cells[0], str):
            return cells
        rows = [torch.as_tensor(cell) for cell in cells]
        return torch.stack(rows) if len({row.shape for row in rows}) == 1 else rows
