"""Records in chunks: inputs as flat float32 rows, labels as columns of 0 and 1."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.data.dataset import Data, wrap
from evenhand.errors import DataError

CHUNK = 2048


@dataclass(frozen=True)
class Chunk:
    """Some records. A row that is not finite is all zero and not ``present``: it must contribute nothing (law 5).

    Its labels stay: where labels are public, one that vanished would tell of such a row.
    """

    inputs: Tensor
    labels: Tensor
    owner: Tensor
    present: Tensor

    def usable(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """What was made of these records, one float64 row each, and 1 for each that is present and came out finite.

        The others become rows of zeros. A weight of 0 would not do: 0 times NaN is NaN, and a sum that is not finite
        would tell that such a record is there.

        Examples:
          >>> part = Chunk(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2), torch.ones(2))
          >>> part.usable(torch.tensor([[0.5, 1.0], [0.5, float("nan")]]))[0].tolist()
          [[0.5, 1.0], [0.0, 0.0]]
        """
        kept = torch.isfinite(made).all(1) & (self.present > 0)
        return torch.where(kept.unsqueeze(1), made.double(), 0.0), kept.double()


def chunks(data: Data) -> Iterator[Chunk]:
    """All records in order, each looked at once; class numbers become one column per class."""
    classes = len(data.facts.labels)
    for rows in torch.split(torch.arange(len(data)), CHUNK):
        inputs, targets = data.fetch(rows)
        flat = inputs.detach().cpu().flatten(1).float()
        columns = targets.double() if targets.dim() == 2 else torch.nn.functional.one_hot(targets, classes).double()
        labelled = _finite(columns)
        present = _finite(flat) & labelled
        if not bool(present.all()):
            pairs = (present, flat), (labelled, columns)
            flat, columns = (torch.where(kept.unsqueeze(1), part, 0.0) for kept, part in pairs)
        yield Chunk(flat, (columns > 0).double(), data.owner[rows], present.double())


def _finite(rows: Tensor) -> Tensor:
    """Which rows are finite. A finite sum says so at once; one that is not may also have overflowed."""
    found = torch.isfinite(rows.sum(1))
    return found if bool(found.all()) else torch.isfinite(rows).all(1)


def as_data(
    inputs: Any, labels: Any, *, owners: Any = None, classes: Sequence[Any] | None = None
) -> tuple[Data, tuple[Any, ...]]:
    """Arrays as Data, and the classes as the caller named them.

    ``labels`` is one class per record, or one column of 0 and 1 per class where a record may have several.

    Examples:
      >>> data, names = as_data(np.zeros((4, 2)), ["a", "b", "b", "a"])
      >>> names, data.facts.records
      (('a', 'b'), 4)
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    with _reading():
        if values.ndim == 1:
            known = tuple(np.unique(values).tolist() if classes is None else classes)
            return wrap(inputs, values, owners=owners, labels=classes), known
        if values.ndim != 2:
            raise DataError("Labels must be one class per record, or one column of 0 and 1 per class.")
        known = tuple(range(values.shape[1]) if classes is None else classes)
        if len(known) != values.shape[1]:
            raise DataError(f"There are {values.shape[1]} label columns but {len(known)} classes: name each column.")
        made = wrap(inputs, values.astype(np.float32), owners=owners)
    return replace(made, facts=replace(made.facts, labels=tuple(map(str, known)))), known


def as_rows(inputs: Any, width: int) -> Tensor:
    """New records as flat float32 rows; refused if they have another width than those that were fitted."""
    with _reading():
        values = inputs.detach().cpu() if isinstance(inputs, Tensor) else torch.from_numpy(np.ascontiguousarray(inputs))
    flat = values.flatten(1).float()
    if flat.shape[1] != width:
        raise DataError(f"These records have {flat.shape[1]} features, those that were fitted had {width}.")
    return flat


@contextmanager
def _reading() -> Iterator[None]:
    """Arrays that may not be written, memory maps for example, are only read here: no need to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        yield


def seconds(data: Data) -> float:
    """About how long one look at all records takes: the time of the first chunk, times their number."""
    started = time.perf_counter()
    next(chunks(data))
    return (time.perf_counter() - started) * -(-len(data) // CHUNK)
