"""The studies with a script of their own: epsilon by epochs and by noise, and how groups learn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from evenhand import registry

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PRINTED = {"Adult": 3.1, "Dutch": 2.66, "MNIST": 6.55}
"""Epsilon as Xu et al. 2021 print it."""


def test_the_papers_accountant_gives_the_papers_epsilon(modules: Any) -> None:
    study = modules["epsilon_study"]
    for case in study.CASES:
        found = study.cost(case.setting, case.noise)
        assert found.paper == pytest.approx(PRINTED[case.name], abs=0.03)
        assert found.dpsgd < found.true < found.paper


def test_epsilon_grows_with_epochs_and_falls_with_noise(modules: Any) -> None:
    study = modules["epsilon_study"]
    adult = study.CASES[0]
    assert all(a.true < b.true for a, b in pairwise(study.by_epochs(adult).values()))
    by_noise = study.by_noise(adult)
    assert all(a.true > b.true for a, b in pairwise(by_noise.values()))
    assert study.table("noise multiplier", by_noise) in (RESULTS / "epsilon.md").read_text()


def test_groups_are_followed_with_the_bounds_that_were_used(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = modules["group_curves"]
    monkeypatch.setitem(registry._parts, "rule", {name: registry.part("rule", name) for name in registry.names("rule")})
    train, test = eh.data.digits()
    settings = study.Settings(epsilon=3.0, delta=1e-4, epochs=2.0, batch_size=256.0, lr=0.5, bound=0.5)
    plain, grouped = (study.trained(name, train, test, settings, 0) for name in study.METHODS)
    assert [round(row["epoch"]) for row in grouped] == [1, 2]
    assert set(plain[-1]["bound"].values()) == {0.5}
    assert len(set(grouped[-1]["bound"].values())) > 1
    assert all(0.5 <= bound <= 2.5 for row in grouped for bound in row["bound"].values())
    assert set(grouped[0]["loss"]) == set(test.facts.groups)


def test_gradients_of_held_out_records(modules: Any) -> None:
    _, test = eh.data.digits()
    model, loss = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss(reduction="none")
    found = modules["group_curves"].held_out(model, loss, test)
    inputs, targets = test.fetch(torch.arange(len(test)))
    mine = test.group == 8
    loss(model(inputs[mine]), targets[mine]).mean().backward()
    pull = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
    name = test.facts.groups[8]
    assert found["pull"][name] == pytest.approx(pull, rel=1e-3)
    assert found["norm"][name] > found["pull"][name]


def test_the_page_on_groups_is_what_its_figures_make(modules: Any) -> None:
    study = modules["group_curves"]
    found = json.loads((RESULTS / "group_curves.json").read_text())
    text, pictures = study.page(found)
    for name, made in {"group_curves.md": text, **pictures}.items():
        assert (RESULTS / name).read_text() == made, "run: python experiments/group_curves.py --pages"
    apart = study.apart(found, "loss", "dpsgd")
    assert f"{apart.value:.3f} ({apart.low:.3f} to" in text
