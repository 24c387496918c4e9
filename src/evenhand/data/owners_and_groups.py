"""Assigns owners and groups to records where no column of the data names them: by the label, or by a separate file."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand import _validate
from evenhand.data import read_files
from evenhand.data.arrays import coded
from evenhand.data.columns import text
from evenhand.data.dataset import Data
from evenhand.errors import DataError, EvenhandError, UsageError

LABEL = "label"
"""Stands for the class of the record, wherever a column may be named."""


@dataclass(frozen=True)
class Roles:
    """Where owners, groups and budgets by record come from: ``"label"`` or a file with one entry per record.

    Examples:
      >>> Roles(owners="label").owners
      'label'
    """

    owners: str | None = None
    groups: str | None = None
    budgets: str | None = None

    def of_table(self, label: str | None, columns: Container[str]) -> tuple[Roles, Roles]:
        """Divide the roles: those that columns of a user's table give, and those that separate files give.

        Examples:
          >>> Roles(owners="consent", groups="label", budgets="epsilons.npy").of_table("ill", ["consent"])
          (Roles(owners='consent', groups='ill', budgets=None), Roles(owners=None, groups=None, budgets='epsilons.npy'))
        """
        given = {name: getattr(self, name) for name in ("owners", "groups", "budgets")}
        given = {name: label if role == LABEL and LABEL not in columns else role for name, role in given.items()}
        beside = {
            name: role
            for name, role in given.items()
            if role is not None and role != label and role not in columns and _is_file(role, columns)
        }
        return Roles(**{name: role for name, role in given.items() if name not in beside}), Roles(**beside)

    def paths(self, base: Path) -> dict[str, str]:
        """Return the files among the roles by the name of their setting, resolved against ``base``.

        Examples:
          >>> Roles(owners="label", budgets="epsilons.npy").paths(Path("/data"))
          {'record_budgets': '/data/epsilons.npy'}
        """
        named = {"owners": self.owners, "groups": self.groups, "record_budgets": self.budgets}
        return {
            name: os.path.abspath(base / role)
            for name, role in named.items()
            if role is not None and role != LABEL and read_files.is_path(role)
        }


def _is_file(role: str, columns: Container[str]) -> bool:
    """Return whether a role names a file, not several columns (``race,sex``)."""
    return read_files.is_path(role) and not any(part.strip() in columns for part in role.split(","))


def by_record(data: Data, names: Any, owners: Any) -> Data:
    """Return the data with one owner per budget by record; refuse other ``owners`` given as well.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> by_record(wrap(torch.ones(2, 1), [0, 1]), ["epsilon 1", "epsilon 2"], None).facts.owner_names
      ('epsilon 1', 'epsilon 2')
    """
    if owners is not None and [str(name) for name in owners] != [str(name) for name in names]:
        raise UsageError("Give owners, or one budget per record: with both a record would have two budgets.")
    return owned(data, names)


def owned(data: Data, owners: Iterable[Any]) -> Data:
    """Return these records with one owner name each.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> owned(wrap(torch.zeros(3, 1), [0, 1, 1]), ["a", "b", "b"]).facts.owners
      (('a', 1), ('b', 2))
    """
    _refuse_persons(data, "owners")
    code, names = coded(owners, None, len(data), "owners")
    sizes = torch.bincount(code, minlength=len(names)).tolist()
    return replace(data, owner=code, facts=replace(data.facts, owners=tuple(zip(names, sizes, strict=True))))


def _refuse_persons(data: Data, what: str) -> None:
    if data.facts.promised == "person":
        raise UsageError(
            f"These data are by person already, and {what} belong to records: give {what}= for every record to wrap, "
            "before or together with persons=."
        )


def grouped(data: Data, groups: Iterable[Any], names: Sequence[str]) -> Data:
    """Return these records with one group name each, of those declared.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> grouped(wrap(torch.zeros(3, 1), [0, 1, 1]), ["a", "b", "b"], ["a", "b"]).facts.groups
      ('a', 'b')
    """
    _refuse_persons(data, "groups")
    code, group_names = coded(groups, names, len(data), "groups")
    derived = tuple(fact for fact in data.facts.derived if fact != "groups")
    return replace(data, group=code, facts=replace(data.facts, groups=group_names, derived=derived))


def assigned(train: Data, test: Data | None, roles: Roles) -> tuple[Data, Data | None]:
    """Return training and held-out data with owners and groups from the label or from files.

    A file has one entry per training record, or per training and then per held-out record. With the short form nobody
    knows who owns the held-out records, so nothing is reported per owner.

    Examples:
      >>> from evenhand.data.sources.digits import digits
      >>> assigned(*digits(), Roles(owners="label"))[0].facts.owner_names[:3]
      ('0', '1', '2')
    """
    if roles.owners is not None and roles.budgets is not None:
        raise UsageError("Give owners, or one budget per record: with both a record would have two budgets.")
    if roles.owners == LABEL:
        train, test = owned(train, labels(train)), None if test is None else owned(test, labels(test))
    elif roles.owners is not None or roles.budgets is not None:
        train, test = _with_owners(train, test, roles)
    if roles.groups == LABEL:
        train, test = _by_label(train), None if test is None else _by_label(test)
    elif roles.groups is not None:
        train, test = _with_groups(train, test, roles.groups)
    return train, test


def _with_owners(train: Data, test: Data | None, roles: Roles) -> tuple[Data, Data | None]:
    if roles.budgets is not None:
        every = _validate.epsilon_names(entries(_path(roles.budgets, "budgets")))
    else:
        every = _names(str(roles.owners), "owners")
    first, second = _shared(every, train, test, "owners" if roles.budgets is None else "budgets")
    return owned(train, first), owned(test, second) if test is not None and second else test


def _by_label(data: Data) -> Data:
    return grouped(data, labels(data), data.facts.labels)


def _with_groups(train: Data, test: Data | None, source: str) -> tuple[Data, Data | None]:
    every = _names(source, "groups")
    first, second = _shared(every, train, test, "groups")
    names = sorted(set(every))
    train, derived = grouped(train, first, names), (*train.facts.derived, "groups")
    train = replace(train, facts=replace(train.facts, derived=tuple(dict.fromkeys(derived))))
    return train, grouped(test, second, names) if test is not None and second else test


def labels(data: Data) -> list[str]:
    """Return the class name of every record.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> labels(wrap(torch.zeros(3, 1), ["no", "yes", "no"]))
      ['no', 'yes', 'no']
    """
    if not data.facts.labels:
        raise DataError("These data have no named classes, so the label cannot say who owns a record: give a file.")
    parts: list[Tensor] = [data.fetch(rows)[1] for rows in torch.split(torch.arange(len(data)), 4096)]
    if parts[0].is_floating_point():
        raise DataError("A record may have several labels here, so they cannot say who owns it: give a file.")
    return [data.facts.labels[code] for code in torch.cat(parts).tolist()]


def entries(path: Path) -> list[Any]:
    r"""Read one entry per record, in order: lines of a .txt file, rows of a one-column .csv with header, a .npy array.

    Examples:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "owners.txt"
      >>> _ = file.write_text("strict\nopen\n")
      >>> entries(file)
      ['strict', 'open']
    """
    if path.suffix.lower() == ".npy":
        return _array(path)
    if path.suffix.lower() == ".txt":
        return [line.strip() for line in read_files.lines(path)]
    table = read_files.read(path)
    if len(table.columns) != 1:
        raise DataError(f"{path.name} has {len(table.columns)} columns: keep the one with an entry for every record.")
    return list(next(iter(table.columns.values())))


def _array(path: Path) -> list[Any]:
    try:
        with read_files.opened(path) as file:
            read_files.limited(path.stat().st_size, path)
            column = np.load(file, allow_pickle=False)
    except EvenhandError:
        raise
    except Exception:  # parsers of damaged bytes fail in many ways
        raise DataError(
            f"{path.name} is not a plain .npy array (Python objects are never loaded). Write it with np.save."
        ) from None
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "fiubU":
        raise DataError(f"{path.name} must hold one column: a plain array with one number or name per record.")
    return list(column.tolist())


def _names(source: str, what: str) -> list[str]:
    names = [text(cell) for cell in entries(_path(source, what))]
    empty = names.count("")
    if empty:
        raise DataError(
            f"{Path(source).name}: {empty} record(s), the first being record {names.index('') + 1}, have no name. Give "
            "every record one, for example 'unknown'."
        )
    return names


def _path(source: str, what: str) -> Path:
    if not read_files.is_path(source):
        raise UsageError(
            f"--{what} {source} is neither a column of these data nor a file: pass 'label' for the record's class, "
            f"a declared column of your own file, or a file with one entry per record such as {what}.txt"
            + (" (or NAME=NUMBER,NAME=NUMBER)." if what == "budgets" else ".")
        )
    return Path(source)


def _shared(column: list[str], train: Data, test: Data | None, what: str) -> tuple[list[str], list[str]]:
    """Divide the entries into those of the training records and those of the held-out ones, if the file has both."""
    held_out = 0 if test is None else len(test)
    if len(column) not in (len(train), len(train) + held_out):
        both = f", or {len(train) + held_out} with the held-out records after them" if held_out else ""
        raise DataError(
            f"The file of {what} has {len(column)} entries for {len(train)} training records: give one per record, in "
            f"the order of the data{both}. The first line of a .csv file is its header; a .txt file has none."
        )
    return column[: len(train)], column[len(train) :]
