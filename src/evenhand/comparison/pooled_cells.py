"""Pools identical cells of several comparisons: same data, model, method, settings and promise, whatever their seeds.

Two studies that train the same thing are one larger study of it. Cells are told by ``summary.cell_digest``, which is
written into table.json. Trainings that share a seed are averaged, not counted twice.
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


@dataclass(frozen=True)
class Pool:
    """One cell with the evaluations of all studies that trained it.

    Attributes:
      cell: its digest.
      method: its name in the first study.
      epsilon: what was promised; None if it is not private.
      studies: numbers of the studies that have it, in the order given.
      rows: the last evaluation by seed.
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
      ((0, 1, 2), {0: 0.6, 1: 0.9})
    """
    cells: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, table in enumerate(tables):
        for entry in table["entries"]:
            if entry.get("cell"):
                cells.setdefault(str(entry["cell"]), []).append((number, entry))
    return {cell: _pool(cell, entries, tables) for cell, entries in cells.items()}


def shared(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables with the rows of all studies in every entry whose cell several of them have.

    Examples:
      >>> entry = {"cell": "x", "method": "dpsgd", "epsilon": 3.0}
      >>> tables = [{"entries": [{**entry, "seeds": 1, "by_seed": {str(seed): {"accuracy": 0.5}}}]} for seed in (0, 1)]
      >>> [table["entries"][0]["seeds"] for table in shared(tables)]
      [2, 2]
    """
    pools = pooled(tables)

    def widened(entry: Mapping[str, Any]) -> dict[str, Any]:
        pool = pools.get(str(entry.get("cell", "")))
        if pool is None or len(pool.studies) < 2:
            return dict(entry)
        rows = {str(seed): dict(row) for seed, row in pool.rows.items()}
        return {**entry, "by_seed": rows, "seeds": len(rows), "pooled_from": len(pool.studies)}

    return [{**table, "entries": [widened(entry) for entry in table["entries"]]} for table in tables]


def _pool(cell: str, entries: Sequence[tuple[int, Mapping[str, Any]]], tables: Sequence[Mapping[str, Any]]) -> Pool:
    by_seed: dict[int, list[Mapping[str, Any]]] = {}
    for _, entry in entries:
        for seed, row in entry["by_seed"].items():
            by_seed.setdefault(int(seed), []).append(row)
    ratios = [tables[number].get("held_out_over_training") for number, _ in entries]
    known = [float(ratio) for ratio in ratios if ratio is not None]
    split = Split(sum(known) / len(known) if known and len(known) == len(ratios) else None)
    first = entries[0][1]
    return Pool(
        cell=cell,
        method=str(first["method"]),
        epsilon=first["epsilon"],
        studies=tuple(dict.fromkeys(number for number, _ in entries)),
        rows={seed: _average(by_seed[seed]) for seed in sorted(by_seed)},
        split=split,
    )


def _average(values: Sequence[Any]) -> Any:
    """Return the mean of equal structures: numbers are averaged, tables by key, anything else is the first."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: _average([value[key] for value in values if key in value]) for key in first}
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return sum(numbers) / len(numbers) if numbers else first
