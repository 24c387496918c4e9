"""The studies with a script of their own: epsilon by epochs and by noise, how groups and an owner's classes learn."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evenhand as eh
from evenhand.comparison.sweep import Cell
from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.training.config import Config

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


@pytest.mark.parametrize("name", ["group_curves", "owner_curves", "lira_owners", "findings", "adapt_curves"])
def test_pages_of_curves_are_what_their_figures_make(modules: Any, name: str) -> None:
    text, pictures = modules[name].page(json.loads((RESULTS / f"{name}.json").read_text()))
    for end, made in {f"{name}.md": text, **pictures}.items():
        assert (RESULTS / end).read_text() == made, f"run: python experiments/{name}.py --pages"


def test_the_page_of_promises_on_mnist_is_what_its_figures_make(modules: Any) -> None:
    study = modules["idp_mnist"]
    rows = json.loads((RESULTS / "idp_mnist_code.json").read_text())["runs"]
    assert (RESULTS / "idp_mnist_code.md").read_text() == study.page(rows, study.CODE), "run: ... --as-code --pages"


def test_claims_of_promises_hold_only_with_their_whole_interval(modules: Any) -> None:
    study = modules["idp_mnist"]

    def row(method: str, seed: int, accuracy: float) -> dict[str, Any]:
        return {"method": method, "seed": seed, "rate": 5.0, "accuracy": accuracy}

    rows = [row("dpsgd", seed, 0.960 + seed / 1000) for seed in range(5)]
    gaining = [row("idp_sample", seed, 0.985 + seed / 1000) for seed in range(5)]
    alike = [row("idp_sample", seed, 0.960 + seed / 1000) for seed in range(5)]
    assert [claim.verdict for claim in study.claims(rows + gaining)] == ["holds", "holds"]
    assert study.claims(rows + alike)[0].verdict == "too small to matter"
    assert study.claims(rows + alike)[1].verdict == "does not hold"
    assert study.claims(rows + gaining[:1]) == [], "one seed tells nothing"
    assert study.claims(rows + gaining)[0].points.value == pytest.approx(2.5)


def test_the_page_on_groups_says_how_far_they_are_apart(modules: Any) -> None:
    study = modules["group_curves"]
    found = json.loads((RESULTS / "group_curves.json").read_text())
    apart = study.apart(found, "loss", "dpsgd")
    assert f"{apart.value:.3f} ({apart.low:.3f} to" in study.page(found)[0]


def test_classes_of_an_owner_are_followed_with_the_rate_that_tuning_chose(modules: Any, tmp_path: Path) -> None:
    study = modules["owner_curves"]
    tuned = {"entries": [{"method": m, "epsilon": 4.0, "tuning": {"chosen": {"lr": 0.75}}} for m in study.METHODS]}
    (tmp_path / "mnist_owners.json").write_text(json.dumps(tuned))
    cells = study.cells(2, tmp_path)
    assert [(cell.method, cell.seed) for cell in cells] == [(m, seed) for m in study.METHODS for seed in (0, 1)]
    assert {cell.config.lr for cell in cells} == {0.75}
    assert cells[0].config.source["owners"] == "digits"
    with pytest.raises(UsageError, match="run `python experiments/results"):
        study.cells(2, tmp_path / "none")


def test_recall_of_classes_rises_while_an_owner_is_followed(modules: Any) -> None:
    budgets = {"0-4": 4.0, "5-9": 8.0}
    config = Config("digits", model="linear", method="ino_sample", epochs=3.0, batch_size=128.0, lr=1.0, delta=1e-4)
    config = dataclasses.replace(config, source={"owners": "digits"}, budgets=budgets, settings={"bound": 0.5})
    found = modules["owner_curves"].measured([Cell("ino_sample", 8.0, 0, config)], None)
    rows = found["runs"][0]["rows"]
    assert [row["epoch"] for row in rows] == pytest.approx([0.5, 1, 1.5, 2, 2.5, 3], abs=0.1)
    assert list(rows[0]["recall"]) == [f"class {digit}" for digit in range(10)]
    assert sum(rows[-1]["recall"].values()) > sum(rows[0]["recall"].values())
    assert {owner: list(held) for owner, held in found["owners"].items()} == {
        "0-4": [f"class {digit}" for digit in range(5)],
        "5-9": [f"class {digit}" for digit in range(5, 10)],
    }


def followed(modules: Any, lift: float) -> dict[str, Any]:
    """Made-up figures: INO lifts the slow class of the strict owner by about ``lift``, and nothing else."""
    study, epochs = modules["owner_curves"], (0.5, 1.0, 2.0)
    runs = [
        {
            "method": method,
            "seed": seed,
            "rows": [
                {"epoch": e, "recall": {"slow": 0.4 + seed / 100 + more(seed), "fast": 0.9 + seed / 100, "other": 0.1}}
                for e in epochs
            ],
        }
        for method, more in zip(study.METHODS, (lambda seed: 0.0, lambda seed: lift + (seed - 1) / 1000), strict=True)
        for seed in range(3)
    ]
    settings = {"data": "made", "model": "linear", "delta": 1e-5, "epochs": 2.0, "batch_size": 10.0, "records": 100}
    settings |= {"bound": 1.0, "budgets": {"open": 4.0, "strict": 1.0}, "lr": dict.fromkeys(study.METHODS, 0.5)}
    owners = {"open": {"other": 10}, "strict": {"slow": 10, "fast": 20}}
    return {"settings": settings, "seeds": 3, "minutes": 2.5, "owners": owners, "runs": runs}


@pytest.mark.parametrize(("lift", "verdict"), [(0.2, "holds"), (-0.1, "does not hold")])
def test_the_page_on_an_owner_judges_what_the_paper_says(modules: Any, lift: float, verdict: str) -> None:
    text, pictures = modules["owner_curves"].page(followed(modules, lift))
    spread = 50 - 100 * lift
    change = f"{-100 * lift:+.1f} ({-100 * lift - 0.2:+.1f} to {-100 * lift + 0.2:+.1f})"
    shown = f"| 50.0 (50.0 to 50.0) | {spread:.1f} ({spread - 0.2:.1f} to {spread + 0.2:.1f}) | {change} | {verdict} |"
    assert text.count(shown) == 3
    assert "| idp\\_sample, slow | 41.0 (38.5 to 43.5) |" in text
    assert "sample, other" not in text
    assert modules["results"].MINUTES.findall(text) == ["2.5"]
    assert list(pictures) == ["owner_curves_idp_sample.svg", "owner_curves_ino_sample.svg"]
    assert all("slow" in drawing and "recall, %" in drawing for drawing in pictures.values())


def density_rows(modules: Any, gain: float) -> list[dict[str, Any]]:
    """Made-up lines: a density that lies ``gain`` points above the linear model in everything."""
    page = modules["density_page"]
    seconds = {"fit": 1.0, "predict": 0.5}
    return [
        {"data": name, "epsilon": epsilon, "form": form, "seed": seed, "accuracy": 90.0 + seed + more,
         "classes": [80.0 + seed + more, 95.0], "auc": [0.9, 0.95], "seconds": seconds, "memory": 100.0}
        for name in page.DATA[:2] for epsilon in (0.0, 1.0, 3.0) for seed in (0, 1)
        for form, more in ((page.LINEAR, 0.0), ("moment_density", gain))
    ]  # fmt: skip


@pytest.mark.parametrize(("gain", "near", "above"), [(0.5, "yes", "yes"), (-0.5, "yes", "no"), (-1.5, "no", "no")])
def test_densities_are_judged_by_their_goals(modules: Any, gain: float, near: str, above: str) -> None:
    said = "\n".join(modules["density_page"].answers(density_rows(modules, gain)))
    assert f"accuracy of `moment_density` less the linear model's: {gain:.2f} ({gain:.2f} to {gain:.2f})" in said
    assert said.count(f"at most 1 point below: {near}") == said.count(f"above the linear model: {above}") == 2


def test_the_page_of_densities_shows_every_form_and_class(modules: Any) -> None:
    text, pictures = modules["density_page"].page(density_rows(modules, 0.5), 1e-5, 12.4)
    assert "| DP-SGD linear | 90.50 (84.15 to 96.85) / 80.5 |" in text
    assert "| moment_density | 81.0 | 95.0 |" in text
    assert "| moment_density | 1.0 | 0.5 | 100 |" in text
    assert modules["results"].MINUTES.findall(text) == ["12"]
    assert len(pictures) == 4
    assert all(f"]({name})" in text for name in pictures)


def test_scores_of_classes(modules: Any) -> None:
    scores, labels = np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]), np.array([0, 0, 1])
    assert modules["densities"].by_class(scores, labels) == [50.0, 0.0]
