"""Owners, groups and budgets from the label, a column or a file beside the data, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from commands import evenhand, result
from evenhand.data import Data
from evenhand.data.owners_and_groups import Roles, assigned
from evenhand.errors import EvenhandError

SECRET = "alice-secret-4711"
QUICK = ("--epochs", 1, "--model", "linear", "--no-compose", "--least-records", 1)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("labelled") / "run"
    budgets = ",".join(f"{digit}={1 + digit % 3}" for digit in range(10))
    flags = ("--owners", "label", "--groups", "label", "--method", "idp_sample", "--set", "bound=0.5")
    return result("train", "--data", "digits", "--budgets", budgets, *flags, *QUICK, "--out", out), out


def test_the_label_as_owner(labelled: tuple[dict, Path]) -> None:
    found, out = labelled
    assert set(found["owners"]) == set(map(str, range(10)))
    for digit, row in found["owners"].items():
        assert row["budget"] == 1 + int(digit) % 3
        assert 0.99 * row["budget"] < row["epsilon"] <= row["budget"]
        assert row["recall"] == pytest.approx(found["group_accuracy"][digit])
    assert sum(row["records"] for row in found["owners"].values()) == 1265
    assert found["owners"]["8"]["records"] == 40
    assert json.loads((out / "plan.json").read_text())["levels"][0]["bound"] == 0.5


def test_statement_and_report_show_what_a_step_does_to_each_owner(labelled: tuple[dict, Path]) -> None:
    found, out = labelled
    statement = json.loads((out / "statement.json").read_text())
    page = (out / "report.html").read_text()
    words = (out / "statement.md").read_text()
    for row in statement["owners"]:
        rate = found["owners"][row["name"]]["rate"]
        assert row["rate"] == rate
        assert f"drawn with rate {rate:.4g}, clip bound 0.5, noise multiplier" in words
        assert f"<td>{rate:.4g}</td><td>0.5</td>" in page
    assert "Accuracy per owner" in page
    assert result("verify", out)["ok"]


def test_a_resumed_run_finds_its_owners_again(labelled: tuple[dict, Path]) -> None:
    _, out = labelled
    done = evenhand("resume", out)
    assert done.returncode == 3
    assert 'owners = "label"' in (out / "config.toml").read_text()


def written(folder: Path, kind: str, names: list[str]) -> Path:
    file = folder / f"owners.{kind}"
    if kind == "npy":
        np.save(file, np.array(names))
    else:
        file.write_text("".join(f"{line}\n" for line in (["who"] if kind == "csv" else []) + names))
    return file


@pytest.mark.parametrize("kind", ["txt", "csv", "npy"])
def test_a_file_of_names_in_the_order_of_the_data(kind: str, tmp_path: Path, digit_data: tuple[Data, Data]) -> None:
    train, test = digit_data
    names = [f"owner {row % 2}" for row in range(len(train) + len(test))]
    file = written(tmp_path, kind, names)
    first, second = assigned(train, test, Roles(owners=str(file)))
    assert first.facts.owners == (("owner 0", 633), ("owner 1", 632))
    assert [first.facts.owner_names[code] for code in first.owner.tolist()] == names[: len(train)]
    assert second is not None
    assert [second.facts.owner_names[code] for code in second.owner.tolist()] == names[len(train) :]
    short = written(tmp_path, kind, names[: len(train)])
    first, second = assigned(train, test, Roles(groups=str(short)))
    assert first.facts.groups == ("owner 0", "owner 1")
    assert "groups" in first.facts.derived
    assert second is test


def test_files_that_do_not_fit_are_refused_and_not_repeated(tmp_path: Path, digit_data: tuple[Data, Data]) -> None:
    train, test = digit_data
    objects, table, wide, latin = (tmp_path / name for name in ("o.npy", "t.csv", "w.npy", "l.txt"))
    np.save(objects, np.array([{SECRET: 1}] * len(train)))
    np.save(wide, np.zeros((len(train), 2)))
    table.write_text(f"a,b\n{SECRET},1\n")
    latin.write_bytes(b"\xff\n" * len(train))
    empty = written(tmp_path, "txt", [SECRET] * (len(train) - 1) + [" "])
    for file, words in (
        (written(tmp_path, "csv", [SECRET] * 7), "has 7 entries for 1265 training records"),
        (empty, "1 record(s), the first being record 1265, have no name"),
        (objects, "not a plain .npy array"),
        (wide, "one column"),
        (table, "has 2 columns"),
        (latin, "not UTF-8"),
        (tmp_path / "none.txt", "There is no file"),
        (tmp_path / "none.npy", "There is no file"),
        ("nobody", "neither a column of these data nor a file"),
    ):
        with pytest.raises(EvenhandError) as caught:
            assigned(train, test, Roles(owners=str(file)))
        assert words in str(caught.value)
        assert SECRET not in str(caught.value)


def test_a_file_of_budgets_by_record(tmp_path: Path) -> None:
    file = tmp_path / "epsilons.npy"
    np.save(file, np.linspace(1, 5, 1265))
    flags = ("--data", "digits", "--budgets", file, "--method", "idp_scale")
    found = result("train", *flags, *QUICK, "--out", tmp_path / "run")
    assert found["owners"] is None
    assert found["owners_summary"]["classes"] == 1265
    assert found["owners_summary"]["budget"]["most"] == 5
    assert found["owners_summary"]["epsilon"]["most"] <= 5
    assert len(Path(found["owners_table"]).read_text().splitlines()) == 1266
    done = evenhand("train", *flags, *QUICK, "--out", tmp_path / "words")
    assert len(done.stdout) < 15_000, "readable"
    text = (tmp_path / "run" / "report.html").read_text()
    assert "1265 owner classes" in text
    assert len(text) < 400_000
    shown = evenhand("plan", *flags, "--epochs", 1)
    assert "1265 owner classes" in shown.stdout, shown.stderr


def test_own_files_with_columns_of_owners_and_of_budgets(tmp_path: Path) -> None:
    rows = [f"{20 + n * 7 % 60},{'ab'[n % 2]},{1 + n % 3},{'yes' if n * 7 % 60 > 30 else 'no'}" for n in range(120)]
    (tmp_path / "people.csv").write_text("\n".join(["age,who,promise,ill", *rows]) + "\n")
    (tmp_path / "people.toml").write_text(
        'data = "people.csv"\nlabel = "ill"\nlabels = ["no", "yes"]\nbatch_size = 20\n'
        '[columns.age]\nkind = "number"\nlow = 0\nhigh = 100\n'
        '[columns.who]\nkind = "category"\nvalues = ["a", "b"]\nfeature = false\n'
    )
    flags = ("train", "people.toml", "--method", "idp_sample", *QUICK)
    by_record = result(*flags, "--budgets", "promise", "--out", "r", cwd=tmp_path)
    assert {name: row["budget"] for name, row in by_record["owners"].items()} == {"1": 1, "2": 2, "3": 3}
    assert all(row["recall"] is not None for row in by_record["owners"].values())
    (tmp_path / "budgets.toml").write_text("[budgets]\nno = 2\nyes = 1\n")
    by_label = result(*flags, "--owners", "label", "--budgets", "budgets.toml", "--out", "l", cwd=tmp_path)
    assert {name: row["budget"] for name, row in by_label["owners"].items()} == {"no": 2, "yes": 1}
    by_column = result(*flags, "--owners", "who", "--budgets", "a=1,b=2", "--out", "c", cwd=tmp_path)
    assert set(by_column["owners"]) == {"a", "b"}
    (tmp_path / "who.txt").write_text("".join(f"{'xy'[n % 2]}\n" for n in range(120)))
    by_file = result(*flags, "--owners", "who.txt", "--budgets", "x=1,y=2", "--out", "f", cwd=tmp_path)
    assert {name: row["recall"] is not None for name, row in by_file["owners"].items()} == {"x": True, "y": True}
    for more, words in (
        (("--budgets", "nobody"), "no such column"),
        (("--owners", "who", "--budgets", "promise"), "record_budgets alone"),
        (("--owners", "who", "--budgets", "a=1"), "1 owner(s) have no budget"),
    ):
        refused = evenhand(*flags, *more, "--out", "x", cwd=tmp_path)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert not (tmp_path / "x").exists()
