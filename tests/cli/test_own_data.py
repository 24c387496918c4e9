"""From a file of one's own to a model, a report and predictions."""

from __future__ import annotations

import csv
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from ways import CANARY, HEADER, TOML, done, evenhand, people, train, write

import evenhand as eh
from evenhand.data import Category, Declaration, Number, Table, from_frame
from evenhand.runs.folder import Folder
from evenhand.training.config import from_toml, to_toml
from evenhand.training.goals.predict import predict, preprocessing

INIT = ["--label", "ill", "--labels", "no,yes", "--groups", "city", "--number", "age=0:100", "--drop", "name"]


def test_init_train_predict_in_one_sitting(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "people.toml").unlink()
    made = done("init", "people.csv", *INIT, "--category", "city=north,south", cwd=tmp_path)
    assert made == {"config": "people.toml", "columns": len(HEADER), "undeclared": []}
    found = done("train", "people.toml", "--epsilon", 3, "--epochs", 2, "--out", "run", cwd=tmp_path)
    assert set(found["groups"]) == {"north", "south"}
    assert found["epsilon"] <= 3
    assert (tmp_path / "run" / "report.html").exists()
    (tmp_path / "new.csv").write_text("age,city\n20,north\n60,south\n")
    assert done("predict", "run", "new.csv", "--out", "p.csv", cwd=tmp_path)["records"] == 2
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert {row["prediction"] for row in rows} <= {"no", "yes"}
    assert all(abs(float(row["probability of no"]) + float(row["probability of yes"]) - 1) < 1e-5 for row in rows)


def test_init_reads_the_header_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_bytes((",".join(HEADER) + "\n").encode() + b"\xff\xfe not text at all \0")
    done("init", "people.csv", *INIT, cwd=tmp_path)
    text = (tmp_path / "people.toml").read_text()
    assert "no value was read" in text
    assert '# kind = "category"' in text
    refused = train(tmp_path)
    assert refused.returncode == 2
    assert "[columns.city] has no kind" in refused.stderr


def test_init_asks_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    (tmp_path / "people.toml").unlink()
    answers = io.StringIO("yes\nill\nno,yes\ncity\n0:100\nnorth,south\n-\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", answers)
    assert evenhand("init", "people.csv", cwd=tmp_path).returncode == 0
    made = from_toml(tmp_path / "people.toml")
    assert made.label == "ill"
    assert dict(made.columns["age"]) == {"kind": "number", "low": 0, "high": 100, "missing": "refuse"}
    assert made.columns["city"]["values"] == ["north", "south"]
    assert "name" not in made.columns
    assert train(tmp_path, "--json").returncode == 0


def test_init_asks_again_after_a_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    (tmp_path / "people.toml").unlink()
    replies = ["perhaps", "yes", "il", "ill", "no", "no,yes", "town", "city", "0-100", "9:3", "0:100"]
    answers = io.StringIO("\n".join([*replies, "north,north", "north,south", "-", ""]))
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", answers)
    asked = evenhand("init", "people.csv", cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert asked.stderr.count("Please answer again") == 7
    assert "Did you mean 'ill'" in asked.stderr
    assert train(tmp_path, "--json").returncode == 0


def test_init_leaves_out_what_is_not_declared(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "people.toml").unlink()
    told = done("init", "people.csv", *INIT[:6], "--number", "age=0:100", *INIT[4:6], "--only-declared", cwd=tmp_path)
    assert told["undeclared"] == []
    text = (tmp_path / "people.toml").read_text()
    assert "[columns.age]" in text
    assert "[columns.name]" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--label", "il", "--number", "age=0:9", "--groups", "city"], "Did you mean 'ill'"),
        (["--label", "il", "--header"], "Did you mean 'ill'"),
        (["--label", "il"], "the header is missing"),
        (["--number", "age"], "--number age=0:120"),
        (["--number", "age=a:b"], "LOW:HIGH"),
        (["--number", "age=9:3"], "not below"),
        (["--category", "city=a,a"], "declared twice"),
        (["--number", "age=0:9", "--missing", "age=mean"], "'middle'"),
        (["--drop", "nam", "--label", "ill", "--groups", "city"], "Did you mean 'name'"),
    ],
)
def test_init_refuses_what_train_would_refuse(flags: list[str], words: str, tmp_path: Path) -> None:
    write(tmp_path)
    refused = evenhand("init", "people.csv", "--out", "new.toml", *flags, cwd=tmp_path)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert not (tmp_path / "new.toml").exists()


def test_init_does_not_overwrite(tmp_path: Path) -> None:
    write(tmp_path)
    assert "--force" in evenhand("init", "people.csv", cwd=tmp_path).stderr
    assert evenhand("init", "people.csv", "--force", cwd=tmp_path).returncode == 0


def test_a_mark_quoted_newlines_and_spaces_are_accepted(tmp_path: Path) -> None:
    write(tmp_path, [[f" {row[0]}", row[1], '"two\nlines"', row[3]] for row in people()])
    file = tmp_path / "people.csv"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert train(tmp_path, "--json").returncode == 0


def test_a_group_without_one_of_the_labels_is_ordinary(tmp_path: Path) -> None:
    write(tmp_path, [row if row[1] == "north" else [*row[:3], "no"] for row in people()])
    assert train(tmp_path, "--json").returncode == 0


def as_npz(folder: Path) -> None:
    columns = zip(HEADER, zip(*people(), strict=True), strict=True)
    np.savez(folder / "people.npz", **{name: np.array(cells) for name, cells in columns})


def as_parquet(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [[int(row[0]), *row[1:]] for row in people()]
    columns = dict(zip(HEADER, zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table(columns), folder / "people.parquet")


def as_tsv(folder: Path) -> None:
    (folder / "people.tsv").write_text((folder / "people.csv").read_text().replace(",", "\t"))


@pytest.mark.parametrize("make", [as_npz, as_parquet, as_tsv])
def test_every_format_gives_the_same_records(make: object, tmp_path: Path) -> None:
    write(tmp_path)
    make(tmp_path)
    known = from_toml(tmp_path / "people.toml").declaration()
    suffix = make.__name__.removeprefix("as_")
    assert evenhand("init", f"people.{suffix}", "--out", "t.toml", "--json", cwd=tmp_path).returncode == 0
    plain, other = (eh.data.read(tmp_path / f"people.{kind}", known) for kind in ("csv", suffix))
    rows = torch.arange(80)
    assert torch.equal(plain.fetch(rows)[0], other.fetch(rows)[0])
    assert torch.equal(plain.fetch(rows)[1], other.fetch(rows)[1])
    assert plain.facts == other.facts


def test_a_semicolon_file_with_its_own_test_file(tmp_path: Path) -> None:
    write(tmp_path, toml=TOML + "\n")
    file = tmp_path / "people.csv"
    header, *lines = file.read_text().replace(",", ";").splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    file.write_text(header + "".join(lines[:50]))
    (tmp_path / "held.csv").write_text(header + "".join(lines[50:]))
    found = train(tmp_path, "--delimiter", ";", "--test-data", "held.csv", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["records"] == 30


def test_owners_keep_their_budgets(tmp_path: Path) -> None:
    toml = TOML.replace('groups = "city"', 'groups = "ill"\nowners = "city"') + "feature = false\n"
    write(tmp_path, toml=toml + "[budgets]\nnorth = 1\nsouth = 4\n")
    found = done("train", "people.toml", "--out", "run", cwd=tmp_path)
    assert found["epsilon"] <= 4
    plan = Folder(tmp_path / "run").plan()
    assert plan.budgets == (1, 4)
    assert plan.facts.inputs == "(1,) float32"
    other = done("train", "people.toml", "--budgets", "north=2,south=2", "--out", "other", cwd=tmp_path)
    assert other["epsilon"] <= 2


def test_the_plan_and_the_time_are_told_before_spending(tmp_path: Path) -> None:
    write(tmp_path)
    loud = train(tmp_path)
    assert loud.returncode == 0
    assert "spends epsilon" in loud.stderr
    assert "This will take about" in loud.stderr
    assert CANARY not in loud.stdout + loud.stderr
    quiet = evenhand("train", "people.toml", "--epsilon", 3, "--out", "quiet", "--json", cwd=tmp_path)
    assert quiet.stderr == ""


def test_stopping_before_the_start_spends_nothing(tmp_path: Path) -> None:
    def stop(plan: object, seconds: float) -> None:
        raise eh.errors.UsageError(f"too long: {seconds > 0}")

    train_data, _ = eh.data.digits()
    model = nn.Linear(64, 10)
    before = model.weight.clone()
    with pytest.raises(eh.errors.UsageError, match="too long: True"):
        eh.fit(model, train_data, epsilon=3, epochs=1, out=tmp_path / "run", on_start=stop)
    assert Folder(tmp_path / "run").ledger().reserved == 0
    assert torch.equal(model.weight, before)


def test_preprocessing_is_kept_with_the_run(tmp_path: Path) -> None:
    write(tmp_path)
    assert train(tmp_path, "--json").returncode == 0
    kept = preprocessing(tmp_path / "run")
    assert kept == from_toml(tmp_path / "people.toml").declaration()
    assert CANARY not in (tmp_path / "run" / "preprocessing.json").read_text()
    assert to_toml(from_toml(tmp_path / "run" / "config.toml")) == (tmp_path / "run" / "config.toml").read_text()
    data = eh.data.read(tmp_path / "people.csv", kept)
    with torch.no_grad():
        places = eh.load(tmp_path / "run").model(data.fetch(torch.arange(80))[0]).argmax(1).tolist()
    assert done("predict", "run", "people.csv", cwd=tmp_path)["predictions"] == [kept.labels[at] for at in places]


def test_a_run_can_be_resumed_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    assert train(tmp_path, "--json").returncode == 0
    monkeypatch.chdir("/")
    with pytest.raises(eh.errors.BudgetExhausted):
        eh.resume(tmp_path / "run")
    data, held_out = from_toml(tmp_path / "run" / "config.toml").load_data()
    assert data.facts == Folder(tmp_path / "run").plan().facts
    assert held_out is not None


def test_cells_that_a_spreadsheet_would_run_are_defused(tmp_path: Path) -> None:
    write(tmp_path, toml=TOML.replace('["no", "yes"]', '["no", "=yes"]'), rows=[
        [*row[:3], "=yes" if row[3] == "yes" else "no"] for row in people()
    ])  # fmt: skip
    assert train(tmp_path, "--json").returncode == 0
    (tmp_path / "new.csv").write_text('age,city,note\n60,north,"=HYPERLINK(""x"")"\n60,south,@now\n60,south,-5\n')
    found = evenhand("predict", "run", "new.csv", "--keep", "note", cwd=tmp_path)
    rows = list(csv.DictReader(io.StringIO(found.stdout)))
    assert [row["note"] for row in rows] == ['\'=HYPERLINK("x")', "'@now", "-5"]
    assert {row["prediction"] for row in rows} <= {"no", "'=yes"}
    answers = done("predict", "run", "new.csv", cwd=tmp_path)
    assert set(answers["predictions"]) <= {"no", "=yes"}


def test_a_run_without_declared_columns_says_so(tmp_path: Path) -> None:
    assert evenhand("train", "--epsilon", 3, "--epochs", 0.1, "--out", "run", "--json", cwd=tmp_path).returncode == 0
    refused = evenhand("predict", "run", "new.csv", cwd=tmp_path)
    assert refused.returncode == 2
    assert "no preprocessing.json" in refused.stderr


def test_a_data_frame_trains_and_predicts(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(people(), columns=HEADER)
    known = Declaration(
        {"age": Number(0, 100), "city": Category(("north", "south"))}, label="ill", labels=("no", "yes"), groups="city"
    )
    data = known.data(from_frame(frame))
    model = nn.Linear(3, 2)
    eh.fit(model, data, epsilon=3, epochs=2, batch_size=20, out=tmp_path / "run")
    found = predict(tmp_path / "run", frame.drop(columns=["ill"]), model=nn.Linear(3, 2))
    assert len(found.predicted) == 80
    with torch.no_grad():
        assert model(data.fetch(torch.arange(80))[0]).argmax(1).tolist() == [
            ("no", "yes").index(name) for name in found.predicted
        ]


def test_one_column_of_arrays_keeps_its_shape() -> None:
    known = Declaration({"x": Number(0, 255)}, label="y", labels=[0, 1])
    data = known.data(Table({"x": np.zeros((4, 1, 8, 8), dtype=np.uint8), "y": np.array([0, 1, 0, 1])}))
    assert data.facts.inputs == "(1, 8, 8) float32"
    assert float(data.fetch(torch.arange(1))[0].max()) == -1.0


def test_help_stays_light() -> None:
    script = "import sys; from evenhand import cli; print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_column_of_dates_is_refused_only_where_it_is_declared(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = {"age": [row % 80 for row in range(300)], "visit": pandas.date_range("2020-01-01", periods=300)}
    frame = pandas.DataFrame({**rows, "ill": ["yes" if row % 80 > 40 else "no" for row in range(300)]})
    frame[frame.age > 3].to_parquet(tmp_path / "people.parquet")  # with the row numbers of what is left
    told = done(
        *("init", "people.parquet", "--label", "ill", "--labels", "no,yes", "--number", "age=0:100"),
        *("--drop", "visit"),
        cwd=tmp_path,
    )
    assert told["columns"] == 3
    assert done("train", "people.toml", "--epsilon", 3, "--epochs", 1, "--out", "run", cwd=tmp_path)["epsilon"] <= 3
    with (tmp_path / "people.toml").open("a") as file:
        file.write('[columns.visit]\nkind = "number"\nlow = 0\nhigh = 1\n')
    refused = evenhand("train", "people.toml", "--epsilon", "3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "Column 'visit' has neither numbers nor text (timestamp" in refused.stderr


def test_init_with_budgets_names_a_command_that_runs(tmp_path: Path) -> None:
    write(tmp_path)
    budgets = ("--owners", "city", "--budgets", "north=1,south=3", "--category", "city=north,south")
    (tmp_path / "people.toml").unlink()
    told = evenhand("init", "people.csv", *INIT, *budgets, cwd=tmp_path)
    typed = told.stdout.strip().splitlines()[-1].partition("evenhand ")[2].split()
    assert typed == ["train", "people.toml", "--method", "idp_sample"]
    assert done(*typed, "--epochs", 1, "--out", "run", cwd=tmp_path)["epsilon"] <= 3
    refused = evenhand("train", "people.toml", "--epsilon", "3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "The budgets of the owners are the promise" in refused.stderr
