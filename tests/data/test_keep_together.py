"""Records of one person are on one side of every split; the promise stays about one record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import evenhand as eh
from commands import evenhand, result
from evenhand.comparison import sweep as sweeps
from evenhand.comparison.run_cell import Validation, loaded
from evenhand.data.tables import split
from evenhand.errors import DataError, UsageError
from evenhand.training.config import from_toml

PERSONS = np.repeat(np.arange(60), np.arange(60) % 5 + 1)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    rows = [f"{draw.integers(0, 100)},{'no' if draw.random() < 0.5 else 'yes'},person {p}" for p in PERSONS]
    draw.shuffle(rows)
    (tmp_path / "people.csv").write_text("age,ill,who\n" + "\n".join(rows) + "\n")
    assert evenhand(
        *("init", "people.csv", "--label", "ill", "--labels", "no,yes", "--number", "age=0:100", "--only-declared"),
        cwd=tmp_path,
    )
    return tmp_path / "people.toml"


def sides(*parts: eh.data.Data) -> list[set[int]]:
    return [set(part.together.tolist()) for part in parts]


def test_a_split_keeps_equal_names_together() -> None:
    data = eh.data.wrap(np.zeros((len(PERSONS), 1)), PERSONS % 2, keep_together=PERSONS)
    for seed in range(5):
        train, test = split(data, 0.3, seed)
        once, other = sides(train, test)
        assert not once & other
        assert len(once | other) == 60
        assert len(train) + len(test) == len(data)
        assert not set.intersection(*sides(*split(train, 0.3, seed))), "the part that tuning is scored on, too"
    plain = eh.data.wrap(np.zeros((len(PERSONS), 1)), PERSONS % 2)
    assert len(split(plain, 0.3, 0)[1]) == int((np.random.default_rng([0, 20]).random(len(plain)) < 0.3).sum()), (
        "splits of runs before this setting stay the same"
    )


def test_one_person_more_changes_nobody_elses_side() -> None:
    """A promise about a person is about nothing if the others' records are trained on or not as that person comes."""
    names = [f"person {p}" for p in PERSONS]
    for role in ("persons", "keep_together"):
        for more in (["new person"], ["a", "zz"], ["b"] * 20):
            labels, every = [*(PERSONS % 2), *[0] * len(more)], {role: [*names, *more]}
            one = eh.data.wrap(np.zeros((len(names), 1)), PERSONS % 2, **{role: names})
            two = eh.data.wrap(np.zeros((len(labels), 1)), labels, **every)
            fewer, all_of_them = (sides(*split(data, 0.3, 4)) for data in (one, two))
            new = all_of_them[0] ^ fewer[0] | all_of_them[1] ^ fewer[1]
            assert len(new) == len(set(more)), "only the new names are new on either side"


def test_from_a_file_to_the_resampled_splits_of_a_comparison(table: Path) -> None:
    text = table.read_text().replace("keep_together", "") + ""
    table.write_text('keep_together = "who"\n' + text)
    train, test = from_toml(table).load_data()
    assert not set.intersection(*sides(train, test))
    cells = sweeps.from_toml(table, {"split": "resampled", "seeds": 3, "methods": ["dpsgd"]}).cells()
    parts = [loaded(cell) for cell in cells]
    assert all(not set.intersection(*sides(*part)) for part in parts)
    assert len({frozenset(sides(part[1])[0]) for part in parts}) == 3
    assert not set.intersection(*sides(*loaded(cells[0], Validation(0.3, 7))))


def test_the_promise_stays_about_one_record_and_says_so(table: Path, tmp_path: Path) -> None:
    done = evenhand(
        *("train", "people.toml", "--keep-together", "who", "--epsilon", "3", "--epochs", "1", "--model", "linear"),
        *("--out", "run"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "several records of one person are not covered together" in " ".join(done.stderr.split())
    statement = result("statement", tmp_path / "run")
    assert statement["guarantee"]["unit"] == "one record"
    assert any("several records of one person" in text for text in statement["does_not_cover"])
    shared = [file for file in (tmp_path / "run").iterdir() if file.is_file()]
    assert not [file for file in shared if b"person 1" in file.read_bytes()], "names of persons are in no file"


def test_wrong_uses_are_refused(table: Path) -> None:
    config = from_toml(table)
    with pytest.raises(DataError, match="no name that says whose they are"):
        eh.data.wrap(torch.zeros(2, 1), [0, 1], keep_together=["a", ""])
    with pytest.raises(DataError, match="one per record"):
        eh.data.wrap(torch.zeros(2, 1), [0, 1], keep_together=["a"])
    with pytest.raises(UsageError, match="learns who is who"):
        from_toml_with(config, keep_together="age").load_data()
    with pytest.raises(DataError):
        from_toml_with(config, keep_together="nobody").load_data()
    with pytest.raises(UsageError, match="file of your own"):
        from_toml_with(config, data="digits", keep_together="who").load_data()
    both = from_toml_with(config, keep_together="who", test_data=config.data)
    with pytest.raises(DataError, match="60 of 60 names"):
        both.load_data()


def from_toml_with(config: object, **changes: object) -> object:
    from dataclasses import replace

    return replace(config, **changes)  # type: ignore[type-var]


def test_a_column_of_a_frame() -> None:
    frame = eh.data.Table({"age": list(range(8)), "ill": ["no", "yes"] * 4, "who": ["a", "a", "b", "b"] * 2})
    data = eh.data.wrap(frame, label="ill", numbers={"age": (0, 10)}, keep_together="who")
    assert len(data.together.unique()) == 2
