"""Arrays as records: inputs that are fetched by number, in memory or mapped from a file, and names as codes.

What is mapped stays in its file: a batch is copied out of it, and nothing else. Columns of numbers or texts in an array
are coded a block at a time, so that ten million names make no ten million objects.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.record_seeds import Quiet
from evenhand.errors import DataError
from evenhand.model_io import picked

UNDECLARED = 100
"""More labels or groups than this must be declared: so many are hardly public knowledge."""
BLOCK = 1 << 18
"""Entries of a column that are looked at together."""
Pick: TypeAlias = Callable[[Tensor], Tensor]


def from_arrays(inputs: Any, targets: Any, labels: Sequence[Any] | None) -> tuple[int, Quiet, tuple[str, ...], str]:
    """Return how many records arrays hold, how they are fetched, the names of their labels, and the inputs in words.

    Raises:
      DataError: there are none, not as many targets as inputs, or something else than numbers.
    """
    count, shape, pick_inputs = _inputs(inputs)
    targets_given, pick_targets, names = _targets(targets, labels)
    if not count:
        raise DataError("There are no records: pass at least one row.")
    if count != targets_given:
        raise DataError(f"There are {count} inputs but {targets_given} targets: pass one target per row.")
    return count, Quiet(lambda rows: (pick_inputs(rows), pick_targets(rows))), names, shape


def is_mapped(values: Any) -> bool:
    """Return whether an array lies in a file that is mapped into memory (numpy's memmap, or a view of one).

    Examples:
      >>> import tempfile
      >>> path = f"{tempfile.mkdtemp()}/x.npy"
      >>> np.save(path, np.eye(3))
      >>> is_mapped(np.load(path, mmap_mode="r")[1:]), is_mapped(np.load(path))
      (True, False)
    """
    while isinstance(values, np.ndarray):
        if isinstance(values, np.memmap):
            return True
        values = values.base
    return isinstance(values, mmap.mmap)


def _inputs(values: Any) -> tuple[int, str, Pick]:
    """Return the number of rows, their shape and type in words, and how rows are picked; floats become float32."""
    if is_mapped(values) and values.ndim:
        array = _numeric(values, "inputs")
        first = _floats(_picked(array, torch.arange(min(1, len(array)))))
        return len(array), _described(first), lambda rows: _floats(_picked(array, rows))
    features = _floats(_tensor(values, "inputs"))
    count = features.shape[0] if features.ndim else 0
    return count, _described(features), lambda rows: picked(features, rows) if features.is_nested else features[rows]


def _floats(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype in (torch.float64, torch.float16, torch.bfloat16) else leaf


def _described(features: Tensor) -> str:
    kind = str(features.dtype).removeprefix("torch.")
    shape = f"nested {tuple(features.shape[2:])}" if features.is_nested else f"{tuple(features.shape[1:])}"
    return f"{shape} {kind}"


def _picked(array: NDArray[Any], rows: Tensor) -> Tensor:
    """Return some rows of a mapped array, copied into memory."""
    return torch.from_numpy(np.ascontiguousarray(array[rows.numpy()], dtype=array.dtype.newbyteorder("=")))


def _tensor(values: Any, name: str) -> Tensor:
    if isinstance(values, Tensor) and values.is_nested and values.layout != torch.jagged:
        raise DataError(
            f"The {name} are a nested tensor of the old layout, for which torch has few operations: make it with "
            "torch.nested.as_nested_tensor(records, layout=torch.jagged)."
        )
    if isinstance(values, Tensor):
        return values.detach()
    return torch.from_numpy(np.ascontiguousarray(_numeric(values, name)))


def _numeric(values: Any, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"The {name} contain something that is not a number (or rows of different length): give a "
            "rectangular numeric array; encode text columns first."
        )
    return array


def _targets(targets: Any, labels: Sequence[Any] | None) -> tuple[int, Pick, tuple[str, ...]]:
    """Return the number of targets, how they are picked, and the names of the labels.

    Several columns in a mapped file stay there.
    """
    if not is_mapped(targets) or targets.ndim != 2 or targets.shape[1] == 1 or targets.dtype.kind not in "fiub":
        codes, names = target_codes(targets, labels)
        return len(codes), codes.__getitem__, names
    array, one_of_two = np.asarray(targets), all(bool(np.isin(part, (0, 1)).all()) for part in blocks(targets))
    names = _label_names(array.shape[1], labels, one_of_two) if labels is not None or one_of_two else ()
    floats = bool(names) or array.dtype.kind == "f"
    return len(array), lambda rows: _picked(array, rows).to(torch.float32 if floats else torch.int64), names


def blocks(column: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array in parts of about ``BLOCK`` numbers, in order.

    Examples:
      >>> [len(part) for part in blocks(np.zeros(600_000))]
      [262144, 262144, 75712]
    """
    rows = max(1, BLOCK // max(1, int(np.prod(column.shape[1:]))))
    for start in range(0, len(column), rows):
        yield np.asarray(column[start : start + rows])


def target_codes(targets: Any, labels: Sequence[Any] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return class codes 0..K-1 and the class names; floats stay as they are (regression), without names.

    Several columns of 0 and 1 are labels, of which a record may have any; other whole numbers in columns are tokens.
    """
    values = targets.detach().cpu().numpy() if isinstance(targets, Tensor) else np.asarray(targets)
    if values.ndim == 2 and values.dtype.kind in "fiub" and values.shape[1] > 1:
        if labels is not None or bool(np.isin(values, (0, 1)).all()):
            return _several(values, labels)
        if values.dtype.kind != "f":
            return torch.from_numpy(values.astype(np.int64)), ()
    if values.dtype.kind == "f":
        if labels is not None:
            raise DataError(
                "Targets are real numbers but labels were declared: pass whole numbers or names as targets."
            )
        return torch.from_numpy(values.astype(np.float32)), ()
    if values.ndim != 1:
        raise DataError("Targets must be one column (one class per record), or one column of 0 and 1 per label.")
    return coded(values, labels, values.shape[0], "targets")


def _several(values: NDArray[Any], labels: Sequence[Any] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return one column of 0.0 and 1.0 per label, and the names of the labels."""
    names = _label_names(values.shape[1], labels, bool(np.isin(values, (0, 1)).all()))
    return torch.from_numpy(values.astype(np.float32)), names


def _label_names(columns: int, labels: Sequence[Any] | None, one_of_two: bool) -> tuple[str, ...]:
    """Return the names of labels of which a record may have several; raise unless each has a column of 0 and 1."""
    names = tuple(map(str, range(columns) if labels is None else labels))
    if len(names) != columns or len(set(names)) != len(names):
        raise DataError(
            f"There are {columns} columns of targets and {len(names)} labels: declare one name per column, all "
            "different."
        )
    if not one_of_two:
        raise DataError("Some targets are neither 0 nor 1: with several labels per record, 1 says that it has one.")
    return names


def coded(
    values: Iterable[Any] | None, declared: Sequence[Any] | None, count: int, what: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the codes 0..K-1 of one name per record, and the names, in the declared order or sorted.

    Examples:
      >>> coded(np.array([7, 2, 7]), None, 3, "targets")
      (tensor([1, 0, 1]), ('2', '7'))
    """
    if values is None:
        return torch.zeros(count, dtype=torch.long), ("all",)
    column = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    if not isinstance(column, np.ndarray) or column.ndim != 1:
        column = column.tolist() if isinstance(column, np.ndarray) else list(column)
    if len(column) != count:
        raise DataError(f"There are {count} records but {len(column)} {what}: pass one per record.")
    if isinstance(column, np.ndarray) and column.dtype.kind in "iubU":
        distinct = np.unique(np.concatenate([np.unique(part) for part in blocks(column)] or [column]))
        few, names = _codes(distinct.tolist(), declared, what)
        codes = torch.empty(count, dtype=torch.long)
        for place, part in enumerate(blocks(column)):
            codes[place * BLOCK : place * BLOCK + len(part)] = few[torch.from_numpy(np.searchsorted(distinct, part))]
        return codes, names
    return _codes(column.tolist() if isinstance(column, np.ndarray) else column, declared, what)


def nameless(value: Any) -> bool:
    """Return whether a cell holds no name: None, NaN, or what pandas writes for a missing value.

    Examples:
      >>> [nameless(value) for value in (None, float("nan"), "", 0, np.float64(1))]
      [True, True, False, False, False]
    """
    same = None if value is None else value == value
    return not (isinstance(same, bool | np.bool_) and same)  # pandas' NA equals nothing and differs from nothing


def _codes(column: list[Any], declared: Sequence[Any] | None, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return the codes of names in a list, and all names."""
    if any(nameless(value) for value in column):
        raise DataError(f"Some {what} are missing: give every record one, for example the name 'unknown'.")
    names = tuple(sorted(set(column), key=_order) if declared is None else declared)
    if declared is None and what != "owners" and len(names) > UNDECLARED:
        raise DataError(
            f"There are more than {UNDECLARED} different {what}, and their values would be printed as public facts: "
            "declare them with labels= or group_names=, or pass real numbers (floats) as targets for regression."
        )
    index = {str(name): position for position, name in enumerate(names)}
    try:
        codes = [index[str(value)] for value in column]
    except KeyError:
        raise DataError(
            f"Some {what} are not among the declared ones, which are compared as text (0 and 1 are not 'no' and "
            "'yes'): declare all of them as they stand in the data, or correct the data."
        ) from None
    return torch.tensor(codes, dtype=torch.long), tuple(map(str, names))


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
