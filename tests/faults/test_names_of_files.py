"""Names that come from a file are printed if somebody declared them; the first line of some files is a record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cli.ways import TOML, people, spent
from commands import evenhand, result
from evenhand.data import Table
from evenhand.errors import UsageError

RECORD = ["37", "anna.k@mail.org", "f", "yes"]
WORDS = ["anna", "kiel", "married", "ill-since-may"]


@pytest.mark.parametrize("record", [RECORD, WORDS])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".npz", ".parquet"])
@pytest.mark.parametrize("flags", [(), ("--label", "ill"), ("--label", "ill", "--number", "age=0:9", "--json")])
def test_the_first_record_of_a_file_without_header_is_not_printed(
    record: list[str], suffix: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / f"people{suffix}"
    rows = [record, *people(60)]
    if suffix == ".npz":
        np.savez(file, **{name: np.array([row[at] for row in rows[1:]]) for at, name in enumerate(record)})
    elif suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({name: [row[at] for row in rows[1:]] for at, name in enumerate(record)}), file)
    else:
        file.write_text("\n".join(("\t" if suffix == ".tsv" else ",").join(row) for row in rows) + "\n")
    (tmp_path / "people.toml").write_text(TOML.replace("people.csv", file.name))
    init = evenhand("init", file.name, "--out", "new.toml", *flags, cwd=tmp_path)
    train = evenhand("train", "people.toml", "--epsilon", 3, "--out", "run", cwd=tmp_path)
    for done in (init, train):
        assert not any(len(cell) > 3 and cell in done.stdout + done.stderr for cell in record)
    assert train.returncode == 2
    assert "the header is missing" in train.stderr
    assert spent(tmp_path) == 0
    assert init.returncode == (0 if record is WORDS and not flags else 2)


def test_numbers_that_count_are_names_and_others_are_if_somebody_says_so(tmp_path: Path) -> None:
    file = tmp_path / "pixels.csv"
    file.write_text("0,1,2,3,label\n5,5,5,5,no\n")
    assert result("init", "pixels.csv", cwd=tmp_path)["undeclared"] == [1, 2, 3, 4, 5]
    file.write_text("2019,2020,label\n5,5,no\n")
    refused = evenhand("init", "pixels.csv", "--force", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--header" in refused.stderr
    said = evenhand("init", "pixels.csv", "--force", "--header", cwd=tmp_path)
    assert said.returncode == 0
    assert "2019" in said.stdout


def test_an_absent_column_is_told_by_number_unless_the_header_is_believed() -> None:
    table = Table({"age": ["31"], "cities": ["kiel"], "mood": ["good"]})
    with pytest.raises(UsageError, match="among the 3 of the file"):
        table.cells("city")
    with pytest.raises(UsageError, match="Did you mean 'cities'"):
        table.cells("citie", ("age", "mood"))
    with pytest.raises(UsageError) as refused:
        table.cells("weight", ("age", "mood"))
    assert "cities" not in str(refused.value)


def test_an_error_that_nobody_foresaw_quotes_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenhand.data import read_files

    def careless(path: Path, delimiter: str) -> None:
        raise ValueError("could not convert 'anna.k@mail.org' to a number")

    monkeypatch.setitem(read_files._FORMATS, ".csv", (careless, careless))
    done = evenhand("init", "people.csv", cwd=tmp_path)
    assert done.returncode == 1
    assert "anna" not in done.stderr
    assert "ValueError in" in done.stderr
