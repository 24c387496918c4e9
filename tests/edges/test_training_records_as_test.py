"""Line 6 of the edges: training records that are handed over as test data are told by their rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import evenhand as eh
from commands import evenhand
from evenhand.data import wrap
from evenhand.data.fingerprint import survey
from evenhand.data.record_checks import looks_copied
from evenhand.density import MomentDensity
from evenhand.errors import UsageError

SHAREABLE = ("metrics.jsonl", "report.html", "model-card.md", "statement.json", "statement.md", "ledger.jsonl")


def numbers(count: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


X, Y = numbers()
FRESH = numbers(200, seed=1)
ORDER = torch.randperm(200, generator=torch.Generator().manual_seed(2))
COPIES: dict[str, Any] = {
    "the pair again": (X, Y),
    "a numpy copy": (X.numpy().copy(), Y.numpy().copy()),
    "other precision": (X.double().numpy(), Y.numpy()),
    "a slice": (X[40:90], Y[40:90]),
    "every third row": (X[::3], Y[::3]),
    "another order": (X[ORDER], Y[ORDER]),
    "a few rows": (X[:6], Y[:6]),
    "a superset": (torch.cat([X, FRESH[0]]), torch.cat([Y, FRESH[1]])),
    "a quarter among others": (torch.cat([FRESH[0], X[:50]]), torch.cat([FRESH[1], Y[:50]])),
    "other labels": (X, 1 - Y),
    "a dataset": TensorDataset(X, Y),
    "part of a dataset": Subset(TensorDataset(X, Y), range(20, 120)),
    "wrapped": wrap(X, Y),
    "part of what was wrapped": wrap(X, Y).take(torch.arange(30, 60)),
}


def fit(train: Any, test: Any, out: Path, **options: Any) -> eh.Run:
    return eh.fit(nn.Linear(4, 2), train, epsilon=3.0, epochs=1, test=test, out=out, compose=False, **options)


@pytest.mark.parametrize("name", COPIES)
def test_training_records_are_refused_before_anything_is_spent(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hold training records"):
        fit((X, Y), COPIES[name], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> eh.Run:
    return fit((X, Y), FRESH, tmp_path_factory.mktemp("edges") / "run")


@pytest.mark.parametrize("name", ["the pair again", "a slice", "a superset", "a dataset"])
def test_a_report_on_training_records_is_refused_also_of_a_run_that_was_loaded(name: str, run: eh.Run) -> None:
    again = eh.load(run.path, model=nn.Linear(4, 2))
    for each in (run, again):
        with pytest.raises(UsageError, match="hold training records"):
            each.report(COPIES[name])
    with pytest.raises(UsageError, match="hold training records"):
        again.report((X, Y), groups=["a", "b"] * 100)


def test_a_report_on_held_out_records_is_written(run: eh.Run, tmp_path: Path) -> None:
    assert run.report(numbers(200, seed=3)).save(tmp_path / "report.html").exists()


def test_with_the_flag_a_page_on_training_records_is_private(run: eh.Run, tmp_path: Path) -> None:
    page = run.report((X, Y), training_records=True)
    assert "do not share" in page.page
    for place in (tmp_path / "report.html", run.path / "report.html", run.path / "private" / ".." / "full.html"):
        with pytest.raises(UsageError, match="must not be shared"):
            page.save(place)
    assert page.save(run.path / "private" / "report-full.html").exists()


def test_where_no_digests_are_left_the_trainer_is_told(
    run: eh.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in run.path.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    eh.load(tmp_path, model=nn.Linear(4, 2)).report((X, Y))
    assert "no digests of its training records" in capsys.readouterr().err


def test_with_the_flag_metrics_of_training_go_into_the_private_folder_only(tmp_path: Path) -> None:
    told: list[Any] = []

    class Logger:
        def log(self, step: int, values: Any) -> None:
            told.append(values)

    with pytest.raises(UsageError, match="held-out"):
        fit((X, Y), (X, Y), tmp_path / "logged", training_records=True, loggers=[Logger()])
    run = fit((X, Y), (X, Y), tmp_path / "run", training_records=True)
    assert told == []
    assert run.evaluations == []
    lines = [json.loads(line) for line in (run.path / "private" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["records"] == 200
    assert "do not share" in (run.path / "private" / "report-full.html").read_text()
    assert not (run.path / "report.html").exists()
    assert not (run.path / "metrics.jsonl").exists()
    written = "".join((run.path / name).read_text() for name in SHAREABLE if (run.path / name).exists())
    assert f"{lines[-1]['log_loss']}" not in written
    assert "held-out" not in json.dumps(run.privacy.data["owners"])


def people(count: int, generator: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Age, sex and label: almost everybody has a twin."""
    age = np.clip(generator.normal(45, 15, count).round(), 18, 90)
    return np.stack([age / 100, generator.integers(0, 2, count)], 1), (generator.random(count) < 0.3).astype(int)


def test_honest_twins_in_a_table_of_age_sex_and_label_pass() -> None:
    generator = np.random.default_rng(0)
    for number in range(60):
        (train, test), first = (people(int(size), generator) for size in generator.integers(30, 3000, 2)), None
        if number % 3 == 0:
            order, second = (np.lexsort((side[0][:, 0], side[0][:, 1])) for side in (train, test))
            train, test = (train[0][order], train[1][order]), (test[0][second], test[1][second])
        first = survey(wrap(*train))
        assert not looks_copied(first, survey(wrap(*test), first.key))


def test_a_table_of_age_sex_and_label_trains_with_its_honest_test_data(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    train, test = people(2000, generator), people(500, generator)
    known = {tuple(row) for row in train[0]}
    assert np.mean([tuple(row) in known for row in test[0]]) > 0.95
    model = nn.Linear(2, 2)
    assert eh.fit(model, train, epsilon=3.0, epochs=1, test=test, out=tmp_path).evaluations


@pytest.mark.parametrize(
    "copied",
    [
        lambda x, y: (x, y),
        lambda x, y: (x[700:1000], y[700:1000]),
        lambda x, y: (np.concatenate([x[500:], x]), np.concatenate([y[500:], y])),
        lambda x, y: (x[::-1], y[::-1]),
    ],
    ids=["all", "slice", "superset", "backwards"],
)
def test_copies_are_told_from_honest_twins_even_in_such_a_table(copied: Callable[..., Any]) -> None:
    train = people(2000, np.random.default_rng(2))
    first = survey(wrap(*train))
    assert looks_copied(first, survey(wrap(*copied(*train)), first.key))


class Turned(Dataset[Any]):
    """Training records that are turned at random whenever they are read."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + torch.rand(4), self.targets[index]


def test_records_that_are_read_with_random_transforms_are_told_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hold training records"):
        fit(Turned(X, Y), Turned(X[30:80], Y[30:80]), tmp_path)


def test_resume_refuses_them_as_well(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit((X, Y), None, tmp_path, on_start=stop)
    with pytest.raises(UsageError, match="hold training records"):
        eh.resume(tmp_path, model=nn.Linear(4, 2), train=(X, Y), test=(X, Y))


def test_a_run_folder_of_a_density_knows_its_training_records(tmp_path: Path) -> None:
    made = MomentDensity(epsilon=3.0, out=tmp_path).fit(X.numpy(), Y.numpy())
    with pytest.raises(UsageError, match="hold training records"):
        eh.training.run.Run(made.folder, made.model_).report((X, Y))


TOML = """label = "ill"
labels = ["no", "yes"]
epochs = 1
epsilon = 3.0
model = "linear"
[columns.a]
kind = "number"
low = -5
high = 5
[columns.b]
kind = "number"
low = -5
high = 5
"""


@pytest.mark.parametrize("method", ["dpsgd", "moment_density"])
def test_the_command_line_refuses_the_training_file_as_test_data(method: str, tmp_path: Path) -> None:
    rows = [f"{a:.3f},{b:.3f},{'yes' if a > 0 else 'no'}" for a, b, *_ in X.tolist()]
    (tmp_path / "people.csv").write_text("\n".join(["a,b,ill", *rows]) + "\n")
    (tmp_path / "same.csv").write_text("\n".join(["a,b,ill", *reversed(rows)]) + "\n")
    (tmp_path / "people.toml").write_text(f'data = "people.csv"\nmethod = "{method}"\n' + TOML)
    asked = ("train", "people.toml", "--test-data", "same.csv", "--no-compose")
    refused = evenhand(*asked, "--out", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "hold training records" in refused.stderr
    done = evenhand(*asked, "--training-records", "--out", "full", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "full" / "private" / "report-full.html").exists()
    assert not (tmp_path / "full" / "metrics.jsonl").exists()
    assert not (tmp_path / "full" / "report.html").exists()


def test_a_comparison_is_of_held_out_records_only() -> None:
    from evenhand.comparison.sweep import Sweep
    from evenhand.training.config import Config

    with pytest.raises(UsageError, match="hold records out"):
        Sweep(base=Config(training_records=True), methods=("dpsgd",), epsilons=(3.0,))


def test_of_many_rows_a_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.data.fingerprint.ROWS", 1024)
    train = wrap(*numbers(20_480))
    first = survey(train)
    assert len(first.rows) == 1024
    assert looks_copied(first, survey(wrap(*numbers(20_480)), first.key))
    assert not looks_copied(first, survey(wrap(*numbers(20_480, seed=1)), first.key))


def test_digests_have_a_key_and_stay_in_the_private_folder(run: eh.Run) -> None:
    one, two = (survey(wrap(X, Y)) for _ in range(2))
    assert not np.array_equal(one.inputs, two.inputs)
    assert (run.path / "private" / "rows.npz").exists()
    assert oct((run.path / "private").stat().st_mode)[-3:] == "700"
