"""Arrays that are mapped from files give the records of equal arrays in memory, and stay in their files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenhand.data import arrays, wrap
from evenhand.data.arrays import coded
from evenhand.errors import DataError, ForeignLoaderError

ROWS = torch.tensor([3, 0, 3, 8])


def on_disk(folder: Path, values: Any, name: str = "x") -> Any:
    np.save(folder / f"{name}.npy", values)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2", "u1", "<i2", "<i8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_mapped_inputs_are_those_in_memory(tmp_path: Path, kind: str, order: Any) -> None:
    values = np.asarray(np.random.default_rng(0).integers(0, 100, (9, 2, 3)), dtype=kind, order=order)
    mapped, plain = wrap(on_disk(tmp_path, values), [0, 1, 0] * 3), wrap(values.astype(kind[-2:]), [0, 1, 0] * 3)
    assert mapped.facts == plain.facts
    for rows in (ROWS, torch.empty(0, dtype=torch.long)):
        (x, y), (u, v) = mapped.fetch(rows), plain.fetch(rows)
        assert x.dtype == u.dtype
        assert torch.equal(x, u)
        assert torch.equal(y, v)


@pytest.mark.parametrize(
    "targets",
    [
        np.arange(9) % 4,
        np.arange(9) % 2 == 0,
        np.linspace(0, 1, 9),
        np.eye(9, 3, dtype=np.int16),
        np.arange(27).reshape(9, 3),
        np.ones((9, 1)),
        np.array(["b", "a", "c"] * 3),
    ],
)
def test_mapped_targets_are_those_in_memory(tmp_path: Path, targets: Any) -> None:
    x = np.zeros((9, 2), dtype=np.float32)
    mapped, plain = wrap(x, on_disk(tmp_path, targets)), wrap(x, targets)
    assert mapped.facts == plain.facts
    assert mapped.fetch(ROWS)[1].dtype == plain.fetch(ROWS)[1].dtype
    assert torch.equal(mapped.fetch(ROWS)[1], plain.fetch(ROWS)[1])


def test_bad_mapped_arrays_are_refused_like_others(tmp_path: Path) -> None:
    for x, y, told in (
        (np.zeros((0, 2)), np.zeros(0), "no records"),
        (np.zeros((3, 2)), np.zeros(2), "3 inputs but 2 targets"),
        (np.array([["a"], ["b"]]), np.zeros(2), "not a number"),
        (np.zeros((2, 1)), np.array([[0, 2], [1, 1]]), "neither 0 nor 1"),
    ):
        labels = ["a", "b"] if "neither" in told else None
        with pytest.raises(DataError, match=told):
            wrap(on_disk(tmp_path, x), on_disk(tmp_path, y, "y"), labels=labels)


def test_codes_of_blocks_are_those_of_the_whole_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "BLOCK", 7)
    random = np.random.default_rng(0)
    for column in (random.integers(-3, 9, 100), random.integers(0, 2, 100) > 0, np.array(["no", "yes"] * 50)):
        codes, names = coded(column, None, 100, "targets")
        assert [names[code] for code in codes.tolist()] == [str(value) for value in column.tolist()]
        again = coded(column.tolist(), None, 100, "targets")
        assert torch.equal(codes, again[0])
        assert names == again[1]
        assert torch.equal(coded(column, names[::-1], 100, "targets")[0], len(names) - 1 - codes)


def test_ten_million_names_make_no_ten_million_objects() -> None:
    column = np.arange(1_000_000) % 3
    tracemalloc.start()
    codes, names = coded(column, None, len(column), "owners")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(codes), names) == (1_000_000, ("0", "1", "2"))
    assert peak < 32 * arrays.BLOCK + 1_000_000, "blocks, and nothing for every record but the codes, which torch keeps"


def test_a_stream_is_refused_with_what_to_do_instead() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(1), 0)])

    with pytest.raises(ForeignLoaderError, match=r"Parquet.*mmap_mode='r'"):
        wrap(Stream())
