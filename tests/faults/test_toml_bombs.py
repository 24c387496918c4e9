"""TOML that would take minutes or gigabytes is refused before it is parsed, by its line and without its content."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from commands import evenhand
from evenhand import _toml
from evenhand.errors import UsageError
from evenhand.training.config import Config

CANARY = "anna.k@mail.org"
BOMBS = {
    "dotted key": b"a." * 50_000 + b"a = 1",
    "dotted key with spaces": b"a" + b" . a" * 50_000 + b" = 1",
    "dotted key in quotes": b'"a"' + b'."a"' * 50_000 + b" = 1",
    "dotted table": b"[a" + b".a" * 50_000 + b"]",
    "whole number": b"seed = " + b"9" * 100_000,
    "hexadecimal number": b"seed = 0x" + b"f" * 100_000,
    "real number": b"lr = 0." + b"9" * 1_000_000,
    "lists": b"labels = " + b"[" * 100_000,
    "inline tables": b"labels = " + b"{a=" * 100_000,
    "a long list": b"labels = [" + b"1," * 2**20 + b"]",
    "many tables": b"".join(b"[a%d]\n" % number for number in range(400_000)),
    "one long line": b"a" * _toml.LARGEST,
    "too large": b"#" * (_toml.LARGEST + 1),
    "a table of records": f"37,{CANARY},f,yes\n".encode() * 1000,
    "a name twice": f'"{CANARY}" = 1\n"{CANARY}" = 2\n'.encode(),
    "an odd character": f"data = {CANARY}\n".encode(),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_quickly_in_little_memory_and_without_its_content(name: str, tmp_path: Path) -> None:
    file = tmp_path / "people.toml"
    file.write_bytes(BOMBS[name])
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(UsageError) as refused:
            _toml.read(file)
        assert time.process_time() - started < 30  # many times slower while memory is watched, and machines differ
        assert tracemalloc.get_traced_memory()[1] < 60e6
    finally:
        tracemalloc.stop()
    assert CANARY not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("command", [("train",), ("compare",), ("plan", "--records", 100, "--budgets")])
def test_every_command_reads_toml_through_the_one_reader(command: tuple[object, ...], tmp_path: Path) -> None:
    file = tmp_path / "people.toml"
    file.write_bytes(BOMBS["dotted key"])
    done = evenhand(*command, file, cwd=tmp_path)
    assert done.returncode == 2
    assert "line 1: more than 16 levels" in done.stderr


def test_what_people_write_is_still_read() -> None:
    text = """
    data = "a.b.c.d/e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.csv"   # dots in text are no levels, nor [[[[[[[[[[[[[[[[[[[[
    labels = ["no", 'yes', '''long''', \"\"\"with "quotes" \\\\ inside\"\"\"]
    bounds = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]
    [columns."hours.per.week"]
    low = -1_000
    """
    assert _toml.parse(text.encode(), "people.toml")["bounds"][-1] == 1.9
    many = b"[budgets]\n" + b"".join(b"owner%d = 1.5\n" % number for number in range(100_000))
    assert len(_toml.parse(many, "budgets.toml")["budgets"]) == 100_000


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 4000, "a\0b"])
def test_names_that_no_disk_takes_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        _toml.read(Path(name))


def test_a_run_folder_or_data_file_with_a_name_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "people.toml").write_text(f'data = "{"x" * 300}.csv"\nlabel = "a"\n[columns.b]\nkind = "number"\n')
    for command in (("predict", "x" * 300, "people.csv"), ("resume", "x" * 300), ("train", "people.toml")):
        done = evenhand(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "not foreseen" not in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("train", "--data", "digits", "--epsilon", 3, "--out", "x" * 300), "cannot be written"),
        (("data", "--data-dir", "x" * 300), ""),
        (("doctor", "--model", "mlp", "--input-shape", "4", "--classes", "1" + "0" * 60), "at most"),
        (("keys", "new", "--out", "x" * 300), "needs a name"),
        (("report", "run", "--out", ""), "needs a name"),
        (("statement", "run", "--html", "/"), "needs a name"),
        (("plan", "--owners", "a=400,b=600", "--budgets", "nonsense"), "by owner"),
    ],
)
def test_numbers_and_names_without_measure_are_refused(command: tuple[object, ...], words: str, tmp_path: Path) -> None:
    done = evenhand(*command, cwd=tmp_path)
    assert done.returncode in (0, 2)
    assert words in done.stderr
    assert "not foreseen" not in done.stderr


def test_a_seed_of_the_split_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="split_seed"):
        Config(split_seed=-1)
