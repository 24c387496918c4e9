"""Identical cells of several comparisons are one larger study; others stay apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from evenhand.comparison import pooled_cells
from evenhand.comparison.compare import compare
from evenhand.comparison.summary import cell_digest
from evenhand.comparison.sweep import Sweep
from evenhand.training.config import Config

BASE = Config(epochs=1.0, model="linear")


def test_cells_are_told_by_everything_but_their_seeds() -> None:
    same = cell_digest(BASE, 3.0)
    other_seed = dataclasses.replace(BASE, seed=9, split_seed=4, insecure_seed=7, source={"split_seed": 4})
    assert cell_digest(other_seed, 3.0) == same
    for change in ({"lr": 0.9}, {"settings": {"bound": 0.5}}, {"delta": 1e-6}, {"model": "mlp"}, {"data": "mnist"}):
        assert cell_digest(dataclasses.replace(BASE, **change), 3.0) != same
    assert cell_digest(BASE, 1.0) != same
    drawn = [dataclasses.replace(BASE, seed=seed, source={"owner_seed": seed}) for seed in (3, 4)]
    assert cell_digest(drawn[0], 3.0) == cell_digest(drawn[1], 3.0)
    assert cell_digest(dataclasses.replace(drawn[0], source={"owner_seed": 8}), 3.0) != cell_digest(drawn[0], 3.0)


def test_two_comparisons_are_pooled_where_they_train_the_same(tmp_path: Path) -> None:
    first = Sweep(BASE, methods=("dpsgd",), epsilons=(3.0,), seeds=2)
    later = Sweep(dataclasses.replace(BASE, seed=2), methods=("dpsgd", "naive"), epsilons=(3.0,), seeds=1)
    for sweep, name in ((first, "a"), (later, "b")):
        assert compare(sweep, tmp_path / name, jobs=1, progress=False).failed == []
    tables = pooled_cells.read([tmp_path / "a", tmp_path / "b"])
    pools = {pool.method: pool for pool in pooled_cells.pooled(tables).values()}
    assert (pools["dpsgd"].studies, list(pools["dpsgd"].rows)) == ((0, 1), [0, 1, 2])
    assert (pools["naive"].studies, list(pools["naive"].rows)) == ((1,), [2])
    alone = float(tables[0]["entries"][0]["metrics"]["accuracy"]["value"])
    shares = [row["accuracy"] for row in pools["dpsgd"].rows.values()]
    assert pools["dpsgd"].share().value == pytest.approx(sum(shares) / 3)
    assert sum(shares[:2]) / 2 == alone
    wider = pooled_cells.shared(tables)
    assert [entry["seeds"] for table in wider for entry in table["entries"]] == [3, 3, 1]
