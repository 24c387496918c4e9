"""Chest X-rays of children with and without pneumonia (Kermany et al. 2018): folders of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evenhand import _validate
from evenhand.data import own_data
from evenhand.data.columns import Image
from evenhand.data.dataset import Data
from evenhand.data.sources.base import File, Loaded, Place, Source, choice, classified, damaged, pixels

FOLDERS = ("NORMAL", "PNEUMONIA")
KINDS = {"two": ("normal", "pneumonia"), "three": ("normal", "bacterial", "viral")}


def pneumonia(place: Place, size: int = 64, classes: str = "two") -> Loaded:
    """Read grey pictures, (1, size, size), from -1 to 1, split as published; groups are the classes.

    Preprocessing, picture by picture: grey, resized to a square (bilinear), bytes scaled by the range 0-255.

    Args:
      place: the folder that holds train and test, each with the folders NORMAL and PNEUMONIA.
      size: height and width.
      classes: "two" (normal, pneumonia) or "three" (normal, bacterial, viral: by the word in the file name).
    """
    kinds = KINDS[choice(classes, KINDS, "classes")]
    side = _validate.whole(size, "size")
    train, test = (_part(place, part, Image(side, side, 1, resize=True), kinds) for part in ("train", "test"))
    return train, test


def _part(place: Place, part: str, declared: Image, kinds: tuple[str, ...]) -> Data:
    if own_data.classes(place.path(part)) != list(FOLDERS):
        raise damaged(place.path(part), f"a folder of {' and '.join(FOLDERS)}")
    table = own_data.read_images(place.path(part), declared)
    codes = [
        0 if folder == FOLDERS[0] else 1 if len(kinds) == 2 else _cause(str(file), part)
        for folder, file in zip(table.cells(own_data.FOLDER), table.cells(own_data.FILE), strict=True)
    ]
    return classified(pixels(np.asarray(table.cells(own_data.PICTURE))), np.array(codes), kinds)


def _cause(file: str, part: str) -> int:
    if "bacteria" not in file and "virus" not in file:
        raise damaged(Path(part) / FOLDERS[1], "a folder of pictures named bacteria or virus")
    return 1 if "bacteria" in file else 2


PNEUMONIA = Source(
    "pneumonia",
    pneumonia,
    records="5,232 + 624 as published",
    groups="normal, pneumonia (or bacterial, viral)",
    licence="CC BY 4.0 (Mendeley Data, doi 10.17632/rscbjbr9sj)",
    files=((File("train"), File("test")),),
    public=False,
    hint="They are the folders of the archive ChestXRay2017, chest_xray/train and chest_xray/test.",
)
