"""Whether a first line names columns or is somebody's record, and what may be printed of it.

The first line of a file without a header is a record. So names that come from a file are printed only if the person
declared them, or says that the first line names the columns, or declared at least two that stand there: then the rest
of that line are names too. Parquet and NPZ files are treated alike, since they are often made of such a table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from evenhand import _validate
from evenhand.errors import DataError

HINT = (
    "Names that you did not declare are not printed, since they may be a record: if the first line of the file is one, "
    "the header is missing; put a line with the names of the columns above it"
)
ENOUGH = 2
"""Declared names in the first line from which on it is believed to be a header."""
_WORDS = frozenset(("yes", "no", "true", "false", "none", "null", "nan", "na", "n/a", "?", "inf", "unknown"))
_NUMBER = re.compile(r"[^A-Za-z]*\d[^A-Za-z]*(?:e[+-]?\d+)?\Z", re.IGNORECASE)
_CODE = re.compile(r"\S*\d{5}\S*\Z|[0-9a-f]{8}-[0-9a-f-]{20,}\Z", re.IGNORECASE)


def believed(header: Iterable[str], declared: Iterable[str | None]) -> bool:
    """Return whether enough of what was declared stands in the first line for it to be a header.

    Examples:
      >>> believed(["age", "sex", "ill"], ["ill", "age"]), believed(["37", "f", "ill"], ["ill", None])
      (True, False)
    """
    return len(set(header) & {name for name in declared if name is not None}) >= ENOUGH


def refuse_record(header: Sequence[str]) -> None:
    """Refuse a first line that looks like a record: numbers, dates, addresses, answers. Numbers that count are names.

    Examples:
      >>> refuse_record(["age", "hours per week", "x1"]), refuse_record(["0", "1", "2", "label"])
      (None, None)
      >>> try: refuse_record(["age", "anna@example.org"])
      ... except DataError as error: print(str(error)[:68])
      The first line looks like a record, not like a header: the name of c
    """
    numbers = [name for name in header if name.isdecimal()]
    counting = len(numbers) > 1 and numbers in ([str(i + first) for i in range(len(numbers))] for first in (0, 1))
    for place, name in enumerate(header, 1):
        if looks_like_value(name) and not (counting and name.isdecimal()):
            raise DataError(
                f"The first line looks like a record, not like a header: the name of column {place} looks like a "
                "value. Put a line with the names of the columns above it; or say that it names them: --header."
            )


def looks_like_value(name: str) -> bool:
    """Return whether a name is rather a value: a number, a date, an address, an answer, a long code.

    Examples:
      >>> [looks_like_value(name) for name in ("37", "2024-01-31", "a@b.org", "yes", "1e308", "AB123456")]
      [True, True, True, True, True, True]
      >>> [looks_like_value(name) for name in ("age", "x1", "height_cm", "sha256", "Größe", "pm2.5")]
      [False, False, False, False, False, False]
    """
    return "@" in name or name.lower() in _WORDS or bool(_NUMBER.match(name) or _CODE.match(name))


def no_column(name: str, header: Sequence[str], declared: Iterable[str | None] = ()) -> DataError:
    """Return what to say when a column is not there: a name like it where the header is believed, else how many.

    Examples:
      >>> print(no_column("il", ["age", "ill"], ["age", "ill"]))
      There is no column called 'il'. Did you mean 'ill'?
      >>> print(str(no_column("il", ["37", "f"]))[:57])
      There is no column called 'il' among the 2 of the file. N
    """
    near = difflib.get_close_matches(name[: _validate.SHOWN], header, n=1) if believed(header, declared) else []
    if near:
        return DataError(f"There is no column called {_validate.shown(name)}. Did you mean {near[0]!r}?")
    return DataError(
        f"There is no column called {_validate.shown(name)} among the {len(header)} of the file. {HINT}. Or name the "
        'delimiter, if it is not a comma: delimiter = ";".'
    )
