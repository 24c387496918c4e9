"""A user's own file or image folder, read and encoded as declared."""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data import read_files
from evenhand.data.columns import Image
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import of_files
from evenhand.data.large import mapped_cache
from evenhand.data.read_files import is_large
from evenhand.data.tables import Declaration, Table
from evenhand.errors import DataError, UsageError


def read(
    path: str | Path,
    declared: Declaration,
    *,
    delimiter: str = ",",
    mapped: bool | None = None,
    cache: str | Path | None = None,
) -> Data:
    r"""Return the records of a CSV, Parquet or NPZ file or of an image folder.

    However they are declared, encoded and split, runs add up as runs on the same data: they are told by their bytes.

    Args:
      path: file or folder.
      declared: what its columns hold.
      delimiter: between the cells of a CSV file.
      mapped: encode a Parquet file once into arrays on disk, which are mapped and never held in memory as a whole;
        default for files that would take more memory than a file may (2 GiB).
      cache: folder of these arrays, which hold private records; default one in the user's cache folder.

    Examples:
      >>> import tempfile
      >>> from evenhand.data import Number
      >>> file = Path(tempfile.mkdtemp()) / "people.csv"
      >>> _ = file.write_text("age,ill\n31,no\n58,yes\n")
      >>> read(file, Declaration({"age": Number(0, 100)}, label="ill", labels=("no", "yes"))).facts.records
      2
    """
    place = Path(path)
    if mapped or (mapped is None and not os.path.isdir(place) and is_large(place)):
        return mapped_cache.mapped(place, declared, of_files([place]), None if cache is None else Path(cache))
    data = declared.data(read_table(place, declared, delimiter=delimiter))
    return replace(data, origin=of_files([file for _, file in listed(place)] if os.path.isdir(place) else [place]))


def read_table(path: Path, declared: Declaration, *, delimiter: str = ",") -> Table:
    """Return the table of a file or image folder, before encoding; new records need no label."""
    picture = declared.columns.get(PICTURE)
    if os.path.isdir(path):
        if not isinstance(picture, Image):
            raise UsageError(
                f"{path.name} is a folder: give a file, or for pictures declare their size: [columns.{PICTURE}] "
                'kind = "image" height = 28 width = 28.'
            )
        return read_images(path, picture)
    if any(isinstance(column, Image) for column in declared.columns.values()):
        raise UsageError(f'kind = "image" describes a folder of pictures, but {path.name} is not a folder.')
    return read_files.read(path, delimiter=delimiter)


def header(path: Path, *, delimiter: str = ",") -> list[str]:
    """Return the column names only; of an image folder, those of its pictures and classes."""
    return [PICTURE, FOLDER] if os.path.isdir(path) else read_files.header(path, delimiter=delimiter)


PICTURE, FOLDER, FILE = "image", "folder", "file"
"""The columns that an image folder has: pixels, class, and file name (for ``predict --keep file``)."""
PIXELS = 4096 * 4096
_ACCEPTED = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")


def classes(path: Path) -> list[str]:
    """Return the names of the sub-folders, which are the labels; no picture is opened.

    Examples:
      >>> import tempfile
      >>> root = Path(tempfile.mkdtemp())
      >>> (root / "cats").mkdir(); (root / "dogs").mkdir()
      >>> classes(root)
      ['cats', 'dogs']
    """
    try:
        folders = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from None
    if not folders:
        raise DataError(
            f"{path} is a folder without sub-folders: give a file, or one sub-folder of pictures per class."
        )
    return folders


def listed(path: Path) -> list[tuple[str, Path]]:
    """Return every picture with the name of its sub-folder, in order; none is opened."""
    return [(name, file) for number, name in enumerate(classes(path), 1) for file in _pictures(path, name, number)]


def read_images(path: Path, declared: Image) -> Table:
    """Return all pictures as one array, with the sub-folder and the file name of each.

    No name is printed in messages, since it may be a person's.
    """
    pictures = listed(path)
    if not pictures:
        raise DataError(f"{path} holds no pictures: put the pictures of each class into its sub-folder.")
    read_files.limited(len(pictures) * int(np.prod(declared.shape)) * 4, path)
    pixels = np.empty((len(pictures), *declared.shape), dtype=np.uint8)
    place: dict[str, int] = {}
    numbers = {folder: number for number, folder in enumerate(classes(path), 1)}
    for row, (folder, file) in enumerate(pictures):
        place[folder] = place.get(folder, 0) + 1
        pixels[row] = picture(file, declared, f"Picture {place[folder]} of sub-folder {numbers[folder]}")
    names = [file.name for _, file in pictures]
    return Table({PICTURE: pixels, FOLDER: [folder for folder, _ in pictures], FILE: names})


def _pictures(root: Path, folder: str, number: int) -> list[Path]:
    inside = (root / folder).resolve()
    if not inside.is_relative_to(root.resolve()):
        raise DataError(f"Sub-folder {number} is a link to somewhere else: copy the pictures into the folder.")
    files = sorted(child for child in inside.iterdir() if not child.name.startswith("."))
    for place, child in enumerate(files, 1):
        if child.is_symlink() or not child.is_file():
            raise DataError(f"Entry {place} of sub-folder {number} is not an ordinary file: keep pictures only.")
    return files


def picture(file: Path | io.BytesIO, declared: Image, what: str) -> NDArray[Any]:
    """Return the bytes of one picture as declared, (channels, height, width); ``what`` names it in messages."""
    try:
        from PIL import Image as Pillow
    except ImportError:
        raise UsageError("Image folders need pillow: pip install 'evenhand[files]'.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            with Pillow.open(file, formats=_ACCEPTED) as opened:
                _sized(opened.size, declared, what)
                image = opened.convert("L" if declared.channels == 1 else "RGB")
    except DataError:
        raise
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning):
        raise _bomb(what) from None
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError):
        raise DataError(f"{what} is not a readable picture ({', '.join(_ACCEPTED)}): remove or repair it.") from None
    if image.size != (declared.width, declared.height):
        image = image.resize((declared.width, declared.height), Pillow.Resampling.BILINEAR)
    array = np.asarray(image)
    return array[None] if declared.channels == 1 else array.transpose(2, 0, 1)


def _sized(size: tuple[int, int], declared: Image, what: str) -> None:
    """Raise DataError for a size that is too large or not the declared one, before a pixel is unpacked."""
    if size[0] * size[1] > PIXELS:
        raise _bomb(what)
    if not declared.resize and size != (declared.width, declared.height):
        raise DataError(
            f"{what} is not {declared.width} x {declared.height} as declared: set resize = true in "
            f"[columns.{PICTURE}], or resize the pictures."
        )


def _bomb(what: str) -> DataError:
    return DataError(f"{what} claims more than {PIXELS} pixels: it was not unpacked. Remove it or make it smaller.")
