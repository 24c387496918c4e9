"""Wraps a DataFrame (pandas or polars) by the names of its columns, from declared bounds and categories."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from evenhand import _validate
from evenhand.data.arrays import UNDECLARED
from evenhand.data.columns import Category, Column, Number, declared, text
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import of_table
from evenhand.data.owners_and_groups import grouped
from evenhand.data.tables import Declaration, Table, checked_header
from evenhand.errors import DataError, UsageError


def is_frame(data: Any) -> TypeGuard[Any]:
    """Return whether these are named columns: a DataFrame of pandas or polars, or a Table.

    Examples:
      >>> is_frame(Table({"age": [1]})), is_frame([1, 2])
      (True, False)
    """
    return isinstance(data, Table) or (hasattr(data, "columns") and hasattr(data, "__getitem__"))


def wrap_frame(
    frame: Any,
    label: str,
    *,
    labels: Sequence[Any] | None = None,
    groups: Any = None,
    owners: str | None = None,
    numbers: Mapping[str, Any] | None = None,
    categories: Mapping[str, Any] | None = None,
    missing_tokens: Sequence[str] = ("",),
    keep_together: str | None = None,
) -> Data:
    """Return the records of a DataFrame, encoded by what is declared about its columns.

    Args:
      frame: a DataFrame, or a Table.
      label: the column to predict.
      labels: its values; default those in the column, which the plan then prints as a fact.
      groups: a column whose values are reported on, or several: then every combination of values is a group.
      owners: the column of budget classes.
      numbers: bounds by column, ``{"age": (0, 120)}``, or a ``Number``.
      categories: values by column, ``{"sex": ["f", "m"]}``, or a ``Category``.
      missing_tokens: cells that mean "no value".
      keep_together: the column whose equal values, such as a person's, are on one side of every split.

    Examples:
      >>> people = Table({"age": [25, 75], "sex": ["f", "m"], "ill": ["no", "yes"]})
      >>> data = wrap_frame(people, "ill", groups=["sex"], numbers={"age": (0, 100)}, categories={"sex": ["f", "m"]})
      >>> data.facts.groups, data.facts.labels, data.facts.inputs
      (('f', 'm'), ('no', 'yes'), '(3,) float32')
    """
    if not is_frame(frame):
        raise DataError(
            "label= names a column of a DataFrame, and these data are none: pass wrap(X, y), or a DataFrame."
        )
    table = frame if isinstance(frame, Table) else from_frame(frame)
    columns = {**_numbers(numbers or {}), **_categories(categories or {})}
    header = [str(name) for name in table.columns]
    by_role = [groups] if isinstance(groups, str) else list(groups or ())
    for name in (label, *columns, *by_role, *(one for one in (owners, keep_together) if one is not None)):
        if not isinstance(name, str):
            raise UsageError("groups takes names of columns here, for example groups=['race'], since label= is one.")
        _validate.known(name, header, "column")
    known = Declaration(
        columns=columns,
        label=label,
        labels=_labels(table, label, missing_tokens) if labels is None else [text(name) for name in labels],
        groups=by_role[0] if len(by_role) == 1 else None,
        owners=owners,
        missing_tokens=missing_tokens,
        keep_together=keep_together,
    )
    data = known.data(table)
    if labels is None:
        data = replace(data, facts=replace(data.facts, derived=(*data.facts.derived, "labels")))
    data = data if len(by_role) < 2 else _crossed(data, known, table, by_role)
    return replace(data, origin=of_table(table, label))


def _numbers(numbers: Mapping[str, Any]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name, bounds in numbers.items():
        if isinstance(bounds, Number):
            columns[name] = bounds
        elif isinstance(bounds, tuple | list) and len(bounds) == 2:
            columns[name] = declared(name, {"kind": "number", "low": bounds[0], "high": bounds[1]})
        else:
            raise UsageError(f"numbers takes public bounds by column: numbers={{{name!r}: (0, 100)}}.")
    return columns


def _categories(categories: Mapping[str, Any]) -> dict[str, Column]:
    return {
        name: values if isinstance(values, Category) else declared(name, {"kind": "category", "values": _list(values)})
        for name, values in categories.items()
    }


def _list(values: Any) -> Any:
    return values if isinstance(values, str) or not hasattr(values, "__iter__") else list(values)


def _labels(table: Table, label: str, missing: Sequence[str]) -> list[str]:
    """Return the values of the label column in order; refuse more than a public list would have."""
    names = {text(cell) for cell in table.cells(label)} - set(missing)
    if len(names) > UNDECLARED:
        raise DataError(
            f"The column {label!r} has more than {UNDECLARED} different values, which would be printed as public "
            "facts: declare them with labels=, or predict another column."
        )
    if len(names) < 2:
        raise DataError(f"All records have the same label in {label!r}: there is nothing to learn.")
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


def _crossed(data: Data, known: Declaration, table: Table, names: Sequence[str]) -> Data:
    """Return the data with one group for every combination of values of several columns."""
    codes, possible = [], []
    for name in names:
        column = Category(known.labels) if name == known.label else known.columns.get(name)
        if not isinstance(column, Category):
            raise UsageError(f"Groups need declared names: pass categories={{{name!r}: [...]}}.")
        values = column.codes(name, table.cells(name), set(known.missing_tokens))
        possible.append([f"{name} = {value}" for value in column.names])
        codes.append([possible[-1][code] for code in values])
    every = [", ".join(parts) for parts in itertools.product(*possible)]
    return grouped(data, [", ".join(parts) for parts in zip(*codes, strict=True)], every)


def from_frame(frame: Any) -> Table:
    """Return the columns of a DataFrame of pandas or polars; a missing value of either becomes None.

    Examples:
      >>> import pandas
      >>> dict(from_frame(pandas.DataFrame({"age": pandas.array([31, None], dtype="Int64")})).columns)
      {'age': [31, None]}
    """
    header = checked_header([str(name) for name in frame.columns])
    return Table({name: _column(frame[original]) for name, original in zip(header, frame.columns, strict=True)})


def _column(series: Any) -> list[Any]:
    """Return the cells of one column."""
    cells = series.tolist() if hasattr(series, "tolist") else series.to_list()
    return [None if type(cell).__name__ in ("NAType", "NaTType") else cell for cell in cells]
