"""Convolutions whose channels lie last in memory: as exact, only where it pays, and given up where views fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_checks import DOUBLE, OPTIONS, check, form
from exactness import compare, oracle
from oracles import Custom, cross_entropy
from torch import Tensor, nn

from conftest import by_kernels
from evenhand.gradients import Engine, model_layout
from evenhand.gradients.layers.conv import ConvKernel
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.row_norms import lies_last
from evenhand.types import Pass

__all__ = ["form"]
Oracle = Callable[..., Pass]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
Forward = Callable[[Any, Tensor], Tensor]


def body() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(8, 4, 2), nn.Tanh())


def network(forward: Forward) -> nn.Module:
    return Custom(forward, body=body(), head=nn.Linear(64, 3)).double()


def reshaped(m: Any, x: Tensor) -> Tensor:
    return m.head(m.body(x).flatten(1))


def viewed(m: Any, x: Tensor) -> Tensor:
    return m.head(m.body(x).view(len(x), -1))


def by_steps(m: Any, x: Tensor) -> Tensor:
    """What lies where is taken for granted here: other records' numbers or another order, silently."""
    found = m.body(x)
    return m.head(found.as_strided((len(x), 64), (64, 1)))


def pictures(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 12, 12, dtype=DOUBLE), torch.randint(3, (size,))


@pytest.mark.parametrize("bias", [True, False])
def test_every_option(form: bool, bias: bool) -> None:
    options = [o for o in OPTIONS if o[1] != "same" or o[0] == 1]
    for stride, padding, dilation, groups, kernel in options[bias::7]:
        layer = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, bias=bias, dtype=DOUBLE)
        check(layer, torch.randn(3, 4, 7, 6, dtype=DOUBLE), form, last=True)


@pytest.mark.parametrize("shape", [(1, 5, 5), (9, 6, 5)])
def test_one_channel_and_many(form: bool, shape: tuple[int, ...]) -> None:
    check(nn.Conv2d(shape[0], 3, 3, padding=1, dtype=DOUBLE), torch.randn(4, *shape, dtype=DOUBLE), form, last=True)


def seen_by(model: nn.Module, engine: Engine, x: Tensor, y: Tensor) -> list[bool]:
    """Whether the channels of what each activation saw lay last."""
    seen: list[bool] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(lies_last(given[0]))) for layer in model.body
             if not list(layer.parameters())]  # fmt: skip
    engine.run(x, y)
    for hook in hooks:
        hook.remove()
    return seen[-len(hooks) :]


def test_channels_are_left_last(agrees: Oracle) -> None:
    model, (x, y) = network(reshaped), pictures()
    assert all(seen_by(model, Engine(model, cross_entropy), x, y))
    agrees(model, x, y, kernels=True)


@pytest.mark.parametrize(("forward", "kernels"), [(viewed, True), (by_steps, None)])
def test_a_model_that_looks_at_memory_stays_exact(forward: Forward, kernels: bool | None, agrees: Oracle) -> None:
    model, (x, y) = network(forward), pictures()
    agrees(model, x, y, kernels=kernels)


NARROW = [((3, 2), (1, 2), (5, 1)), (3, (1, 2), (5, 2)), (3, (1, 8), (28, 6)), (3, 1, (1, 1)), (2, 1, (2, 2))]


@pytest.mark.parametrize(("kernel", "stride", "size"), NARROW)
@pytest.mark.parametrize("groups", [1, 4])
def test_one_channel_a_group_and_narrow_pictures(kernel: Any, stride: Any, size: tuple[int, int], groups: int) -> None:
    """Steps that only say that one channel lies last make torch's convolution wrong, or crash, for some of these."""
    layer = nn.Conv2d(groups, 8, kernel, stride, padding=1, groups=groups)
    turned = ConvKernel().channels_last(layer)
    assert turned is not None
    for count in (1, 2, 3, 8):
        x = torch.randn(count, groups, *size)
        with torch.no_grad():
            torch.testing.assert_close(turned.forward(layer, x)[0], layer.double()(x.double()).float())
        layer.float()


class Wants(torch.autograd.Function):
    """Code of one's own that refuses what does not lie in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


def wanting(m: Any, x: Tensor) -> Tensor:
    return m.head(Wants.apply(m.body(x)).flatten(1))


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.view_as_complex(m.body(x).unflatten(3, (-1, 2))).abs().repeat(1, 1, 1, 2).flatten(1))


@pytest.mark.parametrize("forward", [wanting, complex_numbers])
def test_code_that_wants_its_own_order_is_served_by_kernels(forward: Forward) -> None:
    model, (x, y) = network(forward), pictures()
    engine = Engine(model, cross_entropy)
    result = engine.run(x, y)
    assert by_kernels(result)
    compare(result, oracle(model, cross_entropy, x, y))


class Counting(nn.Module):
    """Fails with channels last, but only where there is more than one pixel; drops at random and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.head = nn.Conv2d(2, 8, 3, padding=1), nn.Dropout(0.5), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.drop(self.conv(x))
        return self.head(found.view(len(found), 4, -1).tanh().mean(2))


def test_a_failed_attempt_leaves_no_trace() -> None:
    model, y = Counting().double(), torch.randint(3, (8,))
    small, large = torch.randn(8, 2, 1, 1, dtype=DOUBLE), torch.randn(8, 2, 3, 3, dtype=DOUBLE)
    used, fresh = Engine(model, cross_entropy), Engine(model, cross_entropy)
    used.run(small, y)
    found = []
    for engine in (used, fresh):
        torch.manual_seed(7)
        before = model.calls.clone()
        found.append((engine.run(large, y).loss.sum().item(), torch.rand(1).item(), (model.calls - before).item()))
    assert found[0] == found[1]
    assert found[0][2] == 1


class Plain(nn.Module):
    """What vmap cannot go through: it asks for a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().sum()) >= 0 else -x


@pytest.mark.parametrize("between", [nn.Identity(), Plain()])
def test_no_record_exceeds_its_bound_when_parts_run_twice(between: nn.Module) -> None:
    """A record that is not finite makes the first part run the slow way, and by kernels the second time.

    The same random numbers then drop other activations, so the gradient of the sum is not the one whose norm was taken.
    """
    body = [nn.Conv2d(1, 8, 3), nn.ReLU(), between, nn.Dropout(0.5), nn.Flatten(), nn.Linear(128, 16), nn.Dropout(0.5)]
    model, longest = nn.Sequential(*body, nn.Linear(16, 3)).double(), []
    for seed in range(8):
        torch.manual_seed(seed)
        x, y = torch.randn(16, 1, 6, 6, dtype=DOUBLE), torch.randint(3, (16,))
        x[0] = torch.nan
        result = MicroBatches(model, cross_entropy, limit=8).run(x, y)
        weights = torch.zeros(16, dtype=DOUBLE)
        weights[1 + seed % 7] = 1 / result.norm[1 + seed % 7]
        longest.append(torch.cat([v.flatten() for v in result.weighted_sum(weights).values()]).norm().item())
    assert max(longest) <= 1 + 1e-9
    assert min(longest) > 0.2


def test_views_are_given_up_once_and_kernels_still_serve() -> None:
    model, (x, y) = network(viewed), pictures()
    engine = Engine(model, cross_entropy)
    assert not any(seen_by(model, engine, x, y))
    again = engine.run(x, y)
    plain = Engine(network(reshaped), cross_entropy)
    plain._model.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.norm, plain.run(x, y).norm)


def test_other_errors_are_not_hidden() -> None:
    model, (x, y) = network(lambda m, x: m.head(m.body(x))), pictures()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Engine(model, cross_entropy).run(x, y)


def test_group_norms_keep_their_channels_first() -> None:
    layers = [("a", nn.Conv2d(1, 4, 3)), ("b", nn.GroupNorm(2, 4))]
    assert model_layout.with_channels_last(served := model_layout.sites(layers)) == served
    assert model_layout.with_channels_last(served[:1]) != served[:1]
