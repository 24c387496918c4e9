"""A frozen network of one's own: it is used as it is, and refused if a record could reach the features of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.models.features import extract, names

NETS = """
import torch
from torch import nn
from torch.nn import functional

def body():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())

class Own(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.way = forward
    def forward(self, x):
        return self.way(self, x)

def centred(): return Own(lambda self, x: x - x.mean(0))
def a_little(): return Own(lambda self, x: x + 0.001 * x.sum())
def unseen(): return nn.BatchNorm1d(4, track_running_stats=False)
def random(): return Own(lambda self, x: functional.dropout(x))
def counting(): return Own(lambda self, x: x + self.seen.add_(x.sum(0)) * 0)
def one(): return Own(lambda self, x: x.sum())
def wide(): return nn.Linear(9, 2)
def number(): return 3
def fails(): raise RuntimeError("no weights")
def needs(facts): return nn.Linear(4, 2)
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(NETS)
    return str(tmp_path / "nets.py")


def test_a_network_is_used_in_eval_mode_and_stays_as_it_is(nets: str) -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh()).eval()
    records = torch.randn(50, 4)
    found = extract(f"{nets}:body", records, batch=16)
    assert found.shape == (50, 8)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected(records).detach())


@pytest.mark.parametrize("factory", ["centred", "a_little", "unseen", "random"])
def test_records_that_reach_each_other_are_refused(nets: str, factory: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"nets.py:{factory} .* mixes the records"):
        extract(f"{nets}:{factory}", torch.randn(20, 4))


def test_a_network_that_remembers_is_refused(nets: str) -> None:
    with pytest.raises(UnsupportedModelError, match="changes while it computes"):
        extract(f"{nets}:counting", torch.randn(20, 4))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("one", "a row of features per record"),
        ("wide", r"nets.py:wide cannot take inputs of shape \(4,\)"),
        ("number", "returned int"),
        ("fails", "failed with RuntimeError: no weights"),
        ("needs", "failed with TypeError"),
        ("missing", "has no function 'missing'"),
        ("not-a-name", "file.py:factory"),
    ],
)
def test_files_that_cannot_be_used_say_why(nets: str, factory: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        extract(f"{nets}:{factory}", torch.randn(20, 4))


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    assert names() == ("scattering", "efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2", "minilm")
    with pytest.raises(UsageError, match="Did you mean 'scattering'"):
        extract("scatering", torch.rand(2, 1, 8, 8))
    with pytest.raises(UsageError, match="no features file"):
        extract(f"{tmp_path / 'nothing.py'}:body", torch.rand(2, 4))
    (tmp_path / "stops.py").write_text("raise SystemExit(3)")
    with pytest.raises(UsageError, match="cannot be imported: SystemExit"):
        extract(f"{tmp_path / 'stops.py'}:body", torch.rand(2, 4))


@pytest.mark.parametrize("inputs", [torch.empty(0, 1, 8, 8), torch.tensor(1.0), [[1.0]]])
def test_inputs_must_be_rows(inputs: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="a row per record"):
        extract("scattering", inputs)
