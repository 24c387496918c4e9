"""Kernels that differ from autograd in float32 are believed only if they are right in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracles import cross_entropy
from torch import Tensor, nn

from evenhand.errors import UnsupportedModelError
from evenhand.gradients import Engine, record_by_record
from evenhand.gradients import engine as engine_module
from evenhand.gradients.model_layout import Layout
from evenhand.gradients.record_blocks import Blocks
from evenhand.gradients.self_check import Comparison, Taped


@dataclass
class Gradients:
    """Those of autograd, times a factor."""

    loss: Tensor
    rows: dict[str, Tensor]
    slip: Tensor | None = None
    clean: bool = True

    @property
    def norm(self) -> Tensor:
        return record_by_record.row_norms(self.rows)

    def weighted_sum(self, weights: Tensor, usable: Any, blocks: Blocks, last: bool = False) -> dict[str, Tensor]:
        return {name: torch.tensordot(weights.double(), rows.double(), dims=1) for name, rows in self.rows.items()}


def taped(model: nn.Module, factor: float) -> Taped:
    def run(inputs: Any, targets: Any, size: int) -> Gradients:
        loss, rows = record_by_record.reference(model, cross_entropy, inputs, targets, torch.float64)
        return Gradients(loss, {name: g * factor for name, g in rows.items()})

    return run


@pytest.mark.parametrize(
    ("narrow", "wide", "agrees"),
    [(1.0, 2.0, True), (1.02, 1.0, True), (1.02, 1.02, False), (1.02, 1.0001, False), (1.5, 1.0, False),
     (1.02, None, False)],
)  # fmt: skip
def test_float64_decides_where_float32_is_not_far_off(narrow: float, wide: float | None, agrees: bool) -> None:
    model, (x, y) = nn.Linear(4, 3), (torch.randn(6, 4), torch.arange(6) % 3)
    precise = None if wide is None else taped(model, wide)
    comparison = Comparison(model, cross_entropy, Layout.read(model), taped(model, narrow), lambda: precise)
    assert comparison.agree(x, y, 6) is agrees
    assert comparison.still_agree(x, y, 6) is agrees


@pytest.mark.parametrize(("shrunk", "agrees"), [(1.0, True), (0.95, False)])
def test_norms_that_are_less_than_what_is_added_are_not_believed(shrunk: float, agrees: bool) -> None:
    """Off by 5 % in float32 and right in float64: a record that is clipped to 1 would add 1.05."""
    model, (x, y) = nn.Linear(4, 3), (torch.randn(6, 4), torch.arange(6) % 3)

    class Shrunk(Gradients):
        norm = property(lambda self: shrunk * record_by_record.row_norms(self.rows))  # type: ignore[assignment]

    def run(inputs: Any, targets: Any, size: int) -> Gradients:
        made = taped(model, 1.02)(inputs, targets, size)
        return Shrunk(made.loss, made.rows)

    comparison = Comparison(model, cross_entropy, Layout.read(model), run, lambda: taped(model, 1.0))
    assert comparison.agree(x, y, 6) is agrees


class Kinked(nn.Module):
    """Rounding of large numbers that cancel decides on which side of its kink a ReLU is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 3)
        with torch.no_grad():
            self.first.weight -= self.first.weight.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x + 200_000.0)))


def test_a_model_that_multiplies_rounding_keeps_its_kernels() -> None:
    torch.manual_seed(0)
    model = Kinked()
    engine = Engine(model, cross_entropy)
    norms = [engine.run(torch.randn(16, 64), torch.arange(16) % 3).norm for _ in range(9)]
    assert engine.way() == "kernels"
    assert all(bool((norm > 0).all()) for norm in norms)


def test_it_did_not_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "in_float64", lambda *args: None)
    with pytest.raises((UnsupportedModelError, AssertionError)):
        test_a_model_that_multiplies_rounding_keeps_its_kernels()
