"""Several records of a person: one gradient, that of the mean loss, whatever the number of records."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenhand.data.persons import slotted
from evenhand.gradients import MicroBatches
from evenhand.gradients.views import Viewed, mean_of_persons

SLOTS = 4
COUNTS = torch.tensor([1, 4, 2, 3, 1, 4])
LOSS = nn.CrossEntropyLoss(reduction="none")


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.table(words))[0][:, -1])
        return out


class Unserved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 3))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.einsum("bi,io->bo", rows, self.matrix.sin())


MODELS = {
    "linear": (nn.Linear(5, 3), lambda count: torch.randn(count, 5)),
    "dense": (nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), lambda count: torch.randn(count, 5)),
    "convolution": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)),
        lambda count: torch.randn(count, 1, 6, 6),
    ),
    "recurrent": (LastState(), lambda count: torch.randint(9, (count, 5))),
    "raw parameter": (Unserved(), lambda count: torch.randn(count, 5)),
}


def gradient_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(LOSS(model(inputs), targets).mean(), list(model.parameters())))


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_person_has_the_gradient_of_the_mean_over_their_own_records(name: str, limit: int | None) -> None:
    model, make = MODELS[name]
    model = model.double()
    torch.manual_seed(1)
    inputs, targets = make(int(COUNTS.sum())), torch.randint(3, (int(COUNTS.sum()),))
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    rows, wanted = slotted(inputs, targets, COUNTS, SLOTS)
    batches = MicroBatches(Viewed(model, SLOTS), mean_of_persons(LOSS, SLOTS), limit=limit)
    weights = torch.rand(len(COUNTS), dtype=torch.float64)
    for _ in range(3):  # the second and third batch go the way that the first one learned
        result = batches.run(rows, wanted)
        summed = list(result.weighted_sum(weights).values())
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for person, (x, y) in enumerate(
            zip(inputs.split(COUNTS.tolist()), targets.split(COUNTS.tolist()), strict=True)
        ):
            parts = gradient_of(model, x, y)
            norm = torch.stack([part.norm() for part in parts]).norm()
            assert torch.allclose(result.norm[person], norm, rtol=1e-10, atol=0)
            assert torch.allclose(result.loss[person], LOSS(model(x), y).mean(), rtol=1e-12, atol=0)
            expected = [total + weights[person] * part for total, part in zip(expected, parts, strict=True)]
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(summed, expected, strict=True))


def test_what_stands_in_an_unused_place_changes_nothing() -> None:
    model = nn.Linear(5, 3).double()
    rows, (targets, shares) = slotted(torch.randn(3, 5).double(), torch.tensor([0, 1, 2]), torch.tensor([1, 2]), 3)
    batches = MicroBatches(Viewed(model, 3), mean_of_persons(LOSS, 3))
    before = batches.run(rows, (targets, shares)).norm.clone()
    other = rows.clone()
    other[shares == 0] = 1e3
    assert torch.equal(batches.run(other, (targets, shares)).norm, before)


def test_a_person_with_a_record_that_is_not_finite_is_left_out_and_nobody_else() -> None:
    inputs = torch.randn(6, 5)
    inputs[1] = torch.nan
    rows, wanted = slotted(inputs, torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1, 3, 2]), 3)
    model = nn.Linear(5, 3)
    result = MicroBatches(Viewed(model, 3), mean_of_persons(LOSS, 3)).run(rows, wanted)
    assert torch.isfinite(result.norm).tolist() == [True, False, True]
    summed = result.weighted_sum(torch.tensor([1.0, 0.0, 1.0]))
    others = gradient_of(model, inputs[:1], torch.tensor([0])), gradient_of(model, inputs[4:], torch.tensor([1, 2]))
    assert torch.allclose(summed["model.weight"], others[0][0] + others[1][0], rtol=1e-5, atol=1e-6)
