"""Kernels for layers that resemble known ones: believed only as long as their outputs are the layer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import Case, batch, check, compare, oracle
from oracles import Custom, Oracle, cross_entropy, lin
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients import Engine
from evenhand.gradients.layers.resemblance import resembling
from evenhand.gradients.views import Viewed, mean_loss

DOUBLE = torch.float64


class Conv1D(nn.Module):
    """The layer of transformers' GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Inherited(nn.Linear):
    """Computes what its parent does."""


class Fast(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Renamed(nn.LayerNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return functional.layer_norm(hidden, self.normalized_shape, self.weight, self.bias, self.eps)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Channels(nn.LayerNorm):
    """Normalises another dimension, which its parent's kernel cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Product(nn.Module):
    """Has the parameters of a linear layer and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * self.bias


class Standardised(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / self.weight.std((1, 2), keepdim=True), self.bias)


ALIKE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Conv1D": (Conv1D(4, 4), (4,)),
    "Conv1D over time": (Conv1D(4, 4), (5, 4)),
    "Conv1D, long rows": (Conv1D(2, 40), (9, 40)),
    "inherited": (Inherited(4, 4), (5, 4)),
    "group norm": (Fast(2, 4), (4, 5)),
    "another name": (Renamed(4), (5, 4)),
}
UNLIKE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "doubled": (Doubled(4, 4), (4,)),
    "other dimension": (Channels(5), (5, 4)),
    "product": (Product(), (4,)),
    "standardised": (Standardised(4, 4, 3, padding=1), (4, 5)),
}


def model_of(layer: nn.Module) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.layer(x)
        return (
            m.o(torch.tanh(out).flatten(1)[:, :4] + out.flatten(1)[:, -4:]) if out.shape[-1] > 2 else m.p(out.mean(1))
        )

    return (
        Custom(forward, layer=layer, o=lin(), p=lin(2, 3))
        if isinstance(layer, Conv1D) and layer.nf == 2
        else Custom(forward, layer=layer, o=lin())
    )


@pytest.mark.parametrize("name", ALIKE)
def test_a_layer_like_a_known_one_gets_its_kernel(agrees: Oracle, name: str) -> None:
    layer, shape = ALIKE[name]
    model = model_of(layer)
    if name == "Conv1D, long rows":
        model = Custom(lambda m, x: m.p(torch.tanh(m.layer(x)).mean(1)), layer=layer, p=lin(2, 3))
    assert resembling(layer) is not None
    engine = Engine(model, cross_entropy)
    inputs, targets = batch(6, *shape)
    compare(engine.run(inputs, targets), oracle(model, cross_entropy, inputs, targets))
    assert (engine.way(), engine.unlike()) == ("kernels", ())
    agrees(model, inputs, targets, kernels=True)


@pytest.mark.parametrize("name", UNLIKE)
def test_a_layer_that_computes_something_else_does_not(name: str) -> None:
    layer, shape = UNLIKE[name]
    model = model_of(layer)
    assert resembling(layer) is not None
    engine = Engine(model, cross_entropy)
    inputs, targets = batch(6, *shape)
    compare(engine.run(inputs, targets), oracle(model, cross_entropy, inputs, targets))
    assert engine.unlike() == ("layer",)
    check(Case(model, shape))


def test_the_layer_of_transformers() -> None:
    layers = pytest.importorskip("transformers.pytorch_utils")
    model = model_of(layers.Conv1D(4, 4))
    engine = Engine(model, cross_entropy)
    inputs, targets = batch(6, 5, 4)
    compare(engine.run(inputs, targets), oracle(model, cross_entropy, inputs, targets))
    assert (engine.way(), engine.unlike()) == ("kernels", ())


def test_sums_lie_in_memory_as_their_parameters_do() -> None:
    """Noise for numbers in another order takes six times as long."""
    model = model_of(Conv1D(4, 4))
    inputs, targets = batch(6, 5, 4)
    for value in Engine(model, cross_entropy).run(inputs, targets).weighted_sum(torch.ones(6)).values():
        assert value.is_contiguous()


@pytest.mark.parametrize("kept", [1 << 28, 0])
def test_conv1d_in_float32(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Sums over time in their three forms, in float32, within the bar of the engine."""
    monkeypatch.setattr("evenhand.gradients.memory.KEPT_BYTES", kept)
    for shape in ((5, 4), (40, 4), (2, 40)):
        model = Custom(lambda m, x: m.o(m.layer(x).mean(1)), layer=Conv1D(6, shape[1]), o=lin(6, 3)).float()
        inputs, targets = torch.randn(7, *shape), torch.randint(3, (7,))
        engine = Engine(model, cross_entropy)
        compare(engine.run(inputs, targets), oracle(model, cross_entropy, inputs, targets), 1e-4)


def test_conv1d_sums_that_cancel() -> None:
    """Large terms over time that nearly cancel: rows in doubt are computed apart, with the weight turned."""
    model = Custom(lambda m, x: m.layer(x[:, :, :3]).mul(x[:, :, 3:]).sum((1, 2)), layer=Conv1D(2, 3)).float()
    x = torch.randn(4, 6, 5) * 1e3
    x[:, 3:, :3] = x[:, :3, :3]
    x[:, 3:, 3:] = -x[:, :3, 3:] + torch.rand(4, 3, 2)
    result = Engine(model, lambda out, y: out).run(x, torch.zeros(4))
    expected = oracle(model.double(), lambda out, y: out, x.double(), torch.zeros(4))
    wanted = torch.stack([rows.flatten(1).square().sum(1) for rows in expected.values()]).sum(0).sqrt()
    torch.testing.assert_close(result.norm, wanted, rtol=1e-5, atol=0)
    total = result.weighted_sum(torch.ones(4))
    for name, rows in expected.items():
        torch.testing.assert_close(total[name].double(), rows.sum(0), rtol=1e-4, atol=1e-2)


def test_tied_to_a_linear_layer_by_its_transposed_weight() -> None:
    model = Custom(lambda m, x: m.o(m.b(torch.tanh(m.a(x)))), a=Conv1D(4, 4), b=lin(4, 4), o=lin())
    model.b.weight = model.a.weight
    check(Case(model))


def test_views_are_further_places() -> None:
    inner = Custom(lambda m, x: m.o(m.a(x)), a=Conv1D(4, 4), o=lin())
    model, loss = Viewed(inner, 3), mean_loss(cross_entropy, 3)
    inputs, targets = torch.randn(6, 3, 4, dtype=DOUBLE), torch.arange(6) % 3
    compare(Engine(model, loss).run(inputs, targets), oracle(model, loss, inputs, targets))


def test_time_before_records_folded_together_is_found_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.o(m.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x))).mean(0))

    check(Case(Custom(forward, layer=lin(4, 4), o=lin()), (5, 4)))


def test_a_table_that_looks_like_folded_records() -> None:
    """Eight rows that all records share, through a layer: not two rows of each of four records."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.o(m.l(x) + m.norm(m.table.weight).mean(0))

    check(Case(Custom(forward, l=lin(4, 4), norm=nn.LayerNorm(4), table=nn.Embedding(12, 4), o=lin())))


def test_a_prompt_as_long_as_the_batch_that_is_compared() -> None:
    """Four tokens, as many as records are compared: another number of them tells one from the other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        prompt = m.prompt(torch.arange(4).unsqueeze(0)).repeat(len(x), 1, 1)
        return m.o(torch.tanh(m.l(torch.cat([prompt, x.unsqueeze(1)], 1))).mean(1))

    model = Custom(forward, l=lin(4, 4), prompt=nn.Embedding(4, 4), o=lin())
    engine = Engine(model, cross_entropy)
    inputs, targets = batch(8)
    compare(engine.run(inputs, targets), oracle(model, cross_entropy, inputs, targets))


def test_records_of_different_lengths_cut_out_by_a_mask_are_exact() -> None:
    """Rows that a mask leaves are nobody's by their number alone: 20 rows of four records are not five of each."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        full = torch.zeros_like(x)
        full[mask] = torch.sin(m.l(x[mask]))
        return m.o(full.sum(1))

    model = Custom(forward, l=lin(4, 4), o=lin())
    engine, targets = Engine(model, cross_entropy), torch.arange(4) % 3
    for lengths in ([8] * 4, [8] * 4, [8, 8, 2, 2], [7, 8, 8, 8], [8, 6, 4, 2]):
        x = torch.rand(4, 8, 4, dtype=DOUBLE) + 0.1
        for record, length in enumerate(lengths):
            x[record, length:] = -1.0
        compare(engine.run(x, targets), oracle(model, cross_entropy, x, targets))
