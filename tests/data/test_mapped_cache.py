"""A Parquet file that is mapped gives the records of one that is read, and whatever is wrong with it is one line."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from commands import evenhand, result
from evenhand.data import Category, Declaration, Number, read, read_files
from evenhand.data.fingerprint import fingerprint
from evenhand.data.large import mapped_cache
from evenhand.data.persons import by_person, capped
from evenhand.data.tables import split
from evenhand.errors import DataError, UsageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = {"age": Number(0, 100), "sex": Category(("f", "m")), "site": Category(("b", "a", "c"), feature=False)}
PEOPLE = Declaration(COLUMNS, label="ill", labels=("no", "yes"), groups="sex", owners="site")
ROWS = 1000


def written(folder: Path, **changes: Any) -> Path:
    """People in row groups of 256, in one file."""
    draw = np.random.default_rng(0)
    columns = {
        "age": draw.integers(0, 100, ROWS),
        "sex": np.array(["f", "m"])[draw.integers(0, 2, ROWS)],
        "site": np.array(["a", "c", "b"])[np.minimum(np.arange(ROWS) // 300, 2)],
        "ill": np.array(["no", "yes"])[(np.arange(ROWS) > 700).astype(int)],
        **changes,
    }
    path = folder / "people.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=256)
    return path


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_cache, "STRETCH", 128)


@pytest.mark.parametrize(
    "declared",
    [
        PEOPLE,
        Declaration(COLUMNS, label="ill", labels=("no", "yes"), groups="sex,site"),
        Declaration({"sex": Category(("f", "m")), "age": Number(0, 100)}, label="age", labels=(), groups="sex"),
        Declaration({"age": Number(0, 100)}, label="ill", labels=("yes", "no"), ordered=True),
    ],
    ids=["owners", "crossed groups", "real target", "ordered"],
)
def test_mapped_records_are_those_in_memory(declared: Declaration, tmp_path: Path) -> None:
    path = written(tmp_path)
    memory, mapped = read(path, declared), read(path, declared, mapped=True, cache=tmp_path / "cache")
    again = read(path, declared, mapped=True, cache=tmp_path / "cache")
    rows = torch.arange(ROWS).flip(0)
    for data in (mapped, again):
        assert data.facts == memory.facts
        assert data.origin == memory.origin
        for one, other in zip(data.fetch(rows), memory.fetch(rows), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert torch.equal(data.group, memory.group)
        assert torch.equal(data.owner, memory.owner)


def test_persons_of_mapped_records_are_those_in_memory(tmp_path: Path) -> None:
    path, whose = written(tmp_path, who=np.arange(ROWS) * 7 % 180), {"label": "ill", "labels": ("no", "yes")}
    declared = Declaration(COLUMNS, **whose, keep_together="who")
    memory, mapped = (read(path, declared, mapped=way, cache=tmp_path / "cache") for way in (False, True))
    assert torch.equal(mapped.together, memory.together)
    assert mapped.together_by == memory.together_by == "who"
    assert mapped.partition() == memory.partition()
    assert fingerprint(mapped) == fingerprint(memory), "runs on either add up"
    sides = [split(data, 0.3, 0) for data in (memory, mapped)]
    one, two = (by_person(train, train.together, 3) for train, _ in sides)
    assert one.facts == two.facts
    assert torch.equal(one.as_drawn.fetch(torch.arange(50))[0], two.as_drawn.fetch(torch.arange(50))[0])
    few = [capped(train, train.together, 3) for train, _ in sides]
    assert few[0].facts == few[1].facts
    assert torch.equal(*(data.fetch(torch.arange(50))[0] for data in few))
    for data, name in ((two, "run"), (few[1], "capped")):
        run = eh.fit(nn.Linear(3, 2), data, epsilon=2.0, delta=1e-3, epochs=1, out=tmp_path / name)
        assert eh.verify(run.path)["ok"]
        assert run.plan.unit == "person"
    nobody = written(tmp_path, who=np.array(["x"] * 999 + [""]))
    with pytest.raises(DataError, match=r"Among records 897 to 1000 of the file.*have no name"):
        read(nobody, declared, mapped=True, cache=tmp_path / "cache")


def test_a_large_file_is_trained_on_by_person_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    written(tmp_path, who=np.arange(ROWS) * 7 % 180)
    init = ("init", "people.parquet", "--label", "ill", "--labels", "no,yes", "--number", "age=0:100")
    assert evenhand(*init, "--only-declared", cwd=tmp_path).returncode == 0
    monkeypatch.setattr(read_files, "LIMIT", 1000)
    asked = ("--persons", "who", "--epsilon", "3", "--delta", "1e-3", "--epochs", "1", "--batch-size", "20")
    for name, way in (("run", ()), ("capped", ("--person-cap", "3"))):
        done = evenhand("train", "people.toml", *asked, *way, "--model", "linear", "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "home" / "evenhand" / "mapped").glob("*/together.npy"))
        assert result("statement", tmp_path / name)["guarantee"]["unit"] == "person"


def test_several_labels_are_mapped(tmp_path: Path) -> None:
    path = written(tmp_path, cough=np.arange(ROWS) % 2, fever=(np.arange(ROWS) % 3 == 0).astype(int))
    declared = Declaration({"age": Number(0, 100)}, label="cough,fever", labels=("0", "1"))
    memory, mapped = read(path, declared), read(path, declared, mapped=True, cache=tmp_path / "cache")
    assert mapped.facts == memory.facts
    assert torch.equal(mapped.fetch(torch.arange(ROWS))[1], memory.fetch(torch.arange(ROWS))[1])


def test_a_run_on_mapped_records_is_verified(tmp_path: Path) -> None:
    data = read(written(tmp_path), PEOPLE, mapped=True, cache=tmp_path / "cache")
    run = eh.fit(nn.Linear(3, 2), data, epsilon=2.0, epochs=1, out=tmp_path / "run")
    assert eh.verify(run.path)["ok"]


def test_only_the_owner_may_read_the_arrays(tmp_path: Path) -> None:
    read(written(tmp_path), PEOPLE, mapped=True, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.glob("*.*y")}
    assert set(modes.values()) == {0o600}
    assert set(modes) == {"inputs.npy", "targets.npy", "groups.npy", "owners.npy"}


def test_a_file_that_changed_is_converted_again(tmp_path: Path) -> None:
    read(written(tmp_path), PEOPLE, mapped=True, cache=tmp_path / "cache")
    other = read(written(tmp_path, age=np.full(ROWS, 7)), PEOPLE, mapped=True, cache=tmp_path / "cache")
    assert other.fetch(torch.tensor([5]))[0][0, 0].item() == pytest.approx(
        read(tmp_path / "people.parquet", PEOPLE).fetch(torch.tensor([5]))[0][0, 0].item()
    )
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_file_too_large_for_memory_is_mapped_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = written(tmp_path)
    monkeypatch.setattr(read_files, "LIMIT", 1000)
    assert len(read(path, PEOPLE)) == ROWS
    assert list((tmp_path / "home" / "evenhand" / "mapped").iterdir())
    with pytest.raises(DataError, match="the limit is"):
        read(path, PEOPLE, mapped=False)


def test_a_damaged_second_row_group_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"people.parquet cannot be read after record \d+: a row group is damaged"):
        read(path, PEOPLE, mapped=True, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert [file.name for file in folder.iterdir() if file.suffix in (".npy", ".json", ".part")] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sex": np.array(["f"] * 999 + ["x"])}, r"Among records 897 to 1000 of the file.*'sex': 1 record"),
        ({"ill": np.array(["no"] * ROWS)}, "All records have the same label"),
        ({"age": np.array(["old"] * ROWS)}, r"Among records 1 to 128 of the file.*'age'"),
    ],
)
def test_what_does_not_fit_is_one_line_without_values(changes: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words) as told:
        read(written(tmp_path, **changes), PEOPLE, mapped=True, cache=tmp_path / "cache")
    assert "\n" not in str(told.value)
    assert "'x'" not in str(told.value)


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("age,ill\n1,no\n2,yes\n")
    with pytest.raises(UsageError, match="only these are mapped"):
        read(tmp_path / "people.csv", PEOPLE, mapped=True)
    declared = Declaration(COLUMNS, label="ill", labels=("no", "yes"), budgets="age")
    with pytest.raises(UsageError, match="budgets need all records"):
        read(written(tmp_path), declared, mapped=True)
