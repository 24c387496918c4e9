"""HAM10000: 10,015 pictures of 7,470 skin lesions, at 28 x 28 or 200 x 150, with diagnosis, sex and lesion."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand import _validate
from evenhand.data import own_data, read_files
from evenhand.data.columns import Image
from evenhand.data.dataset import Data, kept_together
from evenhand.data.owners_and_groups import grouped
from evenhand.data.record_seeds import Quiet
from evenhand.data.sources.base import (
    File,
    Loaded,
    Place,
    Source,
    choice,
    classified,
    damaged,
    divided,
    held_out,
    pixels,
)

HELD_OUT = 0.2
NPZ = "ham10000_28x28_rgb.npz"
TAR, METADATA = "images_200x150.tar", "HAM10000_metadata.csv"
DECLARED = Image(height=150, width=200)
DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SEXES = ("female", "male", "unknown")


def ham10000(place: Place, groups: str = "diagnosis", split_seed: int = 0) -> Loaded:
    """Read (3, 28, 28) pictures, colours from -1 to 1; about a fifth held out, whole lesions at a time.

    Several pictures show the same lesion. The side of a lesion follows from its id and the public seed, so no lesion is
    on both sides. The unit of privacy stays the record, that is one picture.

    Preprocessing: every byte scaled by the range 0-255. The file is reduced from the published pictures; it is not
    byte-equal to hmnist_28_28_RGB.csv.

    Args:
      place: the folder.
      groups: who is reported on: "diagnosis" (the seven classes) or "sex" (female, male, unknown).
      split_seed: public seed of the split.
    """
    cells = read_files.arrays(place.path(NPZ))
    wanted = ("images", "labels", "lesion_id", "sex")
    if not set(wanted) <= set(cells):
        raise damaged(place.path(NPZ), f"an NPZ file with the arrays {', '.join(wanted)}")
    images, labels = cells["images"], cells["labels"]
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28, 3) or labels.max(initial=0) >= len(DIAGNOSES):
        raise damaged(place.path(NPZ), "28 x 28 colour pictures with diagnoses 0-6")
    sexes, lesions = ([str(cell) for cell in cells[name]] for name in ("sex", "lesion_id"))
    return _divided(images.transpose(0, 3, 1, 2), labels, sexes, lesions, groups, split_seed)


def pictures(place: Place, groups: str = "diagnosis", split_seed: int = 0) -> Loaded:
    """Read (3, 150, 200) pictures, divided and grouped as `ham10000` does, with the records in the same order.

    Args:
      place: the folder.
      groups: see `ham10000`.
      split_seed: see `ham10000`.
    """
    rows = list(csv.DictReader(place.text(METADATA).splitlines()))
    wanted = {"image_id", "lesion_id", "dx", "sex"}
    if not rows or any(not wanted <= row.keys() or row["dx"] not in DIAGNOSES for row in rows):
        raise damaged(place.path(METADATA), f"a CSV file with {', '.join(sorted(wanted))}")
    images = _unpacked(place, [f"{row['image_id']}.jpg" for row in rows])
    labels = np.array([DIAGNOSES.index(row["dx"]) for row in rows])
    return _divided(
        images, labels, [row["sex"] for row in rows], [row["lesion_id"] for row in rows], groups, split_seed
    )


def _unpacked(place: Place, names: Sequence[str]) -> NDArray[np.uint8]:
    """Return the pictures of these names in the archive, (N, 3, 150, 200)."""
    path = place.path(TAR)
    read_files.limited(len(names) * int(np.prod(DECLARED.shape)), path)
    images = np.empty((len(names), *DECLARED.shape), dtype=np.uint8)
    try:
        with tarfile.open(path) as tar:
            members = {member.name.rpartition("/")[2]: member for member in tar if member.isfile()}
            for row, name in enumerate(names):
                content = tar.extractfile(members[name])
                if content is None or members[name].size > read_files.LIMIT:
                    raise damaged(path, "an archive of pictures")
                images[row] = own_data.picture(io.BytesIO(content.read()), DECLARED, f"Picture {row + 1} of {TAR}")
    except (tarfile.TarError, KeyError, EOFError, OSError):
        raise damaged(path, "an archive of the pictures that the metadata name") from None
    return images


def _divided(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    sexes: Sequence[str],
    lesions: Sequence[str],
    groups: str,
    split_seed: int,
) -> Loaded:
    data = _scaled(classified(torch.from_numpy(np.ascontiguousarray(images)), labels, DIAGNOSES))
    if choice(groups, ("diagnosis", "sex"), "groups") == "sex":
        data = grouped(data, sexes, SEXES)
    data = replace(data, together=kept_together(lesions, len(data)), together_by="lesion")
    return divided(data, held_out(lesions, HELD_OUT, _validate.whole(split_seed, "split_seed", low=0)))


def _scaled(data: Data) -> Data:
    """Return pictures of bytes as pictures from -1 to 1; they stay bytes in memory until a row is fetched."""

    def fetch(rows: Tensor) -> tuple[Tensor, Tensor]:
        images, codes = data.fetch(rows)
        return pixels(images.numpy()), codes

    shape = data.facts.inputs.rpartition(" ")[0]
    return replace(data, facts=replace(data.facts, inputs=f"{shape} float32"), fetch=Quiet(fetch))


HAM10000 = Source(
    "ham10000",
    ham10000,
    records="10,015, about a fifth of them held out",
    groups="seven diagnoses, or sex",
    licence="CC BY-NC 4.0: non-commercial",
    files=((File(NPZ),),),
    hint="Make it from the pictures of HAM10000 (Harvard Dataverse, doi 10.7910/DVN/DBW86T) with the arrays images "
    "(10015, 28, 28, 3) uint8, labels 0-6 in the order akiec, bcc, bkl, df, mel, nv, vasc, lesion_id and sex.",
)
PICTURES = Source(
    "ham10000-200x150",
    pictures,
    records=HAM10000.records,
    groups=HAM10000.groups,
    licence=HAM10000.licence,
    files=((File(TAR), File(METADATA)),),
    folder="ham10000",
    hint="The archive holds all pictures as JPEG files of 200 x 150 pixels, named by their image_id.",
)
