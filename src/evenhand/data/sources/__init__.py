"""Named data sets; ``load`` finds them by name. Each is a file of this folder and reads official file formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenhand import _validate
from evenhand.data import read_files
from evenhand.data.fingerprint import of_source
from evenhand.data.sources import (
    census,
    chexpert,
    cifar,
    ctg,
    german,
    ham10000,
    mnist,
    names,
    pneumonia,
    sentiment,
    thinwall,
)
from evenhand.data.sources.base import Loaded, Place, Source, data_folder
from evenhand.data.sources.digits import digits
from evenhand.data.sources.variants import Shape

DIGITS = Source(
    "digits",
    lambda place: digits(),
    records="1,265 + 450",
    groups="the ten digits, one of them rare",
    licence="BSD, part of scikit-learn",
)
SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        DIGITS,
        mnist.MNIST,
        mnist.UNBALANCED,
        mnist.FASHION,
        cifar.CIFAR10,
        cifar.CIFAR10_SUBSET,
        cifar.CIFAR100,
        census.ADULT,
        census.DUTCH,
        ctg.CTG,
        german.GERMAN,
        ham10000.HAM10000,
        ham10000.PICTURES,
        names.NAMES,
        pneumonia.PNEUMONIA,
        sentiment.SENTIMENT,
        thinwall.THINWALL,
        chexpert.CHEXPERT,
    )
}
PUBLIC = frozenset(source.name for source in SOURCES.values() if source.public)
"""Data whose records are published for anyone to see: everything about them may be shown."""
SHARED = tuple(field.name for field in dataclasses.fields(Shape))
"""Options that every source takes."""


def is_source(name: str) -> bool:
    """Return whether ``name`` is a built-in source; a file of your own has a suffix, a path, or exists.

    Examples:
      >>> is_source("digits"), is_source("digit"), is_source("people.csv")
      (True, True, False)
    """
    return name in SOURCES or not read_files.is_path(name)


def source(name: str) -> Source:
    """Return the source called ``name``; an unknown name is an error that gives the nearest one."""
    return SOURCES[_validate.known(name, SOURCES, "data source")]


def place(data_source: Source, data_dir: str | Path | None = None) -> Place:
    """Return the folder of a source."""
    return Place(data_folder(data_dir) / (data_source.folder or data_source.name))


def load(name: str, *, data_dir: str | Path | None = None, options: Mapping[str, Any] | None = None) -> Loaded:
    """Return training and held-out data of the source called ``name``.

    Whatever the options make of its records, runs add up as runs on the same data: the fingerprint is that of the
    source's folder, which ``mnist`` and ``unbalanced-mnist`` share. Other files put there count as the same data too.

    Args:
      name: see ``evenhand data``.
      data_dir: the folder of all sources; default EVENHAND_DATA, else the user's cache.
      options: options of the source by name, and those that all take (``shaping.Shape``).

    Examples:
      >>> train, _ = load("digits", options={"records": 500, "owners": "digits"})
      >>> train.facts.owners
      (('0-4', 266), ('5-9', 234))
    """
    data_source = source(name)
    asked = dict(options or {})
    for key in asked:
        _validate.known(key, (*data_source.options, *SHARED), f"option of the source {name}")
    where = place(data_source, data_dir)
    if not data_source.present(where):
        raise data_source.absent(where)
    shape = Shape(**{key: asked.pop(key) for key in SHARED if key in asked})
    train, test = data_source.read(where, **asked)
    train, test = shape(train, test)
    origin = of_source(data_source.folder or data_source.name)
    told = None if test is None else dataclasses.replace(test, origin=origin)
    return dataclasses.replace(train, origin=origin), told
