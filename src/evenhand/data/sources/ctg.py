"""Cardiotocography: 2,126 recordings of fetal heart rate, judged normal, suspect or pathologic (UCI, CTG.xls)."""

from __future__ import annotations

from evenhand import _validate
from evenhand.data.columns import Number
from evenhand.data.sources.base import File, Loaded, Place, Source, damaged, divided, held_out_of_each
from evenhand.data.tables import Declaration, Table

HELD_OUT = 0.2
CLASSES = {"1": "normal", "2": "suspect", "3": "pathologic"}
RANGES = {
    "LB": (50, 220),
    "AC": (0, 0.02),
    "FM": (0, 0.5),
    "UC": (0, 0.02),
    "DL": (0, 0.02),
    "DS": (0, 0.002),
    "DP": (0, 0.006),
    "ASTV": (0, 100),
    "MSTV": (0, 10),
    "ALTV": (0, 100),
    "MLTV": (0, 60),
    "Width": (0, 200),
    "Min": (50, 250),
    "Max": (50, 250),
    "Nmax": (0, 20),
    "Nzeros": (0, 10),
    "Mode": (50, 250),
    "Mean": (50, 250),
    "Median": (50, 250),
    "Variance": (0, 300),
    "Tendency": (-1, 1),
}
"""Declared bounds: what a monitor can show (beats a minute, percentages, rates a second), rounded by us."""


def ctg(place: Place, split_seed: int = 0) -> Loaded:
    """Read 21 features scaled to [-1, 1] by declared bounds; groups are the three classes; a fifth of each is held out.

    Preprocessing: clipping to ``RANGES`` and scaling, record by record.
    """
    lines = place.text("ctg.csv").splitlines()
    names = lines[0].split(",") if lines else []
    rows = [line.split(",") for line in lines[1:] if line]
    if not {*RANGES, "NSP"} <= set(names) or not rows or any(len(row) != len(names) for row in rows):
        raise damaged(place.path("ctg.csv"), "a CSV file with the 21 features and NSP")
    cells = dict(zip(names, zip(*rows, strict=True), strict=True))
    classes = [CLASSES.get(cell.removesuffix(".0"), "") for cell in cells["NSP"]]
    declared = Declaration(
        {name: Number(low, high) for name, (low, high) in RANGES.items()},
        label="NSP",
        labels=tuple(CLASSES.values()),
        groups="NSP",
    )
    table = Table({**{name: cells[name] for name in RANGES}, "NSP": classes})
    mask = held_out_of_each(classes, HELD_OUT, _validate.whole(split_seed, "split_seed", low=0))
    return divided(declared.data(table), mask)


CTG = Source(
    "ctg",
    ctg,
    records="2,126, a fifth of each class held out",
    groups="normal, suspect, pathologic",
    licence="UCI, listed as CC BY 4.0",
    files=((File("ctg.csv"),),),
    hint="Save the sheet 'Data' of CTG.xls (UCI Machine Learning Repository, Cardiotocography) as ctg.csv with the "
    f"columns {', '.join(RANGES)}, NSP: of columns that occur twice, the second (rates a second).",
)
