"""Declared encodings: how a column becomes numbers, from public bounds and categories only.

A record's encoding depends on that record and on what was declared, never on other records, so it costs no privacy.
Messages name columns and declared values; they never contain a cell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.errors import DataError, UsageError

Cells: TypeAlias = Sequence[Any] | NDArray[Any]
"""One value per record; an array may have further dimensions (pixels)."""
Floats: TypeAlias = NDArray[np.float32]

LONGEST = 200
"""Characters of a name."""
LONGEST_TEXT = 2**16
"""Bytes of a text."""
WHY = (
    "taking them from the data would look at private records without paying for it, and there is no charged query "
    "for it yet"
)


@dataclass(frozen=True)
class Number:
    """A numeric column: clipped to declared public bounds and scaled to [-1, 1].

    ``missing``: "refuse" (default), "middle" (the middle of the bounds), or "flag" (the middle, and a second
    feature that is 1 where the value was missing).

    Examples:
      >>> Number(0, 100).encode("age", [0, 50, 300], {""}).tolist()
      [[-1.0], [0.0], [1.0]]
    """

    kind: ClassVar[str] = "number"
    low: float
    high: float
    missing: str = "refuse"

    def __post_init__(self) -> None:
        low, high = _bound(self.low, "low"), _bound(self.high, "high")
        if low >= high:
            raise UsageError(f"low={low:g} is not below high={high:g}: declare the smallest and the largest value.")
        if not math.isfinite(high - low):
            raise UsageError("low and high are too far apart for a number: declare narrower bounds.")
        _choice(self.missing, ("refuse", "middle", "flag"))

    def encode(self, name: str, cells: Cells, missing: set[str]) -> Floats:
        """Return the column as numbers in [-1, 1].

        Arrays keep their shape; plain columns become one feature, or two with ``missing = "flag"``.
        """
        values, absent = numbers(name, cells, missing)
        if absent.any() and self.missing == "refuse":
            raise _absent(name, np.any(absent.reshape(len(absent), -1), axis=1).tolist(), "middle", "flag")
        low, high = float(self.low), float(self.high)
        scaled = 2.0 * ((np.clip(values, low, high) - low) / (high - low)) - 1.0
        scaled = np.where(absent, 0.0, scaled).astype(np.float32)
        if scaled.ndim > 1:
            return scaled
        flags = [absent.astype(np.float32)] if self.missing == "flag" else []
        return np.stack([scaled, *flags], axis=1)

    def decode(self, scaled: NDArray[Any]) -> NDArray[Any]:
        """Return numbers in the unit of the column, from values that are scaled as by ``encode``.

        Examples:
          >>> Number(0, 100).decode(np.array([-1.0, 0.5])).tolist()
          [0.0, 75.0]
        """
        low, high = float(self.low), float(self.high)
        return (scaled + 1.0) / 2.0 * (high - low) + low


@dataclass(frozen=True)
class Category:
    """A column of names: one feature per declared value, 1 where the cell is that value.

    ``other`` names one more category that takes every undeclared value; without it they are refused.
    ``missing``: "refuse" (default), or "category" (a category of its own). ``feature = false`` keeps the column for
    groups or owners only.

    Examples:
      >>> Category(("a", "b"), other="else").encode("c", ["b", "z"], {""}).tolist()
      [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    kind: ClassVar[str] = "category"
    values: Sequence[str]
    other: str | None = None
    missing: str = "refuse"
    feature: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", names(self.values, "values"))
        if not self.values:
            raise UsageError('values is empty: declare the categories, for example values = ["yes", "no"].')
        if self.other is not None:
            if not isinstance(self.other, str):
                raise UsageError('other takes a name, for example other = "other".')
            printable(self.other, "other")
        if len(set(self.names)) != len(self.names):
            raise UsageError("a category is declared twice (values, other, and 'missing' must all differ).")
        _choice(self.missing, ("refuse", "category"))

    @property
    def names(self) -> tuple[str, ...]:
        """All categories, in the order of the features."""
        more = ((self.other,) if self.other is not None else ()) + (("missing",) if self.missing == "category" else ())
        return (*self.values, *more)

    def codes(self, name: str, cells: Cells, missing: set[str], *, label: bool = False) -> list[int]:
        """Return the position in ``names`` of every record's category; ``label`` says that these are labels."""
        index = {value: place for place, value in enumerate(self.values)}
        default = -1 if self.other is None else len(self.values)
        absent = len(self.names) - 1 if self.missing == "category" else -2
        written = [text(cell) for cell in cells]
        codes = [index.get(cell, absent if cell in missing else default) for cell in written]
        if -2 in codes:
            raise _no_label(name) if label else _absent(name, [code == -2 for code in codes], "category")
        if -1 in codes:
            remedy = f'Add it to values, or declare other = "other" in [columns.{name}].'
            if isinstance(cells[codes.index(-1)], bool | np.bool_):
                remedy = f'Truth values are written in lower case: values = ["false", "true"]. {remedy}'
            raise DataError(
                f"Column {name!r}: {codes.count(-1)} record(s), the first being record {codes.index(-1) + 1}, have a "
                f"value that is not declared. {'Add it to labels, or remove them.' if label else remedy}"
            )
        return codes

    def encode(self, name: str, cells: Cells, missing: set[str]) -> Floats:
        """Return one-hot features, one row per record."""
        return np.eye(len(self.names), dtype=np.float32)[self.codes(name, cells, missing)]


@dataclass(frozen=True)
class Image:
    """The pictures of an image folder: declared size, 1 (grey) or 3 (colour) channels, scaled to [-1, 1].

    Pictures of another size are refused unless ``resize`` is true.

    Examples:
      >>> Image(height=28, width=28, channels=1).shape
      (1, 28, 28)
    """

    kind: ClassVar[str] = "image"
    height: int
    width: int
    channels: int = 3
    resize: bool = False

    def __post_init__(self) -> None:
        for name in ("height", "width", "channels"):
            _validate.whole(getattr(self, name), name)
        if self.channels not in (1, 3):
            raise UsageError("channels must be 1 (grey) or 3 (colour).")
        if self.height * self.width > 4096 * 4096:
            raise UsageError("height x width is more than 4096 x 4096: declare a smaller size and resize = true.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    def encode(self, name: str, cells: Cells, missing: set[str]) -> Floats:
        """Return pixels in [-1, 1], shaped (records, channels, height, width)."""
        return Number(0, 255).encode(name, cells, missing)


@dataclass(frozen=True)
class Text:
    """A column of texts: the bytes of each in UTF-8, cut at a declared length and padded with 0 at the end.

    It is the only feature of its data, for ``--features minilm`` or a model that reads codes; a missing text is empty.

    Examples:
      >>> Text(length=4).encode("words", ["ok", None, "longer"], {""}).tolist()
      [[111, 107, 0, 0], [0, 0, 0, 0], [108, 111, 110, 103]]
    """

    kind: ClassVar[str] = "text"
    length: int

    def __post_init__(self) -> None:
        if _validate.whole(self.length, "length") > LONGEST_TEXT:
            raise UsageError(f"length is more than {LONGEST_TEXT} bytes: declare how much of a text is enough.")

    def encode(self, name: str, cells: Cells, missing: set[str]) -> NDArray[np.int64]:
        """Return one row of codes from 0 to 255 per record."""
        rows = np.zeros((len(cells), self.length), dtype=np.int64)
        for row, cell in zip(rows, cells, strict=True):
            content = text(cell).replace("\0", "").encode("utf-8", "ignore")[: self.length]
            row[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return rows


Column: TypeAlias = Number | Category | Image | Text
_KINDS: dict[str, type[Column]] = {"number": Number, "category": Category, "image": Image, "text": Text}
_EXAMPLES = {
    "number": "low = 0 and high = 100",
    "category": 'values = ["yes", "no"]',
    "image": "height = 28 and width = 28",
    "text": "length = 256",
}


def declared(name: str, table: Any) -> Column:
    """Return the column that a TOML table ``[columns.NAME]`` declares.

    Examples:
      >>> declared("age", {"kind": "number", "low": 0, "high": 120})
      Number(low=0, high=120, missing='refuse')
    """
    if isinstance(table, Number | Category | Image | Text):
        return table
    where = f"[columns.{printable(str(name), 'columns')}]"
    if not isinstance(table, Mapping):
        raise UsageError(f'{where} must be a table, for example {where} kind = "number" low = 0 high = 100.')
    settings = dict(table)
    kind = settings.pop("kind", None)
    if kind is None:
        raise UsageError(
            f'{where} has no kind: type kind = "number" or kind = "category", or delete the table to leave it out.'
        )
    column_class = _KINDS[_validate.known(str(kind), _KINDS, f"kind of column in {where}")]
    fields = {field.name: field for field in dataclasses.fields(column_class)}
    for key, value in settings.items():
        _validate.known(key, fields, f"setting of {where}")
        if isinstance(value, str) and " ".join(value.lower().split()) == "from data":
            raise UsageError(
                f'{where}: {key} = "from data" is refused: {WHY}. Declare what is publicly known: {_EXAMPLES[kind]}.'
            )
    lacking = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in settings]
    if lacking:
        raise UsageError(
            f"{where}: {' and '.join(lacking)} not declared; {WHY}. Type what is publicly known, for example "
            f"{_EXAMPLES[kind]}."
        )
    for key, value in settings.items():
        if str(fields[key].type) == "bool" and not isinstance(value, bool):
            raise UsageError(f"{where}: {key} takes true or false, not {type(value).__name__}.")
    try:
        return column_class(**settings)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def as_table(column: Column) -> dict[str, Any]:
    """Return the TOML table of a column; ``declared`` reads it back."""
    settings = {key: value for key, value in dataclasses.asdict(column).items() if value is not None}
    return {"kind": column.kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in settings.items()}}


def names(values: Any, what: str) -> tuple[str, ...]:
    """Return declared names as text; whole numbers are names too, so that labels = [0, 1] works."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UsageError(f'{what} takes a list of names, for example {what} = ["yes", "no"].')
    if not all(isinstance(value, str | int) for value in values):
        raise UsageError(f"{what} takes names or whole numbers only.")
    return tuple(printable(text(value), what) for value in values)


def printable(name: str, what: str) -> str:
    """Return a declared name; refuse one that is too long or that a terminal or page would not show as it is.

    Examples:
      >>> printable("north", "values")
      'north'
    """
    if len(name) > LONGEST or not name.isprintable():
        raise UsageError(f"{what}: a name holds control characters or has more than {LONGEST} characters: shorten it.")
    return name


def text(cell: Any) -> str:
    """Return a cell as the text that categories and labels are compared with.

    Examples:
      >>> text(1.0), text(True), text(None), text(" a ")
      ('1', 'true', '', 'a')
    """
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, bool | np.bool_):
        return "true" if cell else "false"
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


def numbers(name: str, cells: Cells, missing: set[str]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the column as floats, and a mask of the missing cells; refuse other cells that are not finite numbers."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "fiu":
        values = cells.astype(np.float32 if cells.dtype.itemsize <= 2 and cells.ndim > 1 else np.float64)
        absent = np.isnan(values) & (values.ndim == 1)
    else:
        parsed = [_number(cell, missing) for cell in cells]
        bad = [place for place, value in enumerate(parsed) if value is None]
        if bad:
            raise _not_number(name, len(bad), bad[0])
        values = np.array([math.nan if value is None else value for value in parsed], dtype=np.float64)
        absent = np.isnan(values)
    if not np.isfinite(np.where(absent, 0.0, values)).all():
        wrong = ~np.isfinite(np.where(absent, 0.0, values)).reshape(len(values), -1).all(1)
        raise _not_number(name, int(wrong.sum()), int(wrong.argmax()))
    return values, absent


def _number(cell: Any, missing: set[str]) -> float | None:
    """Return a cell as a float, NaN if it is missing, None if it is no number.

    Infinities are returned as they are; Python's 1_000 is not taken for a number.
    """
    written = text(cell)
    if written in missing:
        return math.nan
    try:
        value = float(written) if "_" not in written else math.nan
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _not_number(name: str, count: int, first: int) -> DataError:
    return DataError(
        f"Column {name!r}: {count} record(s), the first being record {first + 1}, have no finite number. Write numbers "
        "as 1234.5 (no thousands separators, no units, no NaN or inf); name what stands for a missing value in "
        'missing_tokens, or declare the column as kind = "category".'
    )


def _absent(name: str, absent: Sequence[bool], *choices: str) -> DataError:
    options = " or ".join(f'missing = "{choice}"' for choice in choices)
    return DataError(
        f"Column {name!r}: {sum(absent)} record(s), the first being record {absent.index(True) + 1}, have no value: "
        f"choose {options} in [columns.{name}], or remove them."
    )


def _no_label(name: str) -> DataError:
    return DataError(f"Column {name!r}, the label, has missing values: remove the records that have no label.")


def _bound(value: Any, name: str) -> float:
    try:
        return _validate.number(value, name, low=-math.inf)
    except OverflowError:
        raise UsageError(f"{name} is too large for a number: declare a finite bound.") from None


def _choice(value: Any, options: tuple[str, ...]) -> None:
    if value not in options:
        raise UsageError(f"missing takes {' or '.join(repr(option) for option in options)}.")
