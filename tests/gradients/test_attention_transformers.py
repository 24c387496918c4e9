"""nn.Transformer and its parts, with the batch first or second, served through their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import Custom, Oracle, cross_entropy, lin
from torch import Tensor, nn

from evenhand.gradients import Engine
from evenhand.gradients.norms_and_sums import RecordedGradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested"
)
DOUBLE = torch.float64
SIZE, TIMES, WIDTH = 4, 5, 8


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, **{"dropout": 0.0, "batch_first": True} | options)


def decoder(**options: Any) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(WIDTH, 2, 12, **{"dropout": 0.0, "batch_first": True} | options)


def turned(x: Tensor, batch_first: bool) -> Tensor:
    return x if batch_first else x.transpose(0, 1)


def padded(m: Any, x: Tensor) -> Tensor:
    """Records of different lengths, as their first element says."""
    length = 2 + (x[:, 0, :1] > 0) + 2 * (x[:, 0, 1:2] > 0)
    return m.o(m.t(x, src_key_padding_mask=torch.arange(TIMES) >= length)[:, 0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer(agrees: Oracle, batch_first: bool, norm_first: bool, training: bool) -> None:
    layer = encoder(batch_first=batch_first, norm_first=norm_first, bias=norm_first)
    model = Custom(
        lambda m, x: m.o(m.t(turned(x, batch_first)).mean(1 if batch_first else 0)), t=layer, o=lin(WIDTH, 3)
    ).train(training)
    agrees(model, torch.randn(SIZE, TIMES, WIDTH, dtype=DOUBLE), torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("training", [True, False])
def test_stack_with_padding(agrees: Oracle, training: bool) -> None:
    """In eval mode torch may turn to nested tensors; not while gradients are asked for."""
    model = Custom(padded, t=nn.TransformerEncoder(encoder(), 2), o=lin(WIDTH, 3)).train(training)
    x, y = torch.randn(SIZE, TIMES, WIDTH, dtype=DOUBLE), torch.randint(3, (SIZE,))
    agrees(model, x, y, kernels=True, vectorise=False)


def test_frozen_stack_that_turns_to_nested_tensors(agrees: Oracle) -> None:
    model = Custom(padded, t=nn.TransformerEncoder(encoder(), 2).requires_grad_(False), o=lin(WIDTH, 3)).eval()
    x, y = torch.randn(SIZE, TIMES, WIDTH, dtype=DOUBLE), torch.randint(3, (SIZE,))
    x[:, 0, :2] = 1.0
    agrees(model, x, y, kernels=True, vectorise=False)


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_layer(agrees: Oracle, batch_first: bool) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(TIMES, dtype=DOUBLE)

    def forward(m: Any, x: Tensor, memory: Tensor) -> Tensor:
        out = m.t(turned(x, batch_first), turned(memory, batch_first), tgt_mask=mask, tgt_is_causal=True)
        return m.o(turned(out, batch_first).mean(1))

    model = Custom(forward, t=decoder(batch_first=batch_first), o=lin(WIDTH, 3))
    inputs = torch.randn(SIZE, TIMES, WIDTH, dtype=DOUBLE), torch.randn(SIZE, TIMES + 1, WIDTH, dtype=DOUBLE)
    agrees(model, inputs, torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_whole_transformer(agrees: Oracle, batch_first: bool) -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x, y = m.e(turned(x, batch_first)), m.e(turned(y, batch_first))
        return m.o(turned(m.t(x, y), batch_first).mean(1))

    made = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0, batch_first=batch_first)
    model = Custom(forward, t=made, e=nn.Embedding(9, WIDTH), o=lin(WIDTH, 3))
    inputs = torch.randint(9, (SIZE, TIMES)), torch.randint(9, (SIZE, TIMES + 1))
    agrees(model, inputs, torch.randint(3, (SIZE,)), kernels=True)


def alone(make: Callable[[], Engine], x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([make().run(x[i : i + 1], y[i : i + 1]).norm for i in range(len(x))])


def test_as_many_records_as_times_with_the_batch_second() -> None:
    model = Custom(lambda m, x: m.o(m.t(m.e(x.t())).mean(0)), t=encoder(batch_first=False), e=nn.Embedding(9, WIDTH),
                   o=lin(WIDTH, 3))  # fmt: skip
    engine = Engine(model, cross_entropy)
    for size in (4, TIMES, 3, 2, WIDTH, 1):
        x, y = torch.randint(9, (size, TIMES)), torch.randint(3, (size,))
        result = engine.run(x, y)
        torch.testing.assert_close(result.norm, alone(lambda: Engine(model, cross_entropy), x, y), rtol=1e-9, atol=1e-9)
        assert isinstance(result.weighted_sum.__self__._raw, RecordedGradients)  # type: ignore[attr-defined]
