"""CheXpert (Irvin et al. 2019): chest X-rays with several findings each, from its CSV files and pictures."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from evenhand import _validate
from evenhand.data import own_data
from evenhand.data.columns import Image, names
from evenhand.data.dataset import Data, wrap
from evenhand.data.record_seeds import Quiet
from evenhand.data.sources.base import File, Loaded, Place, Source, choice, damaged, pixels
from evenhand.errors import DataError

FIVE = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
SEXES = ("Female", "Male", "Unknown")


def chexpert(place: Place, size: int = 64, findings: Sequence[str] = FIVE, uncertain: str = "zeros") -> Loaded:
    """Read frontal pictures, (1, size, size), grey from -1 to 1, with a 0 or 1 per finding; groups are the sexes.

    A picture may have several findings: each is a label of its own, and ROC-AUC and average precision are reported for
    each. With one finding it is a class instead, absent or present. Pictures are opened when they are needed. A patient
    may have several pictures; the unit of privacy is one picture.

    Preprocessing, picture by picture: grey, resized to a square (bilinear), bytes scaled by the range 0-255.

    Args:
      place: the folder that holds train.csv, valid.csv, train and valid.
      size: height and width.
      findings: columns of the CSV files; default the five of the competition.
      uncertain: what a finding marked -1 counts as: "zeros" or "ones". No mark counts as 0.
    """
    listed = names(findings, "findings")
    ones = choice(uncertain, ("zeros", "ones"), "uncertain") == "ones"
    side = _validate.whole(size, "size")
    train, test = (_part(place, part, Image(side, side, 1, resize=True), listed, ones) for part in ("train", "valid"))
    return train, test


def _part(place: Place, part: str, declared: Image, findings: tuple[str, ...], ones: bool) -> Data:
    table = place.path(f"{part}.csv")
    rows = list(csv.DictReader(place.text(f"{part}.csv").splitlines()))
    if not rows or not {"Path", "Sex", *findings} <= set(rows[0]):
        raise damaged(table, "a CSV file with the columns Path, Sex and the findings")
    rows = [row for row in rows if row.get("Frontal/Lateral", "Frontal") == "Frontal"]
    paths = [_path(place, part, row["Path"], table) for row in rows]
    marks = {"1.0": 1.0, "1": 1.0, "-1.0": float(ones), "-1": float(ones)}
    targets = np.array([[marks.get(row[name], 0.0) for name in findings] for row in rows], dtype=np.float32)
    sexes = [row["Sex"] if row["Sex"] in SEXES else "Unknown" for row in rows]
    single = len(findings) == 1
    data = wrap(
        torch.zeros(len(rows), 1),
        ["present" if target[0] else "absent" for target in targets] if single else targets,
        labels=("absent", "present") if single else findings,
        groups=sexes,
        group_names=SEXES,
    )
    return _with_pictures(data, paths, declared)


def _with_pictures(data: Data, paths: Sequence[Path], declared: Image) -> Data:
    def fetch(rows: Tensor) -> tuple[Tensor, Tensor]:
        pictures = [own_data.picture(paths[row], declared, f"Picture {row + 1}") for row in rows.tolist()]
        stacked = np.stack(pictures) if pictures else np.empty((0, *declared.shape), dtype=np.uint8)
        return pixels(stacked), data.fetch(rows)[1]

    return replace(data, facts=replace(data.facts, inputs=f"{declared.shape} float32"), fetch=Quiet(fetch))


def _path(place: Place, part: str, written: str | None, table: Path) -> Path:
    """Return the picture that a row names (``CheXpert-v1.0-small/train/patient00001/...``), always in the folder."""
    parts = PurePosixPath(written or "").parts
    if part not in parts or ".." in parts:
        raise damaged(table, f"a list of pictures below {part}")
    path = place.folder.joinpath(*parts[parts.index(part) :])
    if not path.is_file():
        raise DataError(f"A picture that {table.name} names is not in {place.folder / part}: unpack the whole archive.")
    return path


CHEXPERT = Source(
    "chexpert",
    chexpert,
    records="191,027 frontal + 202 in the published version",
    groups="sex",
    licence="Stanford research use agreement: not for sharing",
    files=((File("train.csv"), File("valid.csv"), File("train"), File("valid")),),
    public=False,
    hint="Ask Stanford for CheXpert-v1.0-small (its agreement is between you and them) and unpack it so that train.csv "
    "lies there.",
)
