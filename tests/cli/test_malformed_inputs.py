"""Malformed inputs: a clear message, exit code 2, nothing spent, and no data value printed."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ways import CANARY, HEADER, TOML, evenhand, people, spent, train, write

from evenhand.data import read_files

Case = tuple[Callable[[Path], None], str]
CASES: dict[str, Case] = {}


def case(words: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def known(function: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES[function.__name__] = (function, words)
        return function

    return known


def cells(name: str, value: str, words: str, column: int, row: int = 5) -> None:
    """A case in which one cell is wrong."""

    def changed(folder: Path) -> None:
        rows = people()
        rows[row][column] = value
        write(folder, rows)

    CASES[name] = (changed, words)


def declared(name: str, old: str, new: str, words: str) -> None:
    """A case in which the TOML is wrong."""
    assert old in TOML
    CASES[name] = (lambda folder: write(folder, toml=TOML.replace(old, new)), words)


def raw(name: str, data: bytes | Callable[[bytes], bytes], words: str) -> None:
    """A case in which the bytes of the file are wrong."""

    def changed(folder: Path) -> None:
        write(folder)
        file = folder / "people.csv"
        file.write_bytes(data if isinstance(data, bytes) else data(file.read_bytes()))

    CASES[name] = (changed, words)


def other(name: str, suffix: str, data: Callable[[], bytes], words: str) -> None:
    """A case in which the data are a file of another kind."""

    def changed(folder: Path) -> None:
        write(folder, toml=TOML.replace("people.csv", f"people{suffix}"))
        (folder / f"people{suffix}").write_bytes(data())

    CASES[name] = (changed, words)


raw("utf_16", lambda data: data.decode().encode("utf-16"), "UTF-16")
raw("utf_16_without_mark", lambda data: data.decode().encode("utf-16-le"), "NUL bytes")
raw("latin_1", lambda data: data.replace(b"north", "nörth".encode("latin-1")), "not UTF-8 (first on line 2)")
raw("nul_bytes", lambda data: data.replace(b"north", b"no\0th"), "NUL bytes")
raw("binary_garbage", bytes(range(1, 256)) * 40 + CANARY.encode(), "not UTF-8")
raw("empty_file", b"", "is empty")
raw("mark_and_nothing_else", b"\xef\xbb\xbf", "is empty")
raw("header_only", ",".join(HEADER).encode() + b"\n", "no records")
raw("ragged_row", lambda data: data + f"1,north,{CANARY}\n".encode(), "line 82: 3 fields where the header has 4")
raw("unclosed_quote", lambda data: data + f'1,north,"{CANARY},no\n'.encode(), "not closed")
raw("text_after_a_quote", lambda data: data + f'1,north,"{CANARY}"x,no\n'.encode(), "near line 82")
raw("a_cell_without_end", lambda data: data + b"1,north," + CANARY.encode() * 20_000 + b",no\n", "too long")
raw("wrong_delimiter", lambda data: data.replace(b",", b";"), "There is no column called 'age' among the 1")
cells("unseen_category", CANARY, "[columns.city]", 1)
cells("quoted_newline_in_a_category", f'"north\n{CANARY}"', "not declared", 1)
cells("undeclared_label", CANARY, "Column 'ill'", 3)
cells("missing_category", "", "'city': 1 record(s), the first being record 6, have no value", 1)
cells("missing_number", "", 'missing = "middle"', 0)
cells("nan", "nan", "no finite number", 0)
cells("infinity", "-inf", "no finite number", 0)
cells("huge_integer", "9" * 5000, "no finite number", 0)
cells("thousands_separator", '"1,234"', "no thousands separators", 0)
cells("python_number", "1_0", "no finite number", 0)
cells("words_for_a_number", CANARY, "record 6", 0)
cells("formula_for_a_number", f'"=HYPERLINK(""{CANARY}"")"', "no finite number", 0)
cells("formula_for_a_category", f"=cmd|{CANARY}", "not declared", 1)


@case("Column 'ill', the label, has missing values")
def labels_missing_from_one_group(folder: Path) -> None:
    write(folder, [[*row[:3], "" if row[1] == "south" else row[3]] for row in people()])


@case("same label")
def one_class_only(folder: Path) -> None:
    write(folder, [[*row[:3], "no"] for row in people()])


@case("same label")
def one_record(folder: Path) -> None:
    write(folder, people(1))


@case("leaves no record")
def too_few_to_hold_out(folder: Path) -> None:
    write(folder, toml=TOML.replace("epochs", "test_share = 1e-9\nepochs"))


for name, header, words in (
    ("duplicate_columns", ["age", "age", "name", "ill"], "Columns 1 and 2 have the same name"),
    ("column_without_name", ["age", "", "name", "ill"], "Column 2 has no name"),
    ("formula_in_header", ["age", "=1+1", "name", "ill"], "name of column 2"),
    ("control_character_in_header", ["age", "ci\x07ty", "name", "ill"], "name of column 2"),
    ("label_column_absent", ["age", "city", "name", "sick"], "no column called 'ill'"),
    ("group_column_absent", ["age", "town", "name", "ill"], "no column called 'city'"),
):
    CASES[name] = (lambda folder, header=header: write(folder, header=header), words)

declared("low_above_high", "low = 0", "low = 200", "[columns.age]: low=200 is not below high=100")
declared("low_equals_high", "low = 0", "low = 100", "not below")
declared("bound_not_finite", "high = 100", "high = inf", "[columns.age]: high=inf")
declared("bound_not_a_number", "high = 100", "high = nan", "high=nan")
declared("bound_too_large", "high = 100", "high = 1e400", "[columns.age]")
declared("bound_from_data", "high = 100", 'high = "from data"', "looks at private records".replace("looks", "look"))
declared("bound_left_open", "high = 100", "", "high not declared")
declared("categories_from_data", '["north", "south"]', '"from data"', "refused")
declared("duplicate_categories", '"south"]', '"south", "south"]', "declared twice")
declared("no_categories", '["north", "south"]', "[]", "values is empty")
declared("one_label", '["no", "yes"]', '["no"]', "at least two")
declared("labels_not_a_list", '["no", "yes"]', '"no"', "takes a list")
declared("labels_of_wrong_type", '["no", "yes"]', "[0.5, 1.5]", "names or whole numbers")
declared("unknown_key", "epochs", "epoch", "Did you mean 'epochs'")
declared("unknown_column_key", "low = 0", "lowest = 0", "Did you mean 'low'")
declared("unknown_kind", '"number"', '"numbr"', "Did you mean 'number'")
declared("kind_left_open", 'kind = "number"', "", "has no kind")
declared("wrong_type", "epochs = 1", 'epochs = "one"', "takes a number")
declared("wrong_type_of_switch", "low = 0", "low = true", "must be a number")
declared("column_is_not_a_table", "[columns.age]", "[columns]\nname = 3\n[columns.age]", "must be a table")
declared("unknown_choice_for_missing", "high = 100", 'high = 100\nmissing = "mean"', "'middle'")
declared("groups_not_declared", 'groups = "city"', 'groups = "name"', "used for groups")
declared("label_as_feature", "[columns.age]", "[columns.ill]", "given the answer")
declared("delimiter_of_two", "epochs", 'delimiter = ";;"\nepochs', "one character")
declared("share_of_everything", "epochs", "test_share = 1.0\nepochs", "test_share=1")
declared("huge_setting", "epochs = 1", "epochs = 1" + "0" * 400, "more than 256 characters")
declared("nul_in_a_file_name", "people.csv", "people\\u0000.csv", "NUL character")
declared("not_toml", "label", "label label", "not valid TOML")
declared("no_such_file", "people.csv", "nobody.csv", "There is no file")
declared("unknown_format", "people.csv", "people.xlsx", ".parquet")
declared("test_file_absent", "epochs", 'test_data = "nobody.csv"\nepochs', "There is no file")


@case("is a folder")
def folder_instead_of_file(folder: Path) -> None:
    write(folder)
    (folder / "people.csv").unlink()
    (folder / "people.csv").mkdir()


@case("not an ordinary file")
def pipe_instead_of_file(folder: Path) -> None:
    write(folder)
    (folder / "people.csv").unlink()
    os.mkfifo(folder / "people.csv")


@case("cannot be read")
def unreadable_file(folder: Path) -> None:
    write(folder)
    (folder / "people.csv").unlink()
    (folder / "people.csv").symlink_to("people.csv")


def archive(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return made.getvalue()


def npy(array: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array(made, array, allow_pickle=True)
    return made.getvalue()


def swollen() -> bytes:
    """An archive whose directory declares 3.8 GiB for a member of a few bytes."""
    data = bytearray(archive({"age.npy": npy(np.zeros(9))}))
    place = data.rindex(b"PK\x01\x02") + 24
    data[place : place + 4] = struct.pack("<I", 0xF000_0000)
    return bytes(data)


def claims_too_much() -> bytes:
    """A small array whose header declares a terabyte."""
    head = str({"descr": "<f8", "fortran_order": False, "shape": (2**37,)}).ljust(117) + "\n"
    return archive({"age.npy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()})


class Payload:
    def __reduce__(self) -> tuple:
        return (os.mkdir, ("executed",))


other("npz_pickled", ".npz", lambda: archive({"age.npy": npy(np.array([Payload()], dtype=object))}), "never loaded")
other("npz_objects", ".npz", lambda: archive({"age.npy": npy(np.array([CANARY, 1], dtype=object))}), "executes code")
other("npz_path_traversal", ".npz", lambda: archive({"../../age.npy": npy(np.zeros(9))}), "named like a path")
other("npz_bomb", ".npz", swollen, "was not unpacked")
other("npz_bomb_in_a_header", ".npz", claims_too_much, "was not unpacked")
other("npz_garbage", ".npz", lambda: CANARY.encode() * 99, "not a readable NPZ file")
other("npz_member_garbage", ".npz", lambda: archive({"age.npy": CANARY.encode() * 9}), "not a readable NPZ file")
other("npz_lengths", ".npz", lambda: archive({"a.npy": npy(np.ones(3)), "b.npy": npy(np.ones(4))}), "different lengths")
other("parquet_garbage", ".parquet", lambda: b"PAR1" + CANARY.encode() * 99 + b"PAR1", "not a readable Parquet file")
other("parquet_empty", ".parquet", lambda: b"", "not a readable Parquet file")


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_input_is_refused_without_spending_or_telling(name: str, tmp_path: Path) -> None:
    prepare, words = CASES[name]
    prepare(tmp_path)
    done = train(tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert spent(tmp_path) == 0
    assert not (tmp_path / "executed").exists()


def test_there_are_more_than_forty() -> None:
    assert len(CASES) > 40


def test_a_true_bomb_is_refused_by_its_declared_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "LIMIT", 2**20)
    write(tmp_path, toml=TOML.replace("people.csv", "people.npz"))
    (tmp_path / "people.npz").write_bytes(archive({"age.npy": npy(np.zeros(2**20))}))
    assert (tmp_path / "people.npz").stat().st_size < 2**14
    done = train(tmp_path)
    assert done.returncode == 2
    assert "was not unpacked" in done.stderr


@pytest.mark.parametrize("name", ["unseen_category", "words_for_a_number", "latin_1", "ragged_row", "nul_bytes"])
def test_new_records_are_checked_like_the_training_records(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    assert train(tmp_path, "--json").returncode == 0
    (tmp_path / "people.csv").rename(tmp_path / "good.csv")
    CASES[name][0](tmp_path)
    done = evenhand("predict", "run", "people.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert CASES[name][1] in done.stderr
    assert CANARY not in done.stdout + done.stderr
