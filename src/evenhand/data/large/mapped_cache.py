"""Encode a Parquet file once, stretch by stretch, into arrays on disk that are mapped instead of read into memory.

The arrays hold private records: only their owner may read them, in the user's cache folder (or ``cache=``), named by a
hash of the bytes of the file and of the declaration. Of several processes one converts, the others wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from evenhand import durable, untrusted
from evenhand.data.columns import Image
from evenhand.data.dataset import Data, kept_together, wrap
from evenhand.data.read_files import cells_of, opened, parquet_of
from evenhand.data.sources.base import cache_folder
from evenhand.data.tables import Declaration, Table, checked_header
from evenhand.errors import DataError, UsageError

STRETCH = 1 << 16
"""Records that are encoded at a time."""
_FORMAT = 1
_META = "meta.json"
_NAMES: untrusted.Shape = {"groups": [str], "owners": [str]}


def mapped(path: Path, declared: Declaration, origin: str, cache: Path | None = None) -> Data:
    """Return the records of a Parquet file, whose encoded columns stay on disk; equal to what is read into memory.

    Args:
      path: the file.
      declared: its columns. ``budgets`` compare records with each other, and are refused.
      origin: fingerprint of the file's bytes.
      cache: folder of the arrays; default one in the user's cache folder.

    Raises:
      DataError: a stretch of the file cannot be read, or does not fit the declaration; the message names its records.
    """
    if path.suffix.lower() != ".parquet":
        raise UsageError(f"{path.name} is no Parquet file, and only these are mapped: write it as Parquet once.")
    if declared.budgets is not None:
        raise UsageError("budgets need all records in memory: leave them out, or mapped=False.")
    if any(isinstance(column, Image) for column in declared.columns.values()):
        raise UsageError("Pictures are read from a folder, and Parquet files have none: leave out mapped.")
    words = json.dumps([_FORMAT, origin, declared.to_json()], sort_keys=True)
    folder = (cache or cache_folder() / "mapped") / hashlib.sha256(words.encode()).hexdigest()[:32]
    durable.make_folder(folder, private=True, parents=True)
    with durable.lock(folder / ".lock"):
        if not (folder / _META).exists():
            durable.clean(folder)
            _convert(path, declared, folder)
    return replace(_data(folder, declared), origin=origin)


def _convert(path: Path, declared: Declaration, folder: Path) -> None:
    """Write the encoded columns; they count once the names of groups and owners are written, last."""
    with opened(path) as file, ExitStack() as stack:
        parquet, records = parquet_of(file, path)
        if not records:
            raise DataError("There are no records: the table has a header and nothing else.")
        columns: dict[str, _Column] = {}
        names = {"groups": _Names(list(declared.group_names())), "owners": _Names()}
        for first, table in _stretches(parquet, path):
            for name, values in _encoded(declared, table, names, first).items():
                if name not in columns:
                    room = stack.enter_context(durable.writing(folder / f"{name}.npy", durable.PRIVATE))
                    columns[name] = _Column(room, records, values)
                columns[name].add(values)
        if declared.labels and not declared.several and len(columns["targets"].seen) < 2:
            raise DataError(f"All records have the same label in {declared.label!r}: there is nothing to learn.")
        if any(column.written != records for column in columns.values()):
            raise DataError(f"{path.name} ends before its last record: it is damaged.")
    meta = json.dumps({role: known.names for role, known in names.items()})
    durable.write(folder / _META, meta.encode(), durable.PRIVATE)


@dataclass
class _Names:
    """Names that were met, each with a code."""

    names: list[str] = field(default_factory=list)
    _codes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._codes = {name: code for code, name in enumerate(self.names)}

    def codes(self, names: list[str]) -> NDArray[np.int32]:
        for name in dict.fromkeys(names):
            if name not in self._codes:
                self._codes[name] = len(self.names)
                self.names.append(name)
        return np.array([self._codes[name] for name in names], dtype=np.int32)


class _Column:
    """An array on disk that grows by stretches of equal width."""

    def __init__(self, file: BinaryIO, records: int, like: NDArray[Any]) -> None:
        self._file, self._like, self.written = file, like, 0
        self.seen: set[Any] = set()
        shape = (records, *like.shape[1:])
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False, "shape": shape}
        )

    def add(self, values: NDArray[Any]) -> None:
        if values.dtype != self._like.dtype or values.shape[1:] != self._like.shape[1:]:
            raise DataError("Records are encoded in different shapes: declare the length of every column.")
        if values.ndim == 1 and values.dtype.kind == "i" and len(self.seen) < 2:
            self.seen.update(np.unique(values).tolist())
        self._file.write(np.ascontiguousarray(values).data)
        self.written += len(values)


def _stretches(parquet: Any, path: Path) -> Iterator[tuple[int, Table]]:
    """Yield the number of the first record of every stretch, and its cells."""
    first, header = 0, checked_header(parquet.schema_arrow.names)
    batches = parquet.iter_batches(batch_size=STRETCH)
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            cells = cells_of(header, batch.columns, _cells)
        except Exception:  # parsers of damaged bytes fail in many ways
            raise DataError(
                f"{path.name} cannot be read after record {first}: a row group is damaged, or has other columns. "
                "Nothing was spent."
            ) from None
        yield first, Table(cells)
        first += len(batch)


def _cells(column: Any) -> Any:
    """Return the cells of a column: numbers as an array where none is missing."""
    plain = column.null_count == 0 and (str(column.type).startswith(("int", "uint", "float", "double", "halffloat")))
    return column.to_numpy(zero_copy_only=False) if plain else column.to_pylist()


def _encoded(declared: Declaration, table: Table, names: dict[str, _Names], first: int) -> dict[str, NDArray[Any]]:
    """Return the columns of a stretch as they are kept on disk."""
    try:
        inputs = declared.inputs(table).numpy()
        targets = declared.target_codes(table)
        roles = {role: declared.role(table, role) for role in names}
        whose = declared.together(table)
        together = {} if whose is None else {"together": kept_together(whose, len(table)).numpy()}
    except DataError as error:
        last = first + len(table)
        raise DataError(f"Among records {first + 1} to {last} of the file, counted from 1 there: {error}") from None
    codes = {role: names[role].codes(cells) for role, cells in roles.items() if cells is not None}
    return {"inputs": inputs, "targets": targets, **codes, **together}


def _data(folder: Path, declared: Declaration) -> Data:
    """Return the data whose columns are mapped from a folder."""
    known = untrusted.read_json(folder / _META, _NAMES)
    columns = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}
    codes: dict[str, Any] = {role: columns[role] for role in ("groups", "owners") if role in columns}
    labels: Any = list(range(len(declared.labels))) if declared.labels and not declared.several else None
    if declared.several and columns["targets"].ndim == 2:
        labels = list(declared.several)
    names = declared.group_names()
    if "owners" in codes:
        order = np.argsort(np.argsort(np.array(known["owners"])))
        codes["owners"] = order.astype(np.int32)[codes["owners"]]
    data = wrap(
        columns["inputs"],
        columns["targets"],
        labels=labels,
        ordered=declared.ordered,
        group_names=list(range(len(names))) or None,
        **codes,
    )
    facts = data.facts
    if declared.labels and not declared.several:
        facts = replace(facts, labels=tuple(declared.labels))
    if names:
        facts = replace(facts, groups=tuple(names))
    if "owners" in codes:
        by_place = sorted(known["owners"])
        facts = replace(facts, owners=tuple((by_place[int(name)], count) for name, count in facts.owners))
    together = torch.from_numpy(np.array(columns["together"])) if declared.keep_together is not None else None
    return replace(data, facts=facts, declared=declared, together=together, together_by=declared.keep_together or "")
