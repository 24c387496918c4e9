"""Metrics: equal to scikit-learn and fairlearn, undefined where they are, intervals that cover."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from fairlearn import metrics as fair
from sklearn import metrics as sk

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import DataError
from evenhand.reporting.group_metrics import across, measure
from evenhand.reporting.metrics import initial_drops
from evenhand.runs.folder import Folder
from evenhand.training import evaluate
from evenhand.training.run import Run


def sample(classes: int, records: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, records)
    logits = rng.normal(size=(records, classes)) + 1.5 * np.eye(classes)[truth]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return truth, probabilities.argmax(axis=1), probabilities, [f"g{i}" for i in rng.integers(0, 3, records)]


@pytest.mark.parametrize("classes", [2, 5])
def test_every_metric_equals_scikit_learn_and_fairlearn(classes: int) -> None:
    truth, guess, probabilities, groups = sample(classes)
    found = measure(truth, guess, groups=groups, owners=groups, probabilities=probabilities)
    scores = probabilities[:, 1] if classes == 2 else probabilities
    assert found.overall["accuracy"] == pytest.approx(sk.accuracy_score(truth, guess))
    assert found.overall["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(truth, guess))
    assert found.overall["mcc"] == pytest.approx(sk.matthews_corrcoef(truth, guess))
    assert found.overall["roc_auc"] == pytest.approx(sk.roc_auc_score(truth, scores, multi_class="ovr"))
    assert found.overall["log_loss"] == pytest.approx(sk.log_loss(truth, probabilities))
    assert found.undefined == {}
    frame = fair.MetricFrame(metrics=sk.accuracy_score, y_true=truth, y_pred=guess, sensitive_features=groups)
    assert found.by_group["accuracy"] == pytest.approx(frame.by_group.to_dict())
    assert found.by_owner == found.by_group
    for kind in ("difference", "ratio", "group_min", "group_max"):
        assert found.across[f"accuracy_{kind}"] == pytest.approx(getattr(frame, kind)())
    assert across("accuracy", list(found.by_group["accuracy"].values())) == pytest.approx(
        {key: value for key, value in found.across.items() if key.startswith("accuracy")}
    )
    if classes == 2:
        expected = {g: sk.recall_score(truth[m], guess[m]) for g in set(groups) if (m := np.array(groups) == g).any()}
        assert found.by_group["recall"] == pytest.approx(expected)


def test_what_is_undefined_is_nan_and_said_so() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure([1, 1], [1, 0], groups=["a", "b"], probabilities=[[0.1, 0.9], [0.8, 0.2]])
    assert math.isnan(found.overall["roc_auc"])
    assert found.undefined == dict.fromkeys(("roc_auc", "pr_auc"), "the records belong to one class only")
    alone = measure([0, 2], [0, 2], groups=["a", "a"])
    assert set(alone.undefined) == {"roc_auc", "pr_auc", "brier", "calibration_error", "log_loss"}
    assert alone.across["accuracy_difference"] == 0
    with pytest.raises(DataError, match="differ in length"):
        measure([0], [0], groups=["a", "b"])


def test_the_row_of_every_epoch_equals_the_full_measurement(digit_data: tuple[Data, Data]) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 10)
    row, found = evaluate.row(model, digit_data[1], 3, 1.0), evaluate.measures(model, digit_data[1])
    for name in ("accuracy", "balanced_accuracy", "mcc", "roc_auc", "log_loss"):
        assert row[name] == pytest.approx(found.overall[name], abs=1e-12), name
    assert row["groups"] == pytest.approx(found.by_group["accuracy"])
    assert row["group_log_loss"] == pytest.approx(found.by_group["log_loss"])


def test_a_constant_or_broken_model_gives_plain_json(tiny: Data) -> None:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, math.nan)
    row = evaluate.row(model, tiny, 0, 0.0)
    assert row["roc_auc"] is None
    assert row["log_loss"] is None
    assert row["mcc"] == 0.0
    assert set(row["owners"]) == {"x", "y"}


def curves(overall: list[float], **groups: list[float]) -> list[dict]:
    return [
        {"epoch": float(i), "accuracy": value, "groups": {name: values[i] for name, values in groups.items()}}
        for i, value in enumerate(overall)
    ]


def test_the_initial_drop_begins_at_the_start_and_ends_with_recovery() -> None:
    rising = [0.3, 0.5, 0.7, 0.8, 0.9]
    found = initial_drops(
        curves(
            rising,
            small=[0.2, 0.1, 0.0, 0.25, 0.5],
            never=[0.2, 0.1, 0.1, 0.1, 0.1],
            zero=[0.0, 0.0, 0.0, 0.0, 0.4],
            late=[0.2, 0.3, 0.1, 0.1, 0.1],
            once=[0.2, 0.1, 0.3, 0.1, 0.1],
            steady=[1.0, 1.0, 1.0, 1.0, 1.0],
        )
    )
    assert [(d.group, d.end, d.recovered) for d in found] == [
        ("never", 4, False),
        ("zero", 4, True),
        ("small", 3, True),
    ]
    assert found[2].depth == pytest.approx(0.2)
    assert initial_drops(curves([0.9, 0.8, 0.7, 0.6], all=[0.9, 0.5, 0.4, 0.3])) == []
    assert initial_drops(curves(rising[:2], small=[0.2, 0.1])) == []
    assert initial_drops([]) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    train, test = eh.data.digits()
    out = tmp_path_factory.mktemp("history") / "run"
    return eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=3, test=test, out=out)


def test_metrics_are_a_frame_with_one_row_per_evaluation(run: Run, tmp_path: Path) -> None:
    frame = run.metrics
    assert len(frame) == len(run.evaluations) == 3
    assert frame["accuracy[class 8]"].iloc[-1] == run.evaluations[-1]["groups"]["class 8"]
    assert (frame["accuracy_group_min"] <= frame["accuracy"]).all()
    assert {"step", "epoch", "mcc", "roc_auc", "log_loss", "accuracy_std", "log_loss[class 8]"} <= set(frame)
    empty = Run(Folder(tmp_path)).metrics
    assert list(empty) == ["step"]
    assert len(empty) == 0


def test_the_card_describes_and_does_not_promise(run: Run) -> None:
    text = run.card()
    for words in ("# Model card", "add/remove", "Not covered", "class 8", "Wilson interval", "roc\\_auc", "Plan: "):
        assert words in text
    import re

    assert not re.search(r"\bfair|debias|unbias|\bsafe\b|guaranteed", text, re.I)
