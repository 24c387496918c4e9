"""Files as tables: CSV, Parquet, NPZ. Strict, size-limited before loading, and silent about what the cells say."""

from __future__ import annotations

import csv
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from evenhand import _validate
from evenhand.data.columns import Cells
from evenhand.data.tables import Table, checked_header
from evenhand.errors import DataError, UsageError

LIMIT = 2 * 2**30
"""Bytes that a file may take in memory: a bomb is refused by its declared size, before anything is unpacked."""
SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
_ROW_NUMBERS = re.compile(r"__index_level_\d+__")
"""Names of columns that pandas writes, and that nobody made."""


def is_path(name: str) -> bool:
    """Return whether ``--data`` names a file or folder rather than a built-in source.

    Examples:
      >>> is_path("digits"), is_path("people.csv"), is_path("scans/")
      (False, True, True)
    """
    return "/" in name or "\\" in name or Path(name).suffix != "" or os.path.exists(name)


def header(path: Path, *, delimiter: str = ",") -> list[str]:
    r"""Return the column names of a file; no value is read.

    Examples:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "people.csv"
      >>> _ = file.write_text("age,sex\n31,f\n")
      >>> header(file)
      ['age', 'sex']
    """
    _, names = _format(path)
    return names(path, delimiter)


def read(path: Path, *, delimiter: str = ",") -> Table:
    """Return a whole file as a table."""
    table, _ = _format(path)
    return table(path, delimiter)


def read_csv(path: Path, delimiter: str) -> Table:
    """Read UTF-8 text with a header line; every line must have as many fields. Space around cells is ignored."""
    rows = csv.reader(io.StringIO(_text(_bytes(path), path), newline=""), **_dialect(path, delimiter))
    names, records = None, []
    try:
        for row in rows:
            if names is None:
                names = checked_header(row)
            elif len(row) == len(names):
                records.append(row)
            elif row:
                raise DataError(
                    f"{path.name}, line {rows.line_num}: {len(row)} fields where the header has {len(names)}. Quote "
                    'cells that contain the delimiter, or name the right one: delimiter = ";".'
                )
    except csv.Error:
        raise _malformed(path, rows.line_num) from None
    if names is None:
        raise DataError(f"{path.name} is empty: the first line must name the columns.")
    columns: list[Any] = list(zip(*records, strict=True)) or [() for _ in names]
    return Table(dict(zip(names, columns, strict=True)))


def lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file; empty ones at its end do not count."""
    return _text(_bytes(path), path).rstrip("\r\n").splitlines()


def csv_header(path: Path, delimiter: str) -> list[str]:
    """Return the names in the first line of a CSV file."""
    with opened(path) as file:
        start = file.read(2**20)
    line = _text(start.partition(b"\n")[0].rstrip(b"\r"), path)
    try:
        first = next(csv.reader([line], **_dialect(path, delimiter)), [])
    except csv.Error:
        raise _malformed(path, 1) from None
    if not first:
        raise DataError(f"{path.name} is empty: the first line must name the columns.")
    return checked_header(first)


def read_npz(path: Path, delimiter: str) -> Table:
    """Read one array per column, the first dimension being the record. Pickled objects are never loaded."""
    return Table({name: _plain(array) for name, array in arrays(path).items()})


def arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of an NPZ file by name; they may have different lengths."""
    with opened(path) as file, _archive(file, path) as archive:
        members = _members(archive, path)
        columns = {}
        for place, (name, member) in enumerate(members.items(), 1):
            shape, dtype = _array_header(archive, member, path)
            if not shape or dtype.hasobject or dtype.kind not in "fiubUS":
                raise DataError(
                    f"{path.name}: array {place} does not hold one number or text per record (Python objects are "
                    "never loaded, since unpickling executes code). Save plain arrays: np.savez(file, x=x, y=y)."
                )
            limited(max(int(np.prod(shape, dtype=object)), 0) * dtype.itemsize, path)
            try:
                with archive.open(member) as stream:
                    columns[name] = np.lib.format.read_array(stream, allow_pickle=False)
            except Exception:  # parsers of damaged bytes fail in many ways
                raise _garbage(path, "NPZ") from None
    return columns


def npz_header(path: Path, delimiter: str) -> list[str]:
    """Return the names of the arrays."""
    with opened(path) as file, _archive(file, path) as archive:
        return list(_members(archive, path))


def read_parquet(path: Path, delimiter: str) -> Table:
    """Read a Parquet file: numbers, text and booleans; a column of another kind is refused where it is used."""
    with opened(path) as file:
        parquet, _ = parquet_of(file, path)
        limited(_parquet_size(parquet), path)
        header = checked_header(parquet.schema_arrow.names)
        try:
            table = parquet.read()
            columns = cells_of(header, table.columns, lambda column: column.to_pylist())
        except Exception:  # parsers of damaged bytes fail in many ways
            raise _garbage(path, "Parquet") from None
    return Table(columns)


def parquet_of(file: IO[bytes], path: Path) -> tuple[Any, int]:
    """Return an opened Parquet file, and the number of its records; none is read."""
    parquet, _ = _parquet(file, path)
    return parquet, int(parquet.metadata.num_rows)


def cells_of(header: Sequence[str], columns: Iterable[Any], cells: Callable[[Any], Any]) -> dict[str, Cells]:
    """Return the columns of a Parquet file by name, without the row numbers that pandas writes of a filtered frame."""
    return {
        name: cells(column) if _plain_kind(column.type) else Unreadable(name, str(column.type), len(column))
        for name, column in zip(header, columns, strict=True)
        if not _ROW_NUMBERS.fullmatch(name)
    }


@dataclass(frozen=True)
class Unreadable(Sequence[Any]):
    """A column of dates, lists or the like. It may lie in a file; whoever reads a cell gets a DataError.

    Examples:
      >>> Unreadable("visit", "timestamp[ns]", 3)[0]
      Traceback (most recent call last):
      ...
      evenhand.errors.DataError: Column 'visit' has neither numbers nor text (timestamp[ns]): convert it first, ...
    """

    name: str
    kind: str
    records: int

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, place: Any) -> Any:
        raise DataError(
            f"Column {_validate.shown(self.name)} has neither numbers nor text ({self.kind}): convert it first, a date "
            "to a number of days for example, or leave it out."
        )


def is_large(path: Path) -> bool:
    """Return whether a Parquet file would take more memory than a file may, so that it is mapped instead."""
    if path.suffix.lower() != ".parquet":
        return False
    with opened(path) as file:
        return _parquet_size(_parquet(file, path)[0]) > LIMIT


def _parquet_size(parquet: Any) -> int:
    """Return how many bytes a Parquet file takes in memory, at least."""
    meta = parquet.metadata
    size = sum(meta.row_group(index).total_byte_size for index in range(meta.num_row_groups))
    return max(int(size), 8 * int(meta.num_rows) * int(meta.num_columns))


def parquet_header(path: Path, delimiter: str) -> list[str]:
    """Return the column names of the schema."""
    with opened(path) as file:
        return [name for name in checked_header(_parquet(file, path)[1].names) if not _ROW_NUMBERS.fullmatch(name)]


_FORMATS: dict[str, tuple[Callable[[Path, str], Table], Callable[[Path, str], list[str]]]] = {
    ".csv": (read_csv, csv_header),
    ".tsv": (read_csv, csv_header),
    ".npz": (read_npz, npz_header),
    ".parquet": (read_parquet, parquet_header),
}


def _format(path: Path) -> tuple[Callable[[Path, str], Table], Callable[[Path, str], list[str]]]:
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path.name} is none of {', '.join(SUFFIXES)} and not an image folder: convert it first.")
    return _FORMATS[path.suffix.lower()]


def opened(path: Path) -> IO[bytes]:
    """Open an ordinary file for reading; refuse pipes and devices, which could block or never end."""
    if "\0" in str(path):
        raise UsageError("A file name cannot hold a NUL character.")
    try:
        if os.path.exists(path) and not path.is_file():
            raise DataError(f"{path} is not an ordinary file: give the file itself.")
        return path.open("rb")
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from None


def _bytes(path: Path) -> bytes:
    with opened(path) as file:
        limited(path.stat().st_size, path)
        return file.read()


def _text(data: bytes, path: Path) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path.name} is UTF-16: save it as UTF-8 (in a spreadsheet: CSV UTF-8).")
    if b"\0" in data:
        raise DataError(f"{path.name} holds NUL bytes: it is not a text file, or not UTF-8. Save it as CSV in UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    raise DataError(f"{path.name} is not UTF-8 (first on line {line}): save it as UTF-8, for example iconv -t UTF-8.")


def _dialect(path: Path, delimiter: str) -> dict[str, Any]:
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise UsageError("delimiter takes one character, for example ';'.")
    return {"delimiter": "\t" if path.suffix.lower() == ".tsv" else delimiter, "strict": True, "skipinitialspace": True}


def _malformed(path: Path, line: int) -> DataError:
    return DataError(
        f"{path.name}, near line {line}: a quoted cell is not closed, is followed by other text, or is too long. Write "
        'a quote inside a quoted cell twice: "".'
    )


def _garbage(path: Path, kind: str) -> DataError:
    return DataError(f"{path.name} is not a readable {kind} file: it is damaged, or another kind of file.")


def limited(size: int, path: Path) -> None:
    """Raise DataError if a file would take more than ``LIMIT`` bytes in memory, before it is unpacked."""
    if size > LIMIT:
        raise DataError(
            f"{path.name} would take {size / 2**30:.1f} GiB in memory; the limit is {LIMIT / 2**30:.3g} GiB. It was "
            "not unpacked. Write it as Parquet, which eh.data.read maps into memory, or pass a torch Dataset in Python."
        )


def _archive(file: IO[bytes], path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except Exception:  # parsers of damaged bytes fail in many ways
        raise _garbage(path, "NPZ") from None


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    entries = archive.infolist()
    limited(sum(entry.file_size for entry in entries), path)
    if any("/" in entry.filename or "\\" in entry.filename for entry in entries):
        raise DataError(f"{path.name}: an array is named like a path. Save plain arrays: np.savez(file, x=x, y=y).")
    names = checked_header([entry.filename.removesuffix(".npy") for entry in entries])
    return dict(zip(names, entries, strict=True))


def _array_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> tuple[tuple[int, ...], Any]:
    try:
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = reader(stream)
            return shape, dtype
    except Exception:  # parsers of damaged bytes fail in many ways
        raise _garbage(path, "NPZ") from None


def _plain(array: Any) -> Any:
    """Return text arrays as lists, others as they are; bytes that are not UTF-8 are marked."""
    if array.dtype.kind == "S":
        return [cell.decode("utf-8", "replace") for cell in array.tolist()]
    return array.tolist() if array.dtype.kind in "Ub" else array


def _parquet(file: IO[bytes], path: Path) -> tuple[Any, Any]:
    """Return the opened file and its schema."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("Parquet files need pyarrow: pip install 'evenhand[files]'.") from None
    try:
        opened = pq.ParquetFile(file)
        return opened, opened.schema_arrow
    except Exception:  # parsers of damaged bytes fail in many ways
        raise _garbage(path, "Parquet") from None


def _plain_kind(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(inner) for test in (*tests, types.is_decimal, types.is_null))
