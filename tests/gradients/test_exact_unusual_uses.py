"""Models that use their parameters, gradients or inputs by another way than an engine looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import DOUBLE, batch, exact_or_refused, lin, net
from oracles import Custom, cross_entropy
from torch import Tensor, nn
from torch.nn import functional

from evenhand.errors import UnsupportedModelError
from evenhand.gradients import Engine, probe


def in_a_list() -> tuple[nn.Module, Any]:
    model = Custom(lambda m, x: functional.linear(x, m.held[0], m.held[1]), l=lin())
    model.held = [model.l.weight, model.l.bias]
    return model, cross_entropy


def in_a_module_that_is_not_registered() -> tuple[nn.Module, Any]:
    model, hidden = Custom(lambda m, x: m.held[0](torch.tanh(m.l(x))), l=lin(4, 4)), lin(4, 4)
    hidden.weight, hidden.bias = model.l.weight, model.l.bias
    model.held = [hidden]
    return model, cross_entropy


def in_the_loss() -> tuple[nn.Module, Any]:
    model = net(lin())
    held = list(model.parameters())
    return model, lambda out, y: cross_entropy(out, y) + 0.1 * sum(p.square().sum() for p in held)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("make", [in_a_list, in_a_module_that_is_not_registered, in_the_loss])
def test_parameters_held_by_reference(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, loss = make()
    exact_or_refused(Engine(model, loss), model, *batch(), loss)


def test_a_hook_on_a_parameter() -> None:
    model = net(lin())
    model[0].weight.register_hook(lambda gradient: gradient * torch.eye(3, 4, dtype=DOUBLE))
    exact_or_refused(Engine(model, cross_entropy), model, *batch())


@pytest.mark.parametrize("layer", [nn.Identity, nn.PReLU])
def test_an_input_edited_in_place(layer: type[nn.Module]) -> None:
    model = Custom(lambda m, x: m.p(m.l(x.mul_(0.5))), l=lin(), p=layer())
    exact_or_refused(Engine(model, cross_entropy), model, *batch())


def test_a_frozen_parameter_written_from_data() -> None:
    """As the codebook of a vector-quantised model."""

    def coded(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.code.mul_(0.9).add_(0.1 * x.mean(0))
        return m.l(x)

    model = Custom(coded, l=lin(), code=nn.Parameter(torch.zeros(4), requires_grad=False))
    with pytest.raises(UnsupportedModelError):
        probe(model, cross_entropy, *batch())
