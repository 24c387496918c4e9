"""Pools identical cells of several comparisons: same data, model, method, settings and promise, whatever their seeds.

Two studies that train the same thing are one larger study of it. Cells are told by ``summary.cell_digest``, which is
written into table.json. Trainings that share a seed are other trainings on the same split. They stand beside each other
and are not averaged: the worst group of averages would be better served than the worst group is on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.reporting import replicas
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.replicas import Rows
from evenhand.reporting.uncertainty import Split

FILE = "table.json"
AGAIN = 1_000_000
"""Added to the seed of a training for each earlier one with this seed."""


@dataclass(frozen=True)
class Pool:
    """One cell with the evaluations of all studies that trained it.

    Attributes:
      cell: its digest.
      method: its name in the first study.
      epsilon: what was promised; None if it is not private.
      studies: numbers of the studies that have it, in the order given.
      rows: the last evaluation of every training by seed; see ``AGAIN``.
      split: how the studies split; fixed unless all resampled.
    """

    cell: str
    method: str
    epsilon: float | None
    studies: tuple[int, ...]
    rows: Rows
    split: Split

    def share(self, group: str | None = None) -> Estimate:
        """Return accuracy over all pooled trainings with its interval, of a group or of all records."""
        return replicas.share(self.rows, self.split, group)


def read(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the tables of several comparisons, from the folders that ``compare`` wrote."""
    return [untrusted.read_json(folder / FILE, {"entries": list}) for folder in folders]


def pooled(tables: Sequence[Mapping[str, Any]]) -> dict[str, Pool]:
    """Return every cell of several tables by its digest, with the rows of all; entries without a digest are left out.

    Examples:
      >>> entry = {"cell": "x", "method": "dpsgd", "epsilon": 3.0}
      >>> tables = [{"entries": [{**entry, "by_seed": {str(seed): {"accuracy": share, "records": 9}}}]}
      ...           for seed, share in ((0, 0.5), (0, 0.7), (1, 0.9))]
      >>> pool = pooled(tables)["x"]
      >>> pool.studies, {seed: round(row["accuracy"], 2) for seed, row in pool.rows.items()}
      ((0, 1, 2), {0: 0.5, 1000000: 0.7, 1: 0.9})
    """
    return {cell: _pool(cell, entries, tables) for cell, entries in _cells(tables).items()}


def shared(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables with the trainings of all studies in every entry whose cell several of them have.

    A study's own trainings come first and keep their seeds, so that they are paired with its other entries;
    ``pooled_from`` are the numbers of the other studies.

    Examples:
      >>> entry = {"cell": "x", "method": "dpsgd", "epsilon": 3.0}
      >>> tables = [{"entries": [{**entry, "seeds": 1, "by_seed": {str(seed): {"accuracy": 0.5}}}]} for seed in (0, 1)]
      >>> [(table["entries"][0]["seeds"], table["entries"][0]["pooled_from"]) for table in shared(tables)]
      [(2, [1]), (2, [0])]
    """
    cells = _cells(tables)

    def widened(entry: Mapping[str, Any], number: int) -> dict[str, Any]:
        others = [(other, twin) for other, twin in cells.get(str(entry.get("cell")), []) if other != number]
        if not others:
            return dict(entry)
        rows = _beside([entry, *(twin for _, twin in others)])
        by_seed = {str(seed): dict(row) for seed, row in rows.items()}
        return {**entry, "by_seed": by_seed, "seeds": len(rows), "pooled_from": [other for other, _ in others]}

    return [
        {**table, "entries": [widened(entry, number) for entry in table["entries"]]}
        for number, table in enumerate(tables)
    ]


def _cells(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return the entries of every cell with the numbers of their studies."""
    cells: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, table in enumerate(tables):
        for entry in table["entries"]:
            if entry.get("cell"):
                cells.setdefault(str(entry["cell"]), []).append((number, entry))
    return cells


def _beside(entries: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the trainings of equal cells, one by one."""
    rows: dict[int, Mapping[str, Any]] = {}
    for entry in entries:
        for seed, row in entry["by_seed"].items():
            number = int(seed)
            while number in rows:
                number += AGAIN
            rows[number] = row
    return rows


def _pool(cell: str, entries: Sequence[tuple[int, Mapping[str, Any]]], tables: Sequence[Mapping[str, Any]]) -> Pool:
    ratios = [tables[number].get("held_out_over_training") for number, _ in entries]
    known = [float(ratio) for ratio in ratios if ratio is not None]
    first = entries[0][1]
    return Pool(
        cell=cell,
        method=str(first["method"]),
        epsilon=first["epsilon"],
        studies=tuple(dict.fromkeys(number for number, _ in entries)),
        rows=_beside([entry for _, entry in entries]),
        split=Split(sum(known) / len(known) if known and len(known) == len(ratios) else None),
    )
