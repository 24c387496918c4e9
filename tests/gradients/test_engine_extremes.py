"""Rows that float32 cannot carry: huge, tiny, not finite, or made to cancel. No norm may come out too small."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evenhand.gradients import Engine, per_sample
from evenhand.gradients.record_by_record import reference, row_norms
from evenhand.types import Pass


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) * targets.flatten(1)).sum(1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets.flatten(1)).square().sum(1)


def contributions(result: Pass) -> Tensor:
    rows = [result.weighted_sum(row).values() for row in torch.eye(len(result.norm), dtype=torch.float64)]
    return torch.stack([torch.cat([g.flatten().double() for g in row]).norm() for row in rows])


def exact(model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return row_norms(reference(model, loss_fn, x, y, torch.float64)[1])


MODELS = {
    "kernels": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
    "fallback": lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 2)),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [1e12, 1e19, 1e25, 1e30])
def test_a_huge_row_is_measured_and_clipped_exactly(kind: str, size: float) -> None:
    model, x, y = MODELS[kind](), torch.randn(6, 4), torch.randn(6, 2)
    clean = per_sample(model, squared, x, y)
    x = torch.where(torch.arange(6)[:, None] == 2, x * size, x)
    result = per_sample(model, squared, x, y)
    torch.testing.assert_close(result.norm, exact(model, squared, x, y), rtol=1e-5, atol=0)
    assert torch.isfinite(result.loss).all()
    torch.testing.assert_close(result.norm[3:], clean.norm[3:])
    weights = 1 / result.norm
    total = torch.cat([g.flatten() for g in result.weighted_sum(weights * (torch.arange(6) == 2)).values()])
    assert float(total.double().norm()) == pytest.approx(1.0, rel=1e-5)
    others = weights * (torch.arange(6) != 2)
    for name, part in result.weighted_sum(others).items():
        torch.testing.assert_close(part, clean.weighted_sum(others)[name])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("weight", [0.0, 1.0, torch.nan, torch.inf])
def test_a_row_that_is_not_finite_contributes_nothing(kind: str, value: float, weight: float) -> None:
    model, x, y = MODELS[kind](), torch.randn(6, 4), torch.randn(6, 2)
    clean = per_sample(model, squared, x, y)
    x = x.clone()
    x[2, 1] = value
    result = Engine(model, squared).run(x, y)
    rest = torch.arange(6) != 2
    assert not torch.isfinite(result.norm[2])
    torch.testing.assert_close(result.norm[rest], clean.norm[rest])
    weights = torch.ones(6)
    weights[2] = weight
    for name, part in result.weighted_sum(weights).items():
        torch.testing.assert_close(part, clean.weighted_sum(rest.double())[name])


def test_a_batch_of_nothing_finite() -> None:
    result = per_sample(nn.Linear(4, 2), squared, torch.full((3, 4), torch.nan), torch.zeros(3, 2))
    assert all(not part.any() for part in result.weighted_sum(torch.ones(3)).values())


def test_a_bad_first_batch_does_not_decide_how_later_ones_are_served() -> None:
    model, x, y = MODELS["kernels"](), torch.randn(6, 4), torch.randn(6, 2)
    engine = Engine(model, squared)
    engine.run(torch.full((6, 4), torch.nan), y)
    assert type(engine.run(x, y).weighted_sum.__self__._raw).__name__ != "HeldGradients"  # type: ignore[attr-defined]


def test_a_finite_gradient_under_an_infinite_loss_contributes_nothing() -> None:
    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        return summed(outputs, targets) + torch.where(targets[:, 0] > 5, torch.inf, 0.0)

    x, y = torch.randn(4, 3), torch.ones(4, 2)
    y[1] = 9.0
    result = per_sample(nn.Linear(3, 2), infinite, x, y)
    assert torch.isfinite(result.norm).tolist() == [True, False, True, True]
    assert float(result.weighted_sum(torch.tensor([0.0, 1.0, 0.0, 0.0]))["weight"].norm()) == 0.0


def test_code_that_insists_on_float32_loses_the_extreme_row_only() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.table = nn.Linear(4, 4), torch.eye(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x) @ self.table

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    x[1] = 1e30
    result = per_sample(Stubborn(), squared, x, y)
    assert torch.isfinite(result.norm).tolist() == [True, False, True, True]
    assert all(torch.isfinite(part).all() for part in result.weighted_sum(torch.ones(4)).values())


@pytest.mark.parametrize("size", [1e-10, 1e-18, 1e-24, 1e-30])
def test_tiny_rows_keep_their_norm(size: float) -> None:
    """Rules that normalise divide by the norm; squares of such entries vanish in float32."""
    for shape in [(5, 4), (5, 7, 4)]:
        model, x = nn.Linear(4, 2), torch.randn(shape)
        y = torch.randn(*shape[:-1], 2) * size
        result = per_sample(model, summed, x, y)
        torch.testing.assert_close(result.norm, exact(model, summed, x, y), rtol=1e-5, atol=0)


def _cancelling(shape: tuple[int, ...], rest: float) -> tuple[Tensor, Tensor]:
    """Two halves along time that cancel up to a remainder."""
    x, g = torch.randn(shape), torch.randn(*shape[:-1], 3)
    half = shape[1] // 2
    x[:, half : 2 * half] = x[:, :half]
    g[:, half : 2 * half] = -g[:, :half] * (1 + rest * torch.randn(shape[0], half, 1))
    if shape[1] % 2:
        g[:, -1] = 0
    return x, g


@pytest.mark.parametrize("rest", [0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 16, 40), (6, 300, 5), (6, 65, 33)])
@pytest.mark.parametrize("bias", [True, False])
def test_cancelling_sums_over_time(shape: tuple[int, ...], rest: float, bias: bool) -> None:
    model = nn.Linear(shape[-1], 3, bias=bias)
    x, y = _cancelling(shape, rest)
    result = per_sample(model, summed, x, y)
    torch.testing.assert_close(result.norm, exact(model, summed, x, y), rtol=1e-5, atol=1e-12)
    scale = result.norm.clamp(min=1e-6)
    assert bool((contributions(result) <= result.norm + 2e-3 * scale).all())


@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("channels", [1, 48])
@pytest.mark.parametrize("side", [3, 12])
def test_cancelling_sums_over_pixels(side: int, channels: int, rest: float) -> None:
    model = nn.Conv2d(channels, 3, 1)
    x, y = _cancelling((4, side * side, channels), rest)
    x, y = (t.mT.reshape(4, -1, side, side).contiguous() for t in (x, y))
    torch.testing.assert_close(per_sample(model, summed, x, y).norm, exact(model, summed, x, y), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-4, 1e-2])
def test_cancelling_lookups_norms_and_repeated_calls(rest: float) -> None:
    _, g = _cancelling((4, 40, 3), rest)
    index = torch.randint(5, (4, 20)).repeat(1, 2)
    cases: list[tuple[nn.Module, Tensor, Tensor]] = [
        (nn.Embedding(5, 3), index, g),
        (nn.LayerNorm(3), torch.randn(4, 20, 3).repeat(1, 2, 1), g),
        (nn.GroupNorm(3, 3), torch.randn(4, 3, 20).repeat(1, 1, 2), g.mT.contiguous()),
    ]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.l(x), self.l(x)], 1)

    one = torch.randn(4, 1, 3)
    cases.append((Twice(), torch.randn(4, 6), torch.cat([one, -one * (1 + rest)], 1)))
    for model, x, y in cases:
        found, wanted = per_sample(model, summed, x, y).norm, exact(model, summed, x, y)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-12, msg=type(model).__name__)


@pytest.mark.parametrize("seed", range(5))
def test_float32_models_agree_with_float64(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.Tanh(),
        nn.Flatten(2), nn.LayerNorm(9), nn.Linear(9, 4), nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip
    x, y = torch.randn(8, 3, 8, 8), torch.randn(8, 5)
    result = per_sample(model, squared, x, y)
    precise = per_sample(copy.deepcopy(model).double(), squared, x.double(), y.double())
    torch.testing.assert_close(result.norm, precise.norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(contributions(result), result.norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_half_precision_models_are_summed_in_float32(kind: str) -> None:
    model = MODELS[kind]().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = per_sample(model, squared, torch.randn(5, 4).bfloat16(), torch.randn(5, 2).bfloat16())
    sums = result.weighted_sum(torch.ones(5))
    assert {part.dtype for part in sums.values()} == {torch.float32}
    torch.testing.assert_close(contributions(result), result.norm, rtol=1e-5, atol=0)


def test_a_row_that_is_not_finite_does_not_decide_how_the_first_batch_is_served() -> None:
    """Compared with autograd it would tell nothing, and one record would move the last digits of all others."""
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    x[3] = torch.nan
    for _ in range(40):
        result = Engine(MODELS["kernels"](), squared).run(x, y)
        assert type(result.weighted_sum.__self__._raw).__name__ != "HeldGradients"  # type: ignore[attr-defined]
