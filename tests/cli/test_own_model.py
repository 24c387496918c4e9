"""Models of one's own, pictures, frozen layers; code never comes out of a run folder."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from ways import done, evenhand, train, write

import evenhand as eh
from evenhand.errors import UsageError
from evenhand.models import build
from evenhand.types import Facts

NETS = """
import torch
from torch import nn

def net(facts):
    torch.manual_seed(7)
    frozen = nn.Linear(3, 5).requires_grad_(False)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(5, len(facts.labels)))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def test_a_model_file_trains_and_predicts_and_frozen_layers_stay(project: Path) -> None:
    assert train(project, "--model", "nets.py:net", "--json").returncode == 0
    model = eh.load(project / "run", model=f"{project / 'nets.py'}:net").model
    torch.manual_seed(7)
    assert torch.equal(model[0].weight, torch.nn.Linear(3, 5).weight)
    assert not model[0].weight.requires_grad
    assert done("predict", "run", "people.csv", "--model", "nets.py:net", cwd=project)["records"] == 80


def test_predictions_see_the_features_that_training_saw(project: Path) -> None:
    code = """
        import torch

        class Twice(torch.nn.Module):
            def forward(self, x):
                return torch.cat([x, -x], 1)
    """
    (project / "body.py").write_text(textwrap.dedent(code))
    assert train(project, "--model", "linear", "--features", "body.py:Twice", "--json").returncode == 0
    assert done("predict", "run", "people.csv", "--features", "body.py:Twice", cwd=project)["records"] == 80


def test_another_architecture_does_not_load(project: Path) -> None:
    assert train(project, "--json").returncode == 0
    with pytest.raises(UsageError, match="same architecture"):
        eh.load(project / "run", model=torch.nn.Linear(2, 2))
    (project / "run" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(UsageError, match="damaged"):
        eh.load(project / "run")


@pytest.mark.parametrize("name", ["linear", "logistic", "mlp", "cnn"])
def test_built_in_models_give_one_output_per_label(name: str) -> None:
    facts = Facts(9, (("all", 9),), labels=("a", "b", "c"), inputs="(1, 9, 12) float32")
    model = build(name, facts)
    assert model(torch.zeros(2, 1, 9, 12)).shape == (2, 3)


def test_pictures_train_a_small_network(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for label, level in (("dark", 40), ("light", 200)):
        (tmp_path / "scans" / label).mkdir(parents=True)
        for number in range(30):
            pixels = np.clip(generator.normal(level, 10, (8, 8)), 0, 255).astype(np.uint8)
            pillow.fromarray(pixels).save(tmp_path / "scans" / label / f"{number}.png")
    made = done("init", "scans", "--size", "8x8", "--grey", "--groups", "folder", cwd=tmp_path)
    flags = ["--epsilon", 8, "--epochs", 6, "--batch-size", 15, "--out", "run"]
    found = done("train", made["config"], *flags, cwd=tmp_path)
    assert set(found["groups"]) == {"dark", "light"}
    assert found["accuracy"] > 0.7
    answers = done("predict", "run", "scans", "--keep", "file", cwd=tmp_path)
    assert len(answers["kept"]["file"]) == 60
    refused = evenhand("init", "scans", "--out", "x.toml", cwd=tmp_path)
    assert "--size WIDTHxHEIGHT" in refused.stderr


def test_pictures_of_another_size_are_resized_when_asked(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        pillow.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / label / "p.jpg")
    declared = {"image": eh.data.Image(height=8, width=8, resize=True)}
    data = eh.data.read(tmp_path, eh.data.Declaration(declared, label="folder", labels=("a", "b")))
    assert data.facts.inputs == "(3, 8, 8) float32"
