"""Attention served by kernels: every option against vmap(grad) or a loop, and the layers of nn.Transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import Custom, Oracle, lin
from torch import Tensor, nn

from evenhand.gradients import Engine

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
DOUBLE = torch.float64
SIZE, TARGETS, SOURCES, WIDTH, HEADS = 4, 5, 6, 8, 2


def attention(**options: Any) -> nn.MultiheadAttention:
    """With biases that are not zero."""
    made = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True} | options)
    for name, parameter in made.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return made


def masks() -> dict[str, Tensor]:
    torch.manual_seed(1)
    causal = torch.ones(TARGETS, TARGETS, dtype=torch.bool).triu(1)
    padding = torch.zeros(SIZE, TARGETS, dtype=torch.bool)
    padding[1, 3:] = padding[2, 4:] = True
    per_head = torch.rand(SIZE * HEADS, TARGETS, TARGETS) < 0.3
    per_head[:, :, 0] = False
    return {"causal": causal, "padding": padding, "per head": per_head}


def own(**call: Any) -> Any:
    """Self-attention on an input whose masks may be cut to the records that are there."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out, weights = m.a(x, x, x, **call)
        return m.o(out.mean(1)) if weights is None else m.o(out.mean(1)) + weights.flatten(1).sum(1, keepdim=True)

    return forward


def crossed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.o(m.a(x, y, y, need_weights=False)[0].mean(1))


def apart(m: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return m.o(m.a(x, y, z)[0].mean(1))


def doubles(*shapes: tuple[int, ...]) -> Any:
    made = tuple(torch.randn(SIZE, *shape, dtype=DOUBLE) for shape in shapes)
    return made if len(made) > 1 else made[0]


SELF = [{}, {"bias": False}, {"add_zero_attn": True}]
CALLS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"average_attn_weights": False},
    {"attn_mask": masks()["causal"], "need_weights": False},
    {"attn_mask": masks()["causal"].double() * -3.0},
    {"attn_mask": masks()["causal"], "is_causal": True},
    {"attn_mask": masks()["causal"], "is_causal": True, "need_weights": False},
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", SELF)
def test_self_attention(agrees: Oracle, options: dict[str, Any], call: dict[str, Any]) -> None:
    model = Custom(own(**call), a=attention(**options), o=lin(WIDTH, 3))
    agrees(model, doubles((TARGETS, WIDTH)), torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_padding(agrees: Oracle, mask: str | None, need_weights: bool) -> None:
    shared = None if mask is None else masks()[mask]

    def forward(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        out = m.a(x, x, x, key_padding_mask=padding, attn_mask=shared, need_weights=need_weights)[0]
        return m.o(out.mean(1))

    model = Custom(forward, a=attention(), o=lin(WIDTH, 3))
    inputs = (doubles((TARGETS, WIDTH)), masks()["padding"])
    agrees(model, inputs, torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mask_per_head(agrees: Oracle, need_weights: bool, batch_first: bool) -> None:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out = m.a(x, x, x, attn_mask=mask.flatten(0, 1), need_weights=need_weights)[0]
        return m.o(out.mean(1 if batch_first else 0))

    model = Custom(forward, a=attention(batch_first=batch_first), o=lin(WIDTH, 3))
    inputs = (doubles((TARGETS, WIDTH)), masks()["per head"].unflatten(0, (SIZE, HEADS)))
    agrees(model, inputs, torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention(agrees: Oracle, bias: bool) -> None:
    y = torch.randint(3, (SIZE,))
    packed = Custom(crossed, a=attention(bias=bias), o=lin(WIDTH, 3))
    agrees(packed, doubles((TARGETS, WIDTH), (SOURCES, WIDTH)), y, kernels=True)
    three = Custom(apart, a=attention(bias=bias), o=lin(WIDTH, 3))
    agrees(three, doubles((TARGETS, WIDTH), (SOURCES, WIDTH), (SOURCES, WIDTH)), y, kernels=True)
    widths = Custom(apart, a=attention(bias=bias, kdim=3, vdim=5), o=lin(WIDTH, 3))
    agrees(widths, doubles((TARGETS, WIDTH), (SOURCES, 3), (SOURCES, 5)), y, kernels=True)
    shared = Custom(crossed, a=attention(bias=bias, kdim=3, vdim=3), o=lin(WIDTH, 3))
    agrees(shared, doubles((TARGETS, WIDTH), (SOURCES, 3)), y, kernels=True)


@pytest.mark.parametrize("frozen", [["in_proj_weight"], ["in_proj_bias"], ["out_proj.weight", "out_proj.bias"]])
def test_frozen_parts(agrees: Oracle, frozen: list[str]) -> None:
    model = Custom(own(), a=attention(), o=lin(WIDTH, 3))
    for name in frozen:
        model.a.get_parameter(name).requires_grad_(False)
    agrees(model, doubles((TARGETS, WIDTH)), torch.randint(3, (SIZE,)), kernels=True)


def test_a_frozen_projection_among_separate_ones(agrees: Oracle) -> None:
    model = Custom(apart, a=attention(kdim=3, vdim=5), o=lin(WIDTH, 3))
    model.a.k_proj_weight.requires_grad_(False)
    model.a.in_proj_bias.requires_grad_(False)
    inputs = doubles((TARGETS, WIDTH), (SOURCES, 3), (SOURCES, 5))
    agrees(model, inputs, torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {}])
def test_what_the_attention_kernel_does_not_serve_is_exact(agrees: Oracle, options: dict[str, Any]) -> None:
    """Extra keys that are parameters, and an output layer that somebody watches: a fallback serves them."""
    model = Custom(own(), a=attention(**options), o=lin(WIDTH, 3))
    if not options:
        model.a.out_proj.register_forward_hook(lambda module, args, out: None)
    agrees(model, doubles((TARGETS, WIDTH)), torch.randint(3, (SIZE,)), kernels=None)


def test_float32_is_close(agrees: Oracle) -> None:
    model = Custom(own(need_weights=False), a=attention(), o=lin(WIDTH, 3)).float()
    agrees(model, torch.randn(SIZE, 40, WIDTH), torch.randint(3, (SIZE,)), kernels=True, tolerance=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_draws_as_in_a_plain_forward(batch_first: bool, need_weights: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        return m.o(m.a(x, x, x, need_weights=need_weights)[0].mean(1 if batch_first else 0))

    model = Custom(forward, a=attention(dropout=0.5, batch_first=batch_first), o=lin(WIDTH, 3))
    loss, x, y = nn.CrossEntropyLoss(reduction="none"), doubles((TARGETS, WIDTH)), torch.randint(3, (SIZE,))
    engine = Engine(model, loss)
    torch.manual_seed(3)
    expected = loss(model(x), y)
    for _ in range(2):
        torch.manual_seed(3)
        result = engine.run(x, y)
        torch.testing.assert_close(result.loss, expected)
    total = torch.autograd.grad(expected.sum(), list(model.parameters()))
    for own_sum, whole in zip(result.weighted_sum(torch.ones(SIZE)).values(), total, strict=True):
        torch.testing.assert_close(own_sum, whole)


def test_torch_refuses_what_it_always_refuses() -> None:
    for call in ({"is_causal": True}, {"attn_mask": torch.zeros(1, TARGETS)}, {"attn_mask": torch.zeros(2, 2).long()}):
        model = Custom(own(**call), a=attention(), o=lin(WIDTH, 3))
        with pytest.raises((RuntimeError, AssertionError)):
            Engine(model, nn.CrossEntropyLoss(reduction="none")).run(doubles((TARGETS, WIDTH)), torch.arange(SIZE) % 3)
