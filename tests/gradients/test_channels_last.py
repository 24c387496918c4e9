"""Convolutions whose channels lie last in memory: as exact, only where it pays, and given up where views fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_conv import DOUBLE, OPTIONS, check, form
from test_engine_models import Custom, cross_entropy
from torch import Tensor, nn

from evenhand.gradients import Engine, serving
from evenhand.gradients.measuring import lies_last
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
    assert serving.channels_last(served := serving.sites(layers)) == served
    assert serving.channels_last(served[:1]) != served[:1]
