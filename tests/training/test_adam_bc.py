"""DP-AdamBC: the update by hand, the noise as it was released, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.training.optimizers import AdamBC
from evenhand.training.private import Private


@pytest.fixture(scope="module")
def tiny() -> Data:
    random = torch.Generator().manual_seed(0)
    return eh.data.wrap(torch.randn(40, 3, generator=random), torch.arange(40) % 2, labels=range(2))


def test_the_update_by_hand_with_noise_that_changes() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = AdamBC([weight], lr=0.1, betas=(0.8, 0.9), floor=0.05)
    value, first, second, noise = weight.detach().clone(), torch.zeros(2), torch.zeros(2), 0.0
    for step, std in enumerate((0.5, 0.5, 0.1, 0.3), 1):
        gradient = torch.tensor([0.7 / step, -0.2], dtype=torch.float64)
        optimizer.see_noise(std)
        weight.grad = gradient.clone()
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        noise = 0.9 * noise + 0.1 * std**2
        phi = noise / (1 - 0.9**step)
        scale = (second / (1 - 0.9**step) - phi).clamp(min=0.05 * phi).sqrt()
        value = value - 0.1 * first / (1 - 0.8**step) / scale
        assert weight.tolist() == pytest.approx(value.tolist(), rel=1e-9)


def test_untold_it_is_adam() -> None:
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    left, right = AdamBC([ours], lr=0.01, weight_decay=0.1), torch.optim.Adam([theirs], lr=0.01, weight_decay=0.1)
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        ours.grad = torch.randn(5, generator=random)
        theirs.grad = ours.grad.clone()
        left.step()
        right.step()
    assert torch.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(UsageError, match="without a closure"):
        left.step(lambda: 0.0)


def test_pure_noise_is_taken_out_of_the_second_moment() -> None:
    """Coordinates without signal end near the floor; one with a signal keeps its own square."""
    weight = nn.Parameter(torch.zeros(2000))
    optimizer = AdamBC([weight], lr=0.0, floor=0.0, eps=1e-12)
    random, std = torch.Generator().manual_seed(2), 0.3
    for _ in range(300):
        optimizer.see_noise(std)
        weight.grad = std * torch.randn(2000, generator=random)
        weight.grad[0] += 1.0
        optimizer.step()
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    phi = group["noise_average"] / group["noise_weight"]
    left = state["square"] / (1 - 0.999 ** state["step"]) - phi
    assert phi == pytest.approx(std**2)
    assert float(left[1:].mean()) == pytest.approx(0.0, abs=0.001)
    assert float(left[0]) == pytest.approx(1.0, abs=0.15)


def test_the_noise_is_the_one_that_was_released_and_goes_on_after_a_crash(
    tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a method whose bound, and so its noise, changes in every step."""
    seen: list[tuple[float, float, float]] = []
    update = Private._update

    def noted(self: Private, gradient: dict[str, Tensor]) -> None:
        if len(seen) == 12 and not (tmp_path / "resumed").exists():
            raise RuntimeError("crash")
        update(self, gradient)
        group = self.optimizer.param_groups[0]
        seen.append((group["noise"], group["noise_average"], group["noise_weight"]))

    monkeypatch.setattr(Private, "_update", noted)
    settings = {"epochs": 5, "batch_size": 8, "compose": False, "lr": 0.05, "optimizer": "adam_bc"}
    with pytest.raises(RuntimeError, match="crash"):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, method="adaptive_clip", out=tmp_path / "run", **settings)  # type: ignore[arg-type]
    (tmp_path / "resumed").touch()
    saved = torch.load(tmp_path / "run" / "private" / "checkpoint.pt", weights_only=True)
    place = saved["position"]
    group = saved["optimizer"]["param_groups"][0]
    assert (group["noise_average"], group["noise_weight"]) == seen[place - 1][1:]
    before = len(seen)
    run = eh.resume(tmp_path / "run", model=nn.Linear(3, 2), train=tiny)
    noise, average, weight = seen[before]
    assert average == pytest.approx(0.999 * seen[place - 1][1] + 0.001 * noise**2)
    assert weight == pytest.approx(0.999 * seen[place - 1][2] + 0.001)
    stds = [row.std for row in run.folder.ledger().commits if row.count == 1]
    assert {round(std / 8, 12) for std in stds} >= {round(value, 12) for value, _, _ in seen[:place]}
    assert len({round(value, 9) for value, _, _ in seen}) > 5
    assert eh.verify(tmp_path / "run")["ok"]
    assert torch.isfinite(run.model.weight).all()
