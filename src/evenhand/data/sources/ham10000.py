"""HAM10000: 10,015 pictures of 7,470 skin lesions, reduced to 28 x 28, with diagnosis, sex and lesion."""

from __future__ import annotations

import numpy as np

from evenhand import _validate
from evenhand.data import read_files
from evenhand.data.owners_and_groups import grouped
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
    data = classified(pixels(images.transpose(0, 3, 1, 2)), labels, DIAGNOSES)
    if choice(groups, ("diagnosis", "sex"), "groups") == "sex":
        data = grouped(data, [str(cell) for cell in cells["sex"]], SEXES)
    seed = _validate.whole(split_seed, "split_seed", low=0)
    return divided(data, held_out([str(lesion) for lesion in cells["lesion_id"]], HELD_OUT, seed))


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
