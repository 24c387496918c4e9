"""Tables: columns of cells, what is declared about them, and the tensors that follow from both."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand import _validate
from evenhand.data.columns import WHY, Category, Cells, Column, Number, Text, as_table, declared, names, text
from evenhand.data.dataset import Data, wrap
from evenhand.errors import DataError, UsageError

SCHEMA = 1
INJECTION = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a cell that starts with one of these for a formula."""


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, before anything is done with them.

    Examples:
      >>> len(Table({"age": ["31", "58"]}))
      2
    """

    columns: Mapping[str, Cells]

    def __post_init__(self) -> None:
        if len({len(cells) for cells in self.columns.values()}) > 1:
            raise DataError("The columns have different lengths: every record needs one value in each.")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def cells(self, name: str, declared: Iterable[str | None] = ()) -> Cells:
        """Return one column; raise DataError if it is absent.

        The names ``declared`` besides it tell whether the message may print names of the header.
        """
        if name not in self.columns:
            raise no_column(name, list(self.columns), declared)
        return self.columns[name]


@dataclass(frozen=True)
class Declaration:
    """Public facts about a table: all that encoding uses.

    Attributes:
      columns: the features by column name; a column that is not named here is left out.
      label: the column to predict; several columns, separated by commas, where a record may have several labels.
      labels: its values; of several columns the two values "no" and "yes" of each. None for a real number: the label is
        then declared in ``columns``, with public bounds.
      groups: the column whose values are reported on; the label, or a declared category. Several columns, separated by
        commas, make intersections: "race = A, sex = f".
      owners: the column of budget classes, likewise.
      budgets: the column with each record's own epsilon, instead of owners; its values become public facts.
      missing_tokens: cells that mean "no value".
      ordered: the labels have an order, from the lowest to the highest.
      keep_together: the column whose equal values, such as a person's, are on one side of every split.

    Examples:
      >>> from evenhand.data.columns import Number
      >>> known = Declaration({"age": Number(0, 100)}, label="ill", labels=("no", "yes"))
      >>> data = known.data(Table({"age": ["25", "75"], "ill": ["no", "yes"]}))
      >>> data.facts.labels, data.fetch(torch.arange(2))[0].tolist()
      (('no', 'yes'), [[-0.5], [0.5]])
    """

    columns: Mapping[str, Column]
    label: str
    labels: Sequence[str]
    groups: str | None = None
    owners: str | None = None
    missing_tokens: Sequence[str] = field(default=("",))
    budgets: str | None = None
    ordered: bool = False
    keep_together: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", names(self.labels, "labels"))
        object.__setattr__(self, "missing_tokens", names(self.missing_tokens, "missing_tokens"))
        self._check_labels()
        if not self.features:
            raise UsageError("No column is declared as a feature: add [columns.NAME] tables, see `evenhand init`.")
        if len(self.features) > 1 and any(isinstance(column, Text) for column in self.features.values()):
            raise UsageError(
                "A text column must be the only feature, since codes of letters and scaled numbers do not mix: delete "
                "the other tables of [columns], or set feature = false where a category is for groups or owners."
            )
        for role in ("groups", "owners"):
            self._names(role, getattr(self, role))
        if self.owners is not None and self.budgets is not None:
            raise UsageError("Declare owners, or budgets by record: with both a record would have two budgets.")
        if self.keep_together is not None and self.keep_together in self.features:
            raise UsageError(
                f"The column {self.keep_together!r} says who is kept together, and is declared as a feature too: "
                f"delete [columns.{self.keep_together}], or the model learns who is who."
            )

    def _check_labels(self) -> None:
        """Raise unless the label is declared: by its values, or by the bounds of a real number."""
        if not self.labels and isinstance(self.columns.get(self.label), Number):
            if self.ordered:
                raise UsageError("ordered is for labels with names; a real number has its order: leave it out.")
            return
        if len(self.labels) < 2 or len(set(self.labels)) != len(self.labels):
            raise UsageError(
                'Declare at least two different labels, for example labels = ["no", "yes"]; or, if the label is a real '
                f'number, its public bounds: [columns.{self.label}] kind = "number" low = 0 high = 100.'
            )
        several = self.several
        if several and (len(self.labels) != 2 or self.ordered or len(set(several)) != len(several)):
            raise UsageError(
                "With several label columns, labels are the two values of each, without an order: for example "
                'label = "edema,effusion" and labels = ["0", "1"], where the second says that a record has it.'
            )
        if any(name in self.columns for name in (self.label, *several)):
            raise UsageError(
                f"The label {self.label!r} is also declared in [columns]: delete that table, or the model would be "
                "given the answer."
            )

    @property
    def several(self) -> tuple[str, ...]:
        """Return the label columns, where a record may have several labels; else nothing."""
        parts = tuple(part.strip() for part in self.label.split(","))
        return parts if len(parts) > 1 and all(parts) else ()

    @property
    def target(self) -> Number | None:
        """Return the bounds of the label, where it is a real number."""
        column = self.columns.get(self.label)
        return column if not self.labels and isinstance(column, Number) else None

    @property
    def features(self) -> dict[str, Column]:
        """The columns that the model sees."""
        return {
            name: column
            for name, column in self.columns.items()
            if name != self.label and not (isinstance(column, Category) and not column.feature)
        }

    def inputs(self, table: Table) -> Tensor:
        """Return the inputs of the model: features side by side; a single array or picture column keeps its shape."""
        if len(table) == 0:
            raise DataError("There are no records: the table has a header and nothing else.")
        missing = set(self.missing_tokens)
        parts = [column.encode(name, table.cells(name, self._named), missing) for name, column in self.features.items()]
        if len(parts) == 1:
            return torch.from_numpy(np.ascontiguousarray(parts[0]))
        return torch.from_numpy(np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1))

    def data(self, table: Table) -> Data:
        """Return inputs, labels, groups and owners of every record."""
        inputs = self.inputs(table)
        targets, labels = self._targets(table)
        data = wrap(
            inputs,
            targets,
            labels=labels,
            ordered=self.ordered,
            groups=self._role(table, "groups", self.groups),
            group_names=self.group_names() or None,
            owners=self._budgets(table) or self._role(table, "owners", self.owners),
            keep_together=self.together(table),
        )
        return replace(data, declared=self, together_by=self.keep_together or "")

    def together(self, table: Table) -> list[str] | None:
        """Return the name by which every record is kept together, "" where it is missing; None if no column has it."""
        if self.keep_together is None:
            return None
        missing = set(self.missing_tokens)
        names = [text(cell) for cell in table.cells(self.keep_together, self._named)]
        return ["" if name in missing else name for name in names]

    def _targets(self, table: Table) -> tuple[Any, Sequence[str] | None]:
        """Return the targets of every record, and the labels: of one column, of several, or of a real number none."""
        missing = set(self.missing_tokens)
        if self.target is not None:
            if self.target.missing != "refuse":
                raise UsageError(f"The label {self.label!r} cannot be missing: leave missing out of its declaration.")
            return self.target.encode(self.label, table.cells(self.label, self._named), missing)[:, 0], None
        if self.several and self.label not in table.columns:
            codes = [
                Category(self.labels).codes(name, table.cells(name, self._named), missing, label=True)
                for name in self.several
            ]
            return np.array(codes, dtype=np.float32).T, self.several
        label = Category(self.labels).codes(self.label, table.cells(self.label, self._named), missing, label=True)
        if len(set(label)) < 2:
            raise DataError(f"All records have the same label in {self.label!r}: there is nothing to learn.")
        return [self.labels[code] for code in label], self.labels

    def target_codes(self, table: Table) -> NDArray[Any]:
        """Return the targets of some of the records as numbers: codes of labels, columns of 0 and 1, real numbers."""
        if self.target is not None or (self.several and self.label not in table.columns):
            return np.asarray(self._targets(table)[0], dtype=np.float32)
        cells = table.cells(self.label, self._named)
        codes = Category(self.labels).codes(self.label, cells, set(self.missing_tokens), label=True)
        return np.array(codes, dtype=np.int32)

    def role(self, table: Table, role: str) -> list[str] | None:
        """Return the name of every record in a role ("groups", "owners"); None if no column has it."""
        return self._role(table, role, getattr(self, role))

    def group_names(self) -> tuple[str, ...]:
        """Return the declared names of groups; none if there are no groups."""
        return self._names("groups", self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return the public description that a run stores to encode new records like the training records."""
        return {
            "schema": SCHEMA,
            "label": self.label,
            "labels": list(self.labels),
            "groups": self.groups,
            "owners": self.owners,
            "budgets": self.budgets,
            "missing_tokens": list(self.missing_tokens),
            "columns": {name: as_table(column) for name, column in self.columns.items()},
            **({"ordered": True} if self.ordered else {}),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Declaration:
        """Return the declaration that ``to_json`` wrote."""
        if values.get("schema") != SCHEMA:
            raise UsageError("This preprocessing was written by another version of evenhand: use that version.")
        columns = {name: declared(name, table) for name, table in values["columns"].items()}
        rest = {key: value for key, value in values.items() if key not in ("schema", "columns", "code")}
        return cls(columns=columns, **rest)

    @property
    def _named(self) -> tuple[str, ...]:
        """All columns that are declared."""
        return (*(self.several or (self.label,)), *self.columns)

    def _parts(self, name: str) -> tuple[str, ...]:
        """Return the columns of a role, where it names several; else nothing."""
        parts = tuple(dict.fromkeys(part.strip() for part in name.split(",") if part.strip()))
        return parts if len(parts) > 1 and name != self.label and name not in self.columns else ()

    def _role(self, table: Table, role: str, name: str | None) -> list[str] | None:
        if name is None:
            return None
        parts = self._parts(name)
        if parts:
            columns = [self._role(table, role, part) or [] for part in parts]
            return [_joined(parts, cells) for cells in zip(*columns, strict=True)]
        known = self._names(role, name)
        if name == self.label:
            return [text(cell) for cell in table.cells(name)]
        column = self.columns[name]
        assert isinstance(column, Category)
        return [known[code] for code in column.codes(name, table.cells(name), set(self.missing_tokens))]

    def _budgets(self, table: Table) -> list[str] | None:
        """Return the owner class of every record by its own epsilon, if a column holds one."""
        if self.budgets is None:
            return None
        if self.budgets not in table.columns:
            raise DataError(
                f"--budgets {self.budgets}: there is no such column. Pass NAME=NUMBER,NAME=NUMBER, a .toml file of "
                "them, or a column or file with one epsilon per record."
            )
        return _validate.epsilon_names(table.cells(self.budgets))

    def _names(self, role: str, name: str | None) -> tuple[str, ...]:
        if name is None:
            return ()
        parts = self._parts(name)
        if parts:
            combined = itertools.product(*(self._names(role, part) for part in parts))
            return tuple(_joined(parts, cells) for cells in combined)
        if name == self.label and self.labels and not self.several:
            return tuple(self.labels)
        column = self.columns.get(name)
        near = difflib.get_close_matches(name[: _validate.SHOWN], self._named, n=1) if column is None else []
        if near:
            raise UsageError(f"There is no column called {_validate.shown(name)} for {role}. Did you mean {near[0]!r}?")
        if not isinstance(column, Category):
            raise UsageError(
                f"The column {name!r} is used for {role} but its names are not declared; {WHY}. Type "
                f'[columns.{name}] kind = "category" values = ["...", "..."], with feature = false if the model must '
                "not see it."
            )
        return column.names


def _joined(columns: Sequence[str], cells: Sequence[str]) -> str:
    """Return the name of an intersection of groups.

    Examples:
      >>> _joined(("race", "sex"), ("A", "f"))
      'race = A, sex = f'
    """
    return ", ".join(f"{column} = {cell}" for column, cell in zip(columns, cells, strict=True))


def checked_header(header: Iterable[str]) -> list[str]:
    """Return column names without surrounding space; refuse empty, repeated or dangerous ones.

    Examples:
      >>> checked_header([" age", "sex"])
      ['age', 'sex']
    """
    names = [name.strip() for name in header]
    if not names:
        raise DataError("There is no header: the first line must name the columns.")
    if "" in names:
        raise DataError(f"Column {names.index('') + 1} has no name: the first line must name every column.")
    first = {name: place for place, name in reversed(list(enumerate(names, 1)))}
    for place, name in enumerate(names, 1):
        if first[name] != place:
            raise DataError(f"Columns {first[name]} and {place} have the same name: give each its own. {HINT}.")
    for place, name in enumerate(names, 1):
        if name.startswith(INJECTION) or not name.isprintable() or len(name) > 200:
            raise DataError(
                f"The name of column {place} starts like a spreadsheet formula (= + - @), holds control characters or "
                "is longer than 200: rename it. If the file has no header, add one."
            )
    return names


def split(data: Data, share: float, seed: int) -> tuple[Data, Data]:
    """Divide the rows into training and held-out ones; each row's side depends on the seed and its number only.

    Rows to be kept together are on the same side, and ``share`` is then that of their names: their number is that in
    which their name first appears, so that one name more, at the end, changes no other's side. Persons are divided too;
    those held out are given record by record.

    Examples:
      >>> train, test = split(wrap(torch.zeros(100, 2), [0, 1] * 50), share=0.2, seed=0)
      >>> len(train) + len(test)
      100
    """
    units = np.arange(len(data))
    if data.together is not None:
        _, first, units = np.unique(data.together.numpy(), return_index=True, return_inverse=True)
        units = np.argsort(np.argsort(first))[units]
    mask = (np.random.default_rng([seed, 20]).random(int(units.max()) + 1) < share)[units]
    if mask.all() or not mask.any():
        raise DataError(
            f"With {len(data)} record(s), a test share of {share:g} leaves no record to train or to test on: "
            "change test_share, or give test_data."
        )
    rest = data.take(torch.from_numpy(np.flatnonzero(mask)))
    return data.take(torch.from_numpy(np.flatnonzero(~mask))), rest.by_record


def guarded(cell: str) -> str:
    """Return a text cell that no spreadsheet runs as a formula; plain numbers stay as they are.

    Examples:
      >>> guarded("=1+1"), guarded("-5"), guarded("plain")
      ("'=1+1", '-5', 'plain')
    """
    if not cell.startswith(INJECTION):
        return cell
    try:
        float(cell)
    except ValueError:
        return "'" + cell
    return cell if cell[0] in "+-" else "'" + cell


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
    """Return whether the first line holds enough declared names to be a header.

    Examples:
      >>> believed(["age", "sex", "ill"], ["ill", "age"]), believed(["37", "f", "ill"], ["ill", None])
      (True, False)
    """
    return len(set(header) & {name for name in declared if name is not None}) >= ENOUGH


def refuse_record(header: Sequence[str]) -> None:
    """Raise DataError if a first line looks like a record: numbers, dates, addresses, answers.

    Numbers that count from 0 or 1 are taken for names.

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
    """Return the error for an absent column: with a similar name if the header is believed, else with their number.

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
