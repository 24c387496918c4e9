"""The studies of serving small classes: their own pass is the engine's, their choices and figures are as declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.data import wrap
from evenhand.gradients.microbatches import MicroBatches
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.training.optimizers import Descent


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


@pytest.mark.parametrize("method", ["dpsgd", "dpsgd_f", "bounded_adaptive", "soft_ada_clip"])
def test_the_steps_of_many_models_together_are_the_librarys(modules: Any, method: str) -> None:
    training, drawn = modules["serving_train"], torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(400, 9, generator=drawn), torch.randint(0, 4, (400,), generator=drawn)
    data = wrap(inputs, targets, groups=[str(target) for target in targets.tolist()])
    chosen = eh.method(method, {"bound": 0.5})
    plans = [eh.plan(chosen, eh.Privacy(epsilon), data=data.facts, epochs=1, prior="labels") for epsilon in (3.0, 1.0)]
    recipes = [training.Recipe(plan, chosen, "sgd", 0.5, 0.0, 1e-9) for plan in plans]
    together = training.train_together(recipes, 5, data)
    for plan, ours in zip(plans, together, strict=True):
        model, stream = nn.Linear(9, 4), Stream.insecure(5, 0)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        mechanism, memory = Mechanism(plan, chosen.rule, chosen.queries, stream), chosen.rule.initial(plan.facts)
        optimizer, schedule = Descent("sgd", 0.5, None, None, "linear").build(model, plan.steps)
        sampler, engine = (
            PoissonSampler(data.owner, plan.rates, stream),
            MicroBatches(model, nn.CrossEntropyLoss(reduction="none")),
        )
        for position in range(plan.steps):
            schedule.go_to(position)
            batch = draw(data, sampler, position, 0)
            released = private_gradient(mechanism, engine.run(batch.inputs, batch.targets), batch, memory)
            memory = released.memory
            for name, parameter in model.named_parameters():
                parameter.grad = released.gradient[name].to(parameter.dtype)
            optimizer.step()
        torch.testing.assert_close(ours.model.weight, model.weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.model.bias, model.bias, rtol=1e-4, atol=1e-5)


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
