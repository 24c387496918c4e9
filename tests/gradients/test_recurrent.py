"""Recurrent layers by kernels: every option against each record alone through plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import by_kernels, cross_entropy
from evenhand.errors import UsageError
from evenhand.gradients import Engine, per_sample, probe
from evenhand.gradients.record_by_record import reference, row_norms
from evenhand.types import Pass

DOUBLE = torch.float64
Oracle = Callable[..., Pass]
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"bidirectional": True},
    {"num_layers": 3, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
]


def finals(result: Any) -> list[Tensor]:
    """Final states with the batch first, one tensor for LSTM's two each."""
    states = result[1] if isinstance(result[1], tuple) else (result[1],)
    return [state.transpose(0, 1).flatten(1) for state in states]


class Model(nn.Module):
    """A recurrent layer, and a linear one on whatever of its results is used."""

    def __init__(self, layer: nn.RNNBase, use: str = "all", states: str = "none"):
        super().__init__()
        self.layer, self.use, self.states = layer, use, states
        self.start = nn.Linear(layer.input_size, layer.hidden_size)
        self.out = nn.LazyLinear(3)
        self.double()
        if states != "learnt":
            self.start.requires_grad_(False)
        self(torch.zeros(1, 2, layer.input_size, dtype=DOUBLE))

    def given(self, x: Tensor) -> tuple[Any, ...]:
        if self.states == "none":
            return ()
        layer = self.layer
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        state = torch.stack([torch.tanh(self.start(x[:, 0])) * (i + 1) for i in range(count)])
        return ((state, state * 0.5),) if layer.mode == "LSTM" else (state,)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x if self.layer.batch_first else x.transpose(0, 1), *self.given(x))
        out = result[0] if self.layer.batch_first else result[0].transpose(0, 1)
        parts = {"last": [out[:, -1]], "h": finals(result)[:1], "c": finals(result)[-1:], "mean": [out.mean(1)]}
        parts["all"] = [out.square().sum(1), *finals(result)]
        return self.out(torch.cat(parts[self.use], dim=1))


def check(agrees: Oracle, model: nn.Module, *shape: int, kernels: bool = True) -> Pass:
    x = torch.randn(shape, dtype=DOUBLE)
    return agrees(model, x, torch.randint(3, shape[:1]), kernels=kernels, vectorise=False)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_options(agrees: Oracle, kind: str, options: dict[str, Any]) -> None:
    check(agrees, Model(KINDS[kind](4, 5, **options)), 4, 6, 4)


@pytest.mark.parametrize("use", ["last", "h", "c", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_some_results_are_used(agrees: Oracle, kind: str, use: str) -> None:
    check(agrees, Model(KINDS[kind](3, 4, batch_first=True), use), 4, 5, 3)


@pytest.mark.parametrize("states", ["fixed", "learnt"])
@pytest.mark.parametrize("kind", KINDS)
def test_initial_states(agrees: Oracle, kind: str, states: str) -> None:
    check(agrees, Model(KINDS[kind](3, 4, num_layers=2, bidirectional=True), states=states), 4, 5, 3)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_ih_l1"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_frozen_parameters(agrees: Oracle, kind: str, name: str, alone: bool) -> None:
    layer = KINDS[kind](3, 4, num_layers=2)
    for own, parameter in layer.named_parameters():
        parameter.requires_grad_((own == name) == alone)
    check(agrees, Model(layer), 4, 5, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_keep_or_recompute_products(kind: str) -> None:
    model = Model(KINDS[kind](2, 3), "mean")
    x, y = torch.randn(4, 80, 2, dtype=DOUBLE), torch.randint(3, (4,))
    _, rows = reference(model, cross_entropy, x, y)
    for lean in (True, False):
        result = Engine(model, cross_entropy, lean=lean).run(x, y)
        assert by_kernels(result)
        torch.testing.assert_close(result.norm, row_norms(rows), rtol=1e-9, atol=1e-12)
        weights = torch.randn(4, dtype=DOUBLE)
        for name, total in result.weighted_sum(weights).items():
            torch.testing.assert_close(total, torch.tensordot(weights, rows[name], 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_short_sequences_of_wide_layers_use_gram_matrices(agrees: Oracle, kind: str) -> None:
    layer = KINDS[kind](20, 24, num_layers=2, batch_first=True)
    layer.bias_hh_l0.requires_grad_(False)
    check(agrees, Model(layer), 4, 3, 20)


class Custom(nn.Module):
    def __init__(self, forward: Any, **layers: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def stepwise(m: Any, x: Tensor) -> Tensor:
    state = None
    for t in range(x.shape[1]):
        state = m.r(x[:, t], state)
    return m.o(torch.cat(state, 1) if isinstance(state, tuple) else state)


def decode(m: Any, x: Tensor) -> Tensor:
    _, state = m.a(x)
    return m.o(m.b(x.flip(1), state)[0][:, -1])


def saliency(m: Any, x: Tensor) -> Tensor:
    probe = x.detach().requires_grad_()
    slope = torch.autograd.grad(m.r(probe)[0].square().sum(), probe, retain_graph=True)[0]
    return m.o(m.r(x + 0.1 * slope)[0][:, -1])


def flat(kind: Any, **options: Any) -> nn.RNNBase:
    layer: nn.RNNBase = kind(4, 4, batch_first=True, **options)
    return layer


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_within_models(agrees: Oracle, kind: Any) -> None:
    o = nn.Linear(4, 3)
    twice = Custom(lambda m, x: m.o(m.r(torch.tanh(m.r(x)[0]))[0][:, -1]), r=flat(kind), o=o)
    check(agrees, twice, 4, 5, 4)
    lengths = Custom(lambda m, x: m.o(m.r(x)[0][:, -1] - m.r(x[:, :2])[0].mean(1)), r=flat(kind), o=o)
    check(agrees, lengths, 4, 5, 4)
    check(agrees, Custom(decode, a=flat(kind), b=flat(kind, bias=False), o=o), 4, 5, 4)
    deep = Custom(
        lambda m, x: m.o(m.n(m.r(m.l(x))[0]).mean(1)), l=nn.Linear(4, 4), r=flat(kind), n=nn.LayerNorm(4), o=o
    )
    check(agrees, deep, 4, 5, 4)
    in_place = Custom(lambda m, x: m.o(m.r(x)[0].mul_(2.0).relu_().sum(1)), r=flat(kind), o=o)
    check(agrees, in_place, 4, 5, 4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(agrees: Oracle, kind: Any, bias: bool) -> None:
    wide = 10 if kind is nn.LSTMCell else 5
    check(agrees, Custom(stepwise, r=kind(4, 5, bias=bias), o=nn.Linear(wide, 3)), 4, 6, 4)
    if kind is nn.RNNCell:
        check(agrees, Custom(stepwise, r=kind(4, 5, nonlinearity="relu"), o=nn.Linear(5, 3)), 4, 6, 4)


def test_tokens(agrees: Oracle) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True)).double()
    whole = Custom(lambda m, x: m.o(m.body(x)[0][:, -1]), body=model, o=nn.Linear(5, 3))
    agrees(whole, torch.randint(7, (5, 6)), torch.randint(3, (5,)), kernels=True, vectorise=False)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.integers(2, 5), st.integers(1, 9), st.integers(1, 6), st.integers(1, 7),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_shapes(kind: str, size: int, time: int, inputs: int, width: int, bias: bool, first: bool) -> None:
    torch.manual_seed(size + 10 * time)
    model = Model(KINDS[kind](inputs, width, bias=bias, batch_first=first, bidirectional=inputs > 3))
    x, y = torch.randn(size, time, inputs, dtype=DOUBLE), torch.randint(3, (size,))
    _, rows = reference(model, cross_entropy, x, y)
    result = per_sample(model, cross_entropy, x, y)
    assert by_kernels(result)
    torch.testing.assert_close(result.norm, row_norms(rows), rtol=1e-9, atol=1e-12)
    sums = result.weighted_sum(torch.ones(size))
    for name, total in sums.items():
        torch.testing.assert_close(total, rows[name].sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_dropout_between_layers(agrees: Oracle, kind: str) -> None:
    model = Model(KINDS[kind](4, 5, num_layers=2, dropout=0.5, batch_first=True))
    check(agrees, model.eval(), 4, 6, 4)
    model.train()
    x, y = torch.randn(4, 6, 4, dtype=DOUBLE), torch.randint(3, (4,))
    probe(model, cross_entropy, x, y)
    engine = Engine(model, cross_entropy)
    first, second = engine.run(x, y), engine.run(x, y)
    assert by_kernels(second)
    assert not torch.equal(first.norm, second.norm)
    alone = [second.weighted_sum(row) for row in torch.eye(4, dtype=DOUBLE)]
    norms = [torch.cat([g.flatten() for g in sums.values()]).norm() for sums in alone]
    torch.testing.assert_close(torch.stack(norms), second.norm)


def test_passes_of_different_engines_and_sizes_do_not_share_memory() -> None:
    model = Model(nn.LSTM(4, 5, batch_first=True))
    x, y = torch.randn(6, 7, 4, dtype=DOUBLE), torch.randint(3, (6,))
    one, other = Engine(model, cross_entropy), Engine(model, cross_entropy)
    other.run(x, y)
    for size in (6, 3, 5):
        _, rows = reference(model, cross_entropy, x[:size], y[:size])
        result = one.run(x[:size], y[:size])
        other.run(-x, y)
        assert by_kernels(result)
        for name, total in result.weighted_sum(torch.ones(size)).items():
            torch.testing.assert_close(total, rows[name].sum(0), rtol=1e-9, atol=1e-12)


def test_a_batch_that_fails_does_not_spoil_the_pass_before_silently() -> None:
    """Its forward has overwritten what the pass before would sum: right or refused, never wrong."""
    model, fails = Model(nn.LSTM(4, 5, batch_first=True)), [False]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("no loss today")
        return cross_entropy(outputs, targets)

    x, y = torch.randn(6, 7, 4, dtype=DOUBLE), torch.randint(3, (6,))
    engine = Engine(model, loss)
    engine.run(x, y)
    result, fails[0] = engine.run(x, y), True
    assert by_kernels(result)
    with pytest.raises(ValueError, match="no loss today"):
        engine.run(-x, y)
    with pytest.raises(UsageError, match="before the next run"):
        result.weighted_sum(torch.ones(6))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_gradient_inside_forward_takes_the_fallback(agrees: Oracle, kind: Any) -> None:
    check(agrees, Custom(saliency, r=flat(kind), o=nn.Linear(4, 3)), 4, 5, 4, kernels=False)
