"""The studies of serving small classes: their own pass is the engine's, their choices and figures are as declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenhand.gradients.microbatches import MicroBatches


@pytest.fixture(scope="module")
def study(modules: Any) -> Any:
    parts = modules["serving_studies"]
    return parts.Study(
        name="small",
        title="Small",
        source="drawn",
        features="none",
        lines=(
            parts.Line("DP-SGD", rates=(4.0, 16.0)),
            parts.Line("moved", moved=True, rates=(4.0, 16.0), trained_as="DP-SGD"),
        ),
        batch=300,
        epochs=3,
        epsilons=(3.0,),
        trials=2,
        rare=(2, 40),
        bars=(parts.Bar("moved", 3.0, "balanced", (("worst", 10.0), ("worst above DP-SGD's", 5.0))),),
    )


def test_the_pass_of_a_linear_model_is_the_engines(modules: Any) -> None:
    drawn = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 9, generator=drawn), torch.randint(0, 4, (40,), generator=drawn)
    model, weights = nn.Linear(9, 4), torch.rand(40, generator=drawn, dtype=torch.float64)
    expected = MicroBatches(model, nn.CrossEntropyLoss(reduction="none")).run(inputs, targets)
    lengths = (inputs.square().sum(1) + 1).sqrt()
    ours = modules["serving_train"].linear_pass(inputs, targets, model(inputs).detach(), lengths)
    torch.testing.assert_close(ours.norm.double(), expected.norm.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.loss, expected.loss.to(ours.loss.dtype), rtol=1e-5, atol=1e-6)
    sums = expected.weighted_sum(weights)
    for name, value in ours.weighted_sum(weights).items():
        torch.testing.assert_close(value, sums[name].to(value.dtype), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def work(modules: Any, study: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of three classes of drawn records."""
    folder, random = tmp_path_factory.mktemp("serving"), np.random.default_rng(0)
    labels = np.arange(1800) % 3
    features = random.standard_normal((1800, 6)) + 2 * np.eye(6)[labels]
    np.savez(
        folder / "drawn-none.npz",
        features=features.astype(np.float32),
        labels=labels,
        official=np.arange(1800) < 1500,
        names=np.array(["a", "b", "c"]),
        people=np.array([], dtype=np.int64),
    )
    source = modules["serving_data"].records("drawn", "none", None, folder)
    modules["serving"].run(study, source, folder, seeds=3, jobs=1)
    return folder


def test_a_study_trains_what_it_declares_within_its_epsilon(work: Path) -> None:
    rows = [json.loads(line) for line in (work / "small.jsonl").read_text().splitlines()]
    replicas = [row for row in rows if not row["trial"]]
    assert {(row["line"], row["seed"]) for row in replicas} == {("DP-SGD", seed) for seed in range(3)}
    assert all(row["spent"] <= 3.0 and row["records"] == 1040 and sum(row["sizes"]) == 300 for row in replicas)
    assert all(row["records"] < 1040 for row in rows if row["trial"]), (
        "trials are trained without their validation part"
    )


def test_moving_answers_serves_the_rare_class_and_the_page_says_so(modules: Any, study: Any, work: Path) -> None:
    serving_page = modules["serving_page"]
    figures = serving_page.Figures(study, modules["serving"].Store(work / "small.jsonl"))
    plain, moved = study.lines
    usual = figures.cell(plain, 3.0, 0.0)
    served = figures.cell(moved, 3.0, figures.tau(moved, 3.0, "balanced"))
    assert served.recalls.mean(0)[2] > usual.recalls.mean(0)[2]
    text = serving_page.page(figures, ["a", "b", "c"])
    worst = served.recalls.mean(0)
    assert f"{'abc'[worst.argmin()]}: {100 * worst.min():.1f} (" in text
    assert text.count("**reached**") + text.count("**NOT reached**") == 2
    assert "<svg" in serving_page.picture(figures)


def test_every_study_names_lines_that_exist(modules: Any) -> None:
    for study in modules["serving_studies"].STUDIES.values():
        assert all(study.line(bar.line) for bar in study.bars)
        assert all(study.line(line.tuned_as) for line in study.lines if line.tuned_as)
