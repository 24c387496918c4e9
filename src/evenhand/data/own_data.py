"""A user's own file or image folder, read and encoded as declared."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from evenhand.data import images, read_files
from evenhand.data.columns import Image
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import of_files
from evenhand.data.tables import Declaration, Table
from evenhand.errors import UsageError


def read(path: str | Path, declared: Declaration, *, delimiter: str = ",") -> Data:
    r"""The records of a CSV, Parquet or NPZ file or of an image folder.

    However they are declared, encoded and split, runs add up as runs on the same data: they are told by their bytes.

    Examples:
      >>> import tempfile
      >>> from evenhand.data import Number
      >>> file = Path(tempfile.mkdtemp()) / "people.csv"
      >>> _ = file.write_text("age,ill\n31,no\n58,yes\n")
      >>> read(file, Declaration({"age": Number(0, 100)}, label="ill", labels=("no", "yes"))).facts.records
      2
    """
    place = Path(path)
    made = declared.data(read_table(place, declared, delimiter=delimiter))
    return replace(
        made, origin=of_files([file for _, file in images.listed(place)] if os.path.isdir(place) else [place])
    )


def read_table(path: Path, declared: Declaration, *, delimiter: str = ",") -> Table:
    """The same before encoding; new records need no label."""
    picture = declared.columns.get(images.PICTURE)
    if os.path.isdir(path):
        if not isinstance(picture, Image):
            raise UsageError(
                f"{path.name} is a folder: give a file, or for pictures declare their size: [columns.{images.PICTURE}] "
                'kind = "image" height = 28 width = 28.'
            )
        return images.read(path, picture)
    if any(isinstance(column, Image) for column in declared.columns.values()):
        raise UsageError(f'kind = "image" describes a folder of pictures, but {path.name} is not a folder.')
    return read_files.read(path, delimiter=delimiter)


def header(path: Path, *, delimiter: str = ",") -> list[str]:
    """Column names only; of an image folder, those of its pictures and classes."""
    return [images.PICTURE, images.FOLDER] if os.path.isdir(path) else read_files.header(path, delimiter=delimiter)
