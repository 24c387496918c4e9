"""Folders in the shape of Thinwall: thermal frames of a melt pool as CSV files, and a list of which were porous.

Shape: ``labels.csv`` with the columns ``file`` and ``label`` (healthy or porous), and the folder ``frames`` with those
files. A frame is a table of temperatures without a header, one line per row of pixels, all cells numbers.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.data import read_files
from evenhand.data.sources.base import File, Loaded, Place, Source, classified, damaged, divided, held_out
from evenhand.errors import UsageError

HELD_OUT = 0.25
CLASSES = ("healthy", "porous")


def thinwall(place: Place, size: int = 200, low: float = 0.0, high: float = 3000.0, split_seed: int = 0) -> Loaded:
    """Read (1, size, size) frames, temperatures from -1 to 1; groups are healthy and porous; about a quarter held out.

    Preprocessing, frame by frame: a square around its hottest pixel (ours: the paper says centred on the melt pool),
    clipped to the declared temperatures and scaled.

    Args:
      place: the folder that holds labels.csv and frames.
      size: height and width of the square; a smaller frame is refused.
      low: declared lowest temperature. Ours; the paper gives none.
      high: declared highest temperature. Ours.
      split_seed: public seed; the side of a frame follows from its file name.
    """
    side = _validate.whole(size, "size")
    if _validate.number(low, "low", low=-1e4) >= _validate.number(high, "high", low=-1e4):
        raise UsageError("low must be below high: declare the lowest and the highest temperature.")
    rows = list(csv.DictReader(place.text("labels.csv").splitlines()))
    if not rows or any(row.get("label") not in CLASSES or not row.get("file") for row in rows):
        raise damaged(place.path("labels.csv"), "a list of file and label (healthy or porous)")
    read_files.limited(len(rows) * side * side * 4, place.path("frames"))
    frames = np.stack([_frame(place, str(row["file"]), number, side) for number, row in enumerate(rows, 1)])
    scaled = 2 * (np.clip(frames, low, high) - low) / (high - low) - 1
    codes = np.array([CLASSES.index(row["label"]) for row in rows])
    data = classified(torch.from_numpy(scaled.astype(np.float32)[:, None]), codes, CLASSES)
    seed = _validate.whole(split_seed, "split_seed", low=0)
    return divided(data, held_out([str(row["file"]) for row in rows], HELD_OUT, seed))


def _frame(place: Place, name: str, number: int, side: int) -> NDArray[np.float64]:
    if Path(name).name != name:
        raise damaged(place.path("labels.csv"), "a list of plain file names")
    try:
        rows = [line.split(",") for line in place.text(f"frames/{name}").splitlines()]
        frame = np.array(rows, dtype=np.float64).reshape(len(rows), -1)
    except ValueError:
        frame = np.empty((0, 0))
    if min(frame.shape) < side or not np.isfinite(frame).all():
        raise damaged(place.path(f"frames/{name}"), f"frame {number}, a table of at least {side} x {side} temperatures")
    hot = np.unravel_index(int(frame.argmax()), frame.shape)
    top, left = (min(max(int(at) - side // 2, 0), length - side) for at, length in zip(hot, frame.shape, strict=True))
    return frame[top : top + side, left : left + side]


THINWALL = Source(
    "thinwall",
    thinwall,
    records="1,564 in the paper, about a quarter held out",
    groups="healthy, porous",
    licence="of the owner of the frames",
    files=((File("labels.csv"), File("frames")),),
    public=False,
    hint="labels.csv has the columns file and label (healthy or porous); frames holds a CSV file of temperatures each.",
)
