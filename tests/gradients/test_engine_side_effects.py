"""What an independent review of the engine found: each was wrong once, and stays mended."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.errors import UnsupportedModelError
from evenhand.gradients import memory
from evenhand.gradients.record_by_record import norms_and_folds
from evenhand.mechanism.random_streams import _scripted, box_muller

LOSS = nn.CrossEntropyLoss(reduction="none")


class ActNorm(nn.Module):
    """Takes its shift from the first batch that it sees in training mode."""

    shift: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("known", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not bool(self.known):
            self.shift.copy_(-x.detach().mean(0))
            self.known.fill_(True)
        return x + self.shift


@pytest.mark.parametrize("lean", [True, False])
def test_weighing_a_record_leaves_nothing_of_it_in_the_model(
    lean: bool, digit_data: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PART_BYTES", 100)
    train = digit_data[0]
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=train.facts, epochs=0.2, batch_size=128)
    model = nn.Sequential(ActNorm(64), nn.Linear(64, 10)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"out": tmp_path, "compute": eh.Compute(lean=lean), "compose": False}
    with eh.attach(model, optimizer, LOSS, plan, **options) as private:
        batch = next(iter(private.batches(train)))
        model.train()
        with pytest.raises(UnsupportedModelError):
            private.step(batch)


def test_weighing_restores_buffers() -> None:
    model = nn.Sequential(ActNorm(64), nn.Linear(64, 10)).train()
    assert memory.saved_bytes(model, LOSS, torch.ones(4, 64), torch.zeros(4, dtype=torch.long)) > 0
    assert bool((model[0].shift == 0).all())


@pytest.mark.parametrize("how", ["python", "compiled"])
def test_the_smallest_and_the_largest_uniform_give_finite_noise(how: str) -> None:
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    ends = [least, least + 512, least + 513, least + 1024, least + 2048, -1, 0, 1, most - 512, most]
    words = torch.tensor([[a, b] for a in ends for b in ends])
    out = torch.empty(len(words), 2, dtype=torch.float64)
    (box_muller if how == "python" else _scripted())(words.clone(), out, 7)
    assert bool(torch.isfinite(out).all())
    assert 8.0 < float(out.abs().max()) < 9.0


class Shared(nn.Module):
    """Two parameters that autograd gives one and the same gradient."""

    shape: ClassVar = (1, 5)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(self.shape)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.a + self.b).square()


class Expanded(nn.Module):
    """A parameter whose gradient is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.w).sum(1, keepdim=True)


@pytest.mark.parametrize("kind", [Shared, Expanded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_share_memory_add_up_right(kind: type[nn.Module], dtype: torch.dtype) -> None:
    model, x, y = kind().to(dtype), torch.randn(4, 5, dtype=dtype), torch.zeros(4, dtype=dtype)
    rows = []
    for record in x.split(1):
        model.zero_grad()
        model(record).sum().backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad(set_to_none=True)
    seeds = {name: 0 for name, _ in model.named_parameters()}
    norms, folds = norms_and_folds(model, lambda out, _: out.sum(1), x, y, seeds)
    assert folds.keys() == seeds.keys()
    for name, found in folds.items():  # so few numbers are not folded
        exact = sum(row[name] for row in rows).double().flatten()
        torch.testing.assert_close(torch.from_numpy(found), exact, rtol=1e-5, atol=1e-6)
    assert len(norms) == 4
