"""Whole models that an engine could get wrong: exact by kernels, or exact by the fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import Custom, Oracle, cross_entropy, lin
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from evenhand.gradients import per_sample

DOUBLE = torch.float64


def attention(m: Any, x: Tensor) -> Tensor:
    mixed = torch.softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x)
    x = m.n(x + mixed)
    return m.out((x + m.down(torch.relu(m.up(x)))).mean(1))


def mixture(m: Any, x: Tensor) -> Tensor:
    chosen = x[:, 0] > 0
    out = x.new_zeros(len(x), 3)
    out[chosen] = m.a(x[chosen])
    out[~chosen] = m.b(x[~chosen])
    return out


def sorted_rows(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.l(x[order])[order.argsort()]


def saliency(m: Any, x: Tensor) -> Tensor:
    probe = x.detach().requires_grad_()
    slope = torch.autograd.grad(m.a(probe).square().sum(), probe)[0]
    return m.a(x + 0.1 * slope)


SERVED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "logistic regression": (lin().double(), (6, 4)),
    "mlp": (nn.Sequential(lin(4, 8), nn.Tanh(), lin(8, 8), nn.ReLU(), lin(8, 3)).double(), (6, 4)),
    "cnn with in-place relu": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(2, 6),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            lin(24, 3),
        ).double(),
        (5, 2, 8, 8),
    ),
    "called twice": (Custom(lambda m, x: m.o(m.l(torch.tanh(m.l(x)))), l=lin(4, 4), o=lin()), (6, 4)),
    "called twice, other shapes": (
        Custom(lambda m, x: m.l(x[:, 0]) + m.l(x).mean(1), l=lin()),
        (6, 5, 4),
    ),
    "convolution called twice": (
        Custom(lambda m, x: m.c(torch.tanh(m.c(x))).mean((2, 3)), c=nn.Conv2d(3, 3, 3, padding=1)),
        (4, 3, 5, 5),
    ),
    "norm called twice": (Custom(lambda m, x: m.o(m.n(x) + m.n(x.square())), n=nn.LayerNorm(4), o=lin()), (6, 4)),
    "attention": (
        Custom(
            attention, q=lin(4, 4), k=lin(4, 4), v=lin(4, 4), n=nn.LayerNorm(4), up=lin(4, 9), down=lin(9, 4), out=lin()
        ),
        (5, 7, 4),
    ),
    "keyword call of a layer": (Custom(lambda m, x: m.l(input=x), l=lin()), (6, 4)),
    "residual": (Custom(lambda m, x: m.o(x + m.a(x) + m.b(x)), a=lin(4, 4), b=lin(4, 4), o=lin()), (6, 4)),
}

BYPASSED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "functional use": (Custom(lambda m, x: functional.linear(x, m.l.weight, m.l.bias), l=lin()), (6, 4)),
    "served and functional": (Custom(lambda m, x: m.l(x) + x @ m.l.weight.t() ** 2, l=lin()), (6, 4)),
    "raw parameter": (Custom(lambda m, x: m.l(x * m.p), l=lin(), p=nn.Parameter(torch.ones(4))), (6, 4)),
    "tied to a raw use": (Custom(lambda m, x: m.a(x) @ m.a.weight, a=lin(4, 4)), (6, 4)),
    "time first": (Custom(lambda m, x: m.l(x.transpose(0, 1)).mean(0), l=lin()), (6, 6, 4)),
    "time first, called once more": (
        Custom(lambda m, x: m.o(m.l(x.transpose(0, 1)).tanh().mean(0)), l=lin(4, 4), o=lin()), (5, 5, 4),
    ),
    "records flipped": (Custom(lambda m, x: m.l(x.flip(0)).flip(0), l=lin()), (6, 4)),
    "time folded into the batch": (
        Custom(lambda m, x: m.l(x.flatten(0, 1)).unflatten(0, (len(x), -1)).mean(1), l=lin()), (6, 5, 4),
    ),
    "weight norm": (nn.Sequential(parametrizations.weight_norm(lin()), nn.Tanh()).double(), (6, 4)),
    "prelu": (nn.Sequential(lin(4, 4), nn.PReLU(4), lin()).double(), (6, 4)),
    "shared positions": (
        Custom(lambda m, x: m.l(x + m.e(torch.arange(6))).mean(1), l=lin(), e=nn.Embedding(6, 4)), (6, 6, 4),
    ),
    "vmap inside": (Custom(lambda m, x: torch.func.vmap(m.l)(x), l=lin()), (6, 4)),
}  # fmt: skip

LOOPED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mixture of experts": (Custom(mixture, a=lin(), b=lin()), (8, 4)),
    "records sorted": (Custom(sorted_rows, l=lin()), (6, 4)),
    "gradient inside forward": (Custom(saliency, a=lin()), (6, 4)),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(agrees: Oracle, name: str) -> None:
    model, shape = SERVED[name]
    agrees(model, torch.randn(shape, dtype=DOUBLE), torch.randint(3, shape[:1]), kernels=True)


@pytest.mark.parametrize("name", BYPASSED)
def test_bypassed(agrees: Oracle, name: str) -> None:
    """Some ways past a layer are served too, others take the fallback; either way the gradients are right."""
    model, shape = BYPASSED[name]
    agrees(
        model, torch.randn(shape, dtype=DOUBLE), torch.randint(3, shape[:1]), lambda o, y: cross_entropy(o[:, :3], y)
    )


@pytest.mark.parametrize("name", LOOPED)
def test_models_that_only_a_loop_can_run(agrees: Oracle, name: str) -> None:
    model, shape = LOOPED[name]
    agrees(model, torch.randn(shape, dtype=DOUBLE), torch.randint(3, shape[:1]), kernels=False, vectorise=False)


def test_a_subclass_with_its_own_forward_is_not_served_by_its_parent(agrees: Oracle) -> None:
    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight**2, self.bias)

    agrees(Squared(4, 3).double(), torch.randn(6, 4, dtype=DOUBLE), torch.randint(3, (6,)), kernels=False)


def test_a_forward_set_on_the_instance_is_not_served(agrees: Oracle) -> None:
    model = lin().double()
    model.forward = lambda x: functional.linear(x, model.weight**2, model.bias)  # type: ignore[method-assign]
    agrees(model, torch.randn(6, 4, dtype=DOUBLE), torch.randint(3, (6,)), kernels=False)
    assert "forward" in model.__dict__


def test_hooks_take_the_fallback(agrees: Oracle) -> None:
    model = nn.Sequential(lin(4, 4), lin()).double()
    model[0].register_forward_hook(lambda module, args, out: out * 2 + module.weight.sum())
    agrees(model, torch.randn(6, 4, dtype=DOUBLE), torch.randint(3, (6,)), kernels=False)


@pytest.mark.parametrize("kind", ["embedding and decoder", "two layers", "two names"])
def test_tied_weights(agrees: Oracle, kind: str) -> None:
    if kind == "embedding and decoder":
        model: nn.Module = Custom(
            lambda m, x: m.d(torch.tanh(m.h(m.e(x)).mean(1))), e=nn.Embedding(3, 5), h=lin(5, 5), d=lin(5, 3)
        )
        model.d.weight = model.e.weight
        x = torch.randint(3, (6, 4))
    else:
        model = Custom(lambda m, x: m.o(m.b(torch.tanh(m.a(x)))), a=lin(4, 4), b=lin(4, 4), o=lin())
        if kind == "two layers":
            model.b.weight = model.a.weight
        else:
            model.b = model.a
        x = torch.randn(6, 4, dtype=DOUBLE)
    agrees(model, x, torch.randint(3, (6,)), kernels=True)


def test_tuple_and_dict_inputs(agrees: Oracle) -> None:
    model = Custom(lambda m, a, b: m.l(a) * m.k(b), l=lin(), k=lin(2, 3))
    a, b, y = torch.randn(6, 4, dtype=DOUBLE), torch.randn(6, 2, dtype=DOUBLE), torch.randint(3, (6,))
    agrees(model, (a, b), y, kernels=True)
    agrees(model, {"b": b, "a": a}, y, kernels=True)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(agrees: Oracle, kind: type[nn.RNNBase]) -> None:
    model = Custom(lambda m, x: m.o(m.r(x)[0][:, -1]), r=kind(4, 5, num_layers=2, batch_first=True), o=lin(5, 3))
    agrees(model, torch.randn(4, 6, 4, dtype=DOUBLE), torch.randint(3, (4,)), kernels=True, vectorise=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layer(agrees: Oracle, batch_first: bool, training: bool) -> None:
    """In eval mode nn's fused path would bypass the layers; time equals batch on purpose."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
    model = Custom(
        lambda m, x: m.o(m.t(x if batch_first else x.transpose(0, 1)).mean(1 if batch_first else 0)), t=layer, o=lin()
    )
    model.train(training)
    agrees(model, torch.randn(5, 5, 4, dtype=DOUBLE), torch.randint(3, (5,)), kernels=True, vectorise=False)


def test_multihead_attention(agrees: Oracle) -> None:
    model = Custom(lambda m, x: m.o(m.a(x, x, x)[0].mean(1)), a=nn.MultiheadAttention(4, 2, batch_first=True), o=lin())
    agrees(model, torch.randn(5, 6, 4, dtype=DOUBLE), torch.randint(3, (5,)), kernels=True)


def test_a_loss_that_reads_parameters() -> None:
    model = lin().double()
    x, y = torch.randn(5, 4, dtype=DOUBLE), torch.randint(3, (5,))

    def ridge(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + model.weight.square().sum()

    plain, ridged = per_sample(model, cross_entropy, x, y), per_sample(model, ridge, x, y)
    ones = torch.ones(5)
    expected = plain.weighted_sum(ones)["weight"] + 5 * 2 * model.weight.detach()
    torch.testing.assert_close(ridged.weighted_sum(ones)["weight"], expected)
