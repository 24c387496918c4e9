"""``evenhand doctor`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import evenhand, result
from evenhand.gradients.doctor import timing

NETS = """
import torch
from torch import nn

def normed(facts):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, len(facts.labels))
    )

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 8))

    def forward(self, x):
        return torch.einsum("bi,io->bo", x, self.weight.softmax(0))

def slow():
    return nn.Sequential(nn.Linear(4, 4), Mixed(), nn.Linear(8, 10))

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.table(x))

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def coupled():
    return nn.Sequential(nn.Linear(4, 8), Centred(), nn.Linear(8, 10))

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 10)

    def forward(self, x):
        if self.training:
            raise RuntimeError("this needs a GPU")
        return self.l(x)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(timing, "BLOCK_SECONDS", 0.0)
    (tmp_path / "nets.py").write_text(NETS)
    return str(tmp_path / "nets.py")


def test_a_built_in_model(nets: str) -> None:
    found = result("doctor", "--model", "cnn", "--input-shape", "1,8,8", "--batch", 8)
    assert found["trainable"] is True
    assert found["way"] == "kernels"
    assert found["slowdown"] > 0
    assert [part["kind"] for part in found["parts"]] == ["Conv2d", "Conv2d", "Linear", "Linear"]
    words = evenhand("doctor", "--model", "cnn", "--input-shape", "1,8,8", "--batch", 8).stdout
    assert "Trainable privately, by kernels" in words
    assert "times as long as plain SGD" in words


def test_batch_norm_is_refused_and_fixed(nets: str) -> None:
    line = ("doctor", "--model", f"{nets}:normed", "--input-shape", "3,8,8", "--batch", 8)
    done = evenhand(*line)
    assert done.returncode == 1
    assert "'1' (BatchNorm2d)" in done.stdout
    assert "BatchNorm2d(16) -> GroupNorm(16, 16)" in done.stdout
    assert "--fix" in done.stdout
    assert json.loads(evenhand(*line, "--json").stdout)["trainable"] is False
    mended = evenhand(*line, "--fix")
    assert mended.returncode == 0, mended.stderr
    assert "Fixed" in mended.stdout
    found = result(*line, "--fix")
    assert [change["name"] for change in found["fixed"]] == ["1"]
    assert "GroupNorm" in [part["kind"] for part in found["parts"]]


def test_nothing_to_fix_is_said(nets: str) -> None:
    done = evenhand("doctor", "--model", f"{nets}:slow", "--input-shape", 4, "--batch", 8, "--fix")
    assert done.returncode == 0
    assert "nothing to replace" in done.stdout


def test_a_slow_model_is_told_why(nets: str) -> None:
    done = evenhand("doctor", "--model", f"{nets}:slow", "--input-shape", 4, "--batch", 8)
    assert done.returncode == 0
    assert "run again (vmap)" in done.stdout
    assert "1 (Mixed): no kernel for this type" in done.stdout


def test_coupled_records_end_with_code_1(nets: str) -> None:
    done = evenhand("doctor", "--model", f"{nets}:coupled", "--input-shape", 4, "--batch", 8)
    assert done.returncode == 1
    assert "'1' (Centred)" in done.stdout


def test_indices_and_outputs_of_any_shape(nets: str) -> None:
    line = ("doctor", "--model", f"{nets}:Tagger", "--input-shape", 12, "--input-dtype", "long", "--batch", 8)
    found = result(*line, "--vocabulary", 50, "--classes", 0)
    assert found["way"] == "kernels"


def test_the_bench_is_a_table(nets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.cli.doctor.ROUNDS", 1)
    line = ("doctor", "--model", "linear", "--input-shape", 4, "--batch", 8, "--bench")
    names = [row["name"] for row in result(*line)["bench"]]
    assert names == ["plain SGD", "evenhand", "Opacus hooks", "Opacus ghost"]
    assert "times SGD" in evenhand(*line).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "cnn"], "input-shape"),
        (["--model", "cnn", "--input-shape", "1,x"], "--input-shape takes"),
        (["--model", "cnn", "--input-shape", "0,8,8"], "--input-shape takes"),
        (["--model", "cnn", "--input-shape", "3"], "--model mlp"),
        (["--model", "nope", "--input-shape", "3"], "nope"),
        (["--model", "missing.py:net", "--input-shape", "3"], "no model file"),
        (["--model", "linear", "--input-shape", "3", "--batch", "0"], "batch=0"),
        (["--model", "linear", "--input-shape", "3", "--classes", "-1"], "classes=-1"),
        (["--model", "linear", "--input-shape", "3", "--input-dtype", "long"], "--vocabulary 1000"),
        (["--model", "linear", "--input-shape", "3", "--input-dtype", "half"], "half"),
        (["--model", "linear", "--input-shape", "3", "--vocabulary", "9"], "--input-dtype long"),
    ],
)
def test_usage_errors_end_with_code_2(arguments: list[str], words: str) -> None:
    done = evenhand("doctor", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_model_that_fails_is_a_usage_error(nets: str) -> None:
    done = evenhand("doctor", "--model", f"{nets}:Failing", "--input-shape", 4)
    assert done.returncode == 2
    assert "this needs a GPU" in done.stderr
    assert "made-up records" in done.stderr
