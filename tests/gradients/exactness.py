"""Check that a model is exact against plain autograd, or refused: what the tests of odd models share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from oracles import cross_entropy
from torch import Tensor, nn

from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.gradients import Engine, probe
from evenhand.gradients.batch_utils import take
from evenhand.types import Pass

DOUBLE = torch.float64


SIZE = 6


TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A model with the shape of one record's input, or with its inputs."""

    model: nn.Module
    record: tuple[int, ...] | Any = (4,)
    loss: Callable[[Any, Tensor], Tensor] = cross_entropy

    def inputs(self) -> Any:
        if isinstance(self.record, tuple) and all(isinstance(size, int) for size in self.record):
            return torch.randn(SIZE, *self.record, dtype=DOUBLE)
        return copy.deepcopy(self.record)


def oracle(model: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Tensor) -> dict[str, Tensor]:
    """Each record's gradient, by plain autograd on the record alone."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(len(targets)):
        alone = copy.deepcopy(take(inputs, slice(i, i + 1)))
        outputs = model(*alone) if isinstance(alone, tuple) else model(alone)
        value = loss(outputs, targets[i : i + 1]).sum()
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        for (name, parameter), gradient in zip(named.items(), found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(each) for name, each in rows.items()}


def compare(result: Pass, expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    norm = torch.stack([rows.double().flatten(1).square().sum(1) for rows in expected.values()]).sum(0).sqrt()
    torch.testing.assert_close(result.norm, norm, rtol=tolerance, atol=tolerance)
    weights = torch.randn(len(norm), dtype=DOUBLE)
    sums = result.weighted_sum(weights)
    assert list(sums) == list(expected)
    for name, rows in expected.items():
        wanted = torch.tensordot(weights, rows.double(), dims=1)
        torch.testing.assert_close(sums[name].double(), wanted, rtol=tolerance, atol=tolerance)


def check(case: Case, steps: int = 2) -> None:
    """The probe accepts, and every batch is exact."""
    probe(case.model, case.loss, case.inputs(), torch.arange(SIZE) % 3)
    engine = Engine(case.model, case.loss)
    for _ in range(steps):
        inputs, targets = case.inputs(), torch.randint(3, (SIZE,))
        expected = oracle(case.model, case.loss, inputs, targets)
        compare(engine.run(inputs, targets), expected)


def lin(a: int = 4, b: int = 3) -> nn.Linear:
    return nn.Linear(a, b)


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).double()


REFUSED = (UnsupportedModelError, UsageError)


def batch(size: int = SIZE, *record: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, *(record or (4,)), dtype=DOUBLE), torch.randint(3, (size,))


def exact_or_refused(engine: Engine, model: nn.Module, inputs: Any, targets: Tensor, loss: Any = cross_entropy) -> None:
    expected = oracle(model, loss, inputs, targets)
    try:
        result = engine.run(copy.deepcopy(inputs), targets)
    except REFUSED:
        return
    compare(result, expected)
