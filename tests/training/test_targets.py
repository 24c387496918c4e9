"""Every kind of target goes from data to run, metrics, report, card, prediction and comparison."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

import evenhand as eh
from commands import result
from evenhand.data.sources.chexpert import FIVE
from evenhand.errors import DataError, UsageError
from evenhand.reporting.metrics import defined_for
from evenhand.runs.verify import verify
from evenhand.training import evaluate
from evenhand.training.run import Run


def inputs(records: int = 240, width: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(records, width, generator=torch.Generator().manual_seed(seed))


def trained(
    model: nn.Module, X: Tensor, y: object, out: Path, epochs: float = 4, **options: object
) -> tuple[Run, eh.data.Data]:
    groups = ["a" if place % 3 else "b" for place in range(len(X))]
    data = eh.data.wrap(X, y, groups=groups, **options)
    train, test = data.take(torch.arange(0, 160)), data.take(torch.arange(160, len(X)))
    run = eh.fit(
        model, train, epsilon=8.0, delta=1e-3, epochs=epochs, test=test, out=out, compose=False, least_records=1
    )
    assert verify(out)["ok"]
    page = (out / "report.html").read_text()
    assert "held-out" in page
    assert "Model card" in run.card()
    return run, test


def test_two_classes_with_one_output_equal_two_outputs(tmp_path: Path) -> None:
    X = inputs()
    y = (X[:, 0] > 0).long()
    single = nn.Linear(4, 1)
    run, test = trained(single, X, y, tmp_path / "run")
    last = run.evaluations[-1]
    logits = single(X[160:]).detach().flatten()
    assert last["accuracy"] == pytest.approx(sk.accuracy_score(y[160:], logits > 0))
    assert last["roc_auc"] == pytest.approx(sk.roc_auc_score(y[160:], logits))
    assert last["metrics"]["brier"] == pytest.approx(sk.brier_score_loss(y[160:], logits.double().sigmoid()))
    double = nn.Linear(4, 2)
    with torch.no_grad():
        double.weight.copy_(torch.cat([torch.zeros_like(single.weight), single.weight]))
        double.bias.copy_(torch.cat([torch.zeros_like(single.bias), single.bias]))
    assert evaluate.row(double, test, 0, 0.0)["metrics"] == pytest.approx(last["metrics"])


def test_real_numbers_have_errors_per_group_and_no_accuracy(tmp_path: Path) -> None:
    X = inputs()
    y = X @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + 3
    model = nn.Linear(4, 1)
    run, test = trained(model, X, y, tmp_path / "run")
    last, guess = run.evaluations[-1], model(X[160:]).detach().flatten()
    assert last["accuracy"] is None
    assert last["metrics"]["mae"] == pytest.approx(sk.mean_absolute_error(y[160:], guess), rel=1e-5)
    assert set(last["metrics"]) == set(defined_for("numbers"))
    b = np.array(test.group_names()) == "b"
    assert last["group_metrics"]["bias"]["b"] == pytest.approx(float((guess - y[160:])[b].mean()), rel=1e-4)
    assert {"rmse[a]", "mae_difference"} <= set(run.metrics.columns)
    assert "mean absolute error" in (run.path / "report.html").read_text()
    assert evaluate.measures(model, test).overall["r2"] == pytest.approx(last["metrics"]["r2"])


def test_ordered_classes_are_measured_in_ranks(tmp_path: Path) -> None:
    X = inputs()
    y = torch.bucketize(X[:, 0].contiguous(), torch.tensor([-0.7, 0.0, 0.7]))
    model = nn.Linear(4, 4)
    run, _ = trained(model, X, y, tmp_path / "run", ordered=True, labels=[0, 1, 2, 3])
    assert run.plan.facts.ordered
    assert eh.load(run.path, model=nn.Linear(4, 4)).plan.facts == run.plan.facts
    guess = model(X[160:]).argmax(1)
    assert run.evaluations[-1]["metrics"]["rank_mae"] == pytest.approx(sk.mean_absolute_error(y[160:], guess))
    assert run.evaluations[-1]["targets"] == "ordinal"


def test_several_labels_have_an_area_each(tmp_path: Path) -> None:
    X = inputs()
    y = (X[:, :3] + 0.5 * inputs(240, 3, 1) > 0).float()
    model = nn.Linear(4, 3)
    run, test = trained(model, X, y, tmp_path / "run", labels=["x", "y", "z"])
    last, logits = run.evaluations[-1], model(X[160:]).detach()
    b = np.array(test.group_names()) == "b"
    for place, name in enumerate("xyz"):
        assert last["metrics"][f"roc_auc[{name}]"] == pytest.approx(sk.roc_auc_score(y[160:, place], logits[:, place]))
        by_hand = sk.average_precision_score(y[160:, place][b], logits[:, place][b])
        assert last["group_metrics"][f"pr_auc[{name}]"]["b"] == pytest.approx(by_hand)
    assert last["accuracy"] == pytest.approx(sk.accuracy_score(y[160:], logits > 0))


class Words(nn.Module):
    """Predicts the next word from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words))


def test_a_language_model_has_loss_and_perplexity_per_group(tmp_path: Path) -> None:
    text = torch.randint(0, 7, (240, 6), generator=torch.Generator().manual_seed(3))
    model = Words()
    run, test = trained(model, text[:, :-1], text[:, 1:], tmp_path / "run")
    last = run.evaluations[-1]
    losses = nn.functional.cross_entropy(model(text[160:, :-1]).transpose(1, 2), text[160:, 1:], reduction="none")
    assert last["metrics"]["log_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    b = torch.tensor(np.array(test.group_names()) == "b")
    assert last["group_metrics"]["perplexity"]["b"] == pytest.approx(math.exp(losses[b].mean().item()), rel=1e-5)


@pytest.mark.parametrize("method", ["random_feature_density", "moment_density", "noisy_embedding_density"])
def test_densities_score_several_labels_one_against_the_rest(method: str, tmp_path: Path) -> None:
    from evenhand.training.config import Config
    from evenhand.training.from_config import train

    X = inputs(1200, 6)
    names = X[:, :3].argmax(1)
    y = nn.functional.one_hot(names, 3).float()
    data = eh.data.wrap(X, y, labels=["x", "y", "z"])
    parts = data.take(torch.arange(0, 900)), data.take(torch.arange(900, 1200))
    run = train(Config(method=method, epsilon=50.0, compose=False), *parts, tmp_path / "run")
    last = run.evaluations[-1]
    scores = evaluate.compute_scores(run.model, parts[1])[0]
    for place, name in enumerate("xyz"):
        by_hand = sk.roc_auc_score(y[900:, place], scores[:, place])
        assert last["metrics"][f"roc_auc[{name}]"] == pytest.approx(by_hand)
        assert by_hand > 0.7, "each label is told from the rest"


def picture(path: Path, marks: list[int], rng: np.random.Generator) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 60, (20, 20))
    for place, mark in enumerate(marks):
        pixels[4 * place : 4 * place + 4] += 150 * mark
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def test_chexpert_in_its_official_shape_has_an_area_per_finding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for part, records in (("train", 150), ("valid", 60)):
        rows = []
        for number in range(records):
            marks = rng.integers(0, 2, 5).tolist()
            name = f"CheXpert-v1.0-small/{part}/patient{number:05d}/study1/view1_frontal.jpg"
            picture(tmp_path / "chexpert" / Path(*Path(name).parts[1:]), marks, rng)
            cells = ["1.0" if mark else rng.choice(["0.0", ""]) for mark in marks]
            rows.append([name, rng.choice(["Female", "Male"]), 60, "Frontal", "AP", *cells])
        with (tmp_path / "chexpert" / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *FIVE], *rows])
    flags = ("--data", "chexpert", "--data-dir", tmp_path, "--source", "size=20", "--model", "linear", "--epochs", "20")
    run = tmp_path / "run"
    more = ("--epsilon", "50", "--delta", "1e-3", "--lr", "0.5", "--out", run, "--no-compose")
    figures = result("train", *flags, *more, "--metric", "roc_auc,roc_auc[Edema]")
    assert list(figures["metrics"])[:2] == ["roc_auc", "roc_auc[Edema]"]
    assert set(figures["group_metrics"]["roc_auc[Edema]"]) == {"Female", "Male"}
    for finding in FIVE:
        assert figures["metrics"][f"roc_auc[{finding}]"] > 0.8
    page = (run / "report.html").read_text()
    for finding in FIVE:
        cell = f"<bdi>{finding}</bdi></th><td>{figures['metrics'][f'roc_auc[{finding}]']:.3f}</td>"
        assert cell in page, "the page has the area of every finding"
    more = ("--method", "moment_density", "--epsilon", "50", "--delta", "1e-3", "--out", tmp_path / "density")
    dense = result("train", *flags[:4], "--source", "size=6", *more, "--no-compose")
    assert {f"roc_auc[{finding}]" for finding in FIVE} <= set(dense["metrics"]), "each against the rest"
    assert dense["metrics"]["roc_auc"] > 0.6


CSV = "age,sex,race,score,ill,grade,u,v\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(300):
        age, sex, race = rng.integers(18, 90), rng.choice(["f", "m"]), rng.choice(["A", "B"])
        old = int(age > 50)
        cells = [
            age,
            sex,
            race,
            age * 2 + rng.normal(),
            "yes" if old else "no",
            ["low", "mid", "high"][age // 31],
            old,
            1 - old,
        ]
        lines.append(",".join(map(str, cells)))
    path = tmp_path / "people.csv"
    path.write_text(CSV + "\n".join(lines) + "\n")
    return path


COLUMNS = ("--number", "age=0:120", "--category", "sex=f,m", "--category", "race=A,B", "--groups", "race,sex")
SHORT = ("--epsilon", "50", "--delta", "1e-3", "--epochs", "10", "--model", "linear", "--least-records", "1")


def test_a_file_with_a_real_number_to_predict(table: Path, tmp_path: Path) -> None:
    flags = ("--label", "score", "--number", "score=0:200", "--drop", "ill,grade,u,v")
    toml = result("init", table, *flags, *COLUMNS)["config"]
    figures = result("train", toml, *SHORT, "--out", tmp_path / "run", "--metric", "mae,r2")
    assert list(figures["metrics"])[:2] == ["mae", "r2"]
    assert figures["metrics"]["r2"] > 0.5
    assert figures["metrics"]["mae"] > 0.5, "in the unit of the column, not scaled to -1 and 1"
    assert set(figures["group_metrics"]["mae"]) == {f"race = {race}, sex = {sex}" for race in "AB" for sex in "fm"}
    said = result("predict", tmp_path / "run", table)["predictions"]
    truth = [float(line.split(",")[3]) for line in table.read_text().splitlines()[1:]]
    assert sk.mean_absolute_error(truth, [float(text) for text in said]) < 40


def test_a_file_with_several_label_columns(table: Path, tmp_path: Path) -> None:
    flags = ("--label", "u,v", "--labels", "0,1", "--drop", "ill,grade,score")
    toml = result("init", table, *flags, *COLUMNS)["config"]
    figures = result("train", toml, *SHORT, "--out", tmp_path / "run")
    assert figures["metrics"]["roc_auc[u]"] > 0.9
    said = result("predict", tmp_path / "run", table)
    assert said["labels"] == ["u", "v"]
    assert set(said["predictions"]) <= {"u", "v", "u; v", ""}


def test_a_file_with_ordered_labels_and_a_comparison(table: Path, tmp_path: Path) -> None:
    flags = ("--label", "grade", "--labels", "low,mid,high", "--ordered", "--drop", "ill,score,u,v")
    toml = result("init", table, *flags, *COLUMNS)["config"]
    figures = result("train", toml, *SHORT, "--out", tmp_path / "run")
    assert 0 <= figures["metrics"]["rank_mae"] < 1
    said = result("predict", tmp_path / "run", table)
    assert set(said["predictions"]) <= {"low", "mid", "high"}


@pytest.mark.parametrize(
    "flags",
    [
        ("--label", "score", "--number", "score=0:200", "--drop", "ill,grade,u,v"),
        ("--label", "u,v", "--labels", "0,1", "--drop", "ill,grade,score"),
    ],
)
def test_a_comparison_of_other_targets(flags: tuple[str, ...], table: Path, tmp_path: Path) -> None:
    toml = result("init", table, *flags, *COLUMNS)["config"]
    compared = ("--methods", "dpsgd", "--reference", "--epsilons", "8", "--seeds", "2", "--epochs", "2", "--jobs", "1")
    figures = result("compare", toml, *compared, "--out", tmp_path / "compared")
    assert not figures["failed"]
    assert (tmp_path / "compared" / "report.html").exists() or figures["files"]["report"]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    X = inputs(20)
    with pytest.raises(DataError, match="one name per column"):
        eh.data.wrap(X, torch.zeros(20, 3), labels=["a", "b"])
    with pytest.raises(DataError, match="neither 0 nor 1"):
        eh.data.wrap(X, torch.full((20, 2), 0.5), labels=["a", "b"])
    data = eh.data.wrap(X, torch.rand(20))
    with pytest.raises(UsageError, match="one output per target"):
        eh.fit(nn.Linear(4, 2), data, epsilon=3.0, test=data, training_records=True, out=tmp_path / "run")
    with pytest.raises(UsageError, match="loss is binary"):
        eh.fit(nn.Linear(4, 1), data, epsilon=3.0, loss="binary", test=data, training_records=True, out=tmp_path / "r")
    assert not (tmp_path / "run").exists()
