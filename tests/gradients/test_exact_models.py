"""Models that an engine could get silently wrong: each is exact against plain autograd, record by record, or refused.

The oracle knows nothing of the engine: it calls the model itself on each record alone, with no functional call and no
swapped parameter, and asks plain autograd for the gradient. ``probe`` must let an exact model pass.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from exactness import DOUBLE, SIZE, Case, check, lin, net
from oracles import Custom
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint


class Matmul(torch.autograd.Function):
    """No vmap rule, so that only the loop can differentiate it per record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.gains = nn.ParameterList([torch.ones(4), torch.ones(1)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner.gains[0] + self.inner.gains[1]


def two_names(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x) + x @ m.again.t()))


def gated(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(m.l(x))
    return m.l(x) * gate


def sorted_rows(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.l(x[order])[order.argsort()]


def experts(m: Any, x: Tensor) -> Tensor:
    chosen = x[:, 0] > 0
    out = x.new_zeros(len(x), 3)
    return out.index_put((chosen,), m.a(x[chosen])).index_put((~chosen,), m.b(x[~chosen]))


def elsewhere(m: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return m.b(torch.tanh(pool.submit(m.a, x).result()))


def generated(m: Any, x: Tensor) -> Tensor:
    weight = m.maker(m.code).view(3, 4)
    return torch.func.functional_call(m.l, {"weight": weight}, (x,)) + m.l(x)


def penalised(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = m.b(torch.tanh(m.a(x)))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out * (1 + slope.square().sum(1, keepdim=True))


def reversed_gradient(m: Any, x: Tensor) -> Tensor:
    hidden = m.p(m.a(x))
    hidden.register_hook(lambda grad: -0.5 * grad)
    return m.b(hidden)


def packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.l(m.r(rows)[1][-1])


def tied() -> nn.Module:
    model = Custom(lambda m, x: m.d(torch.tanh(m.e(x).mean(1))), e=nn.Embedding(3, 5), d=lin(5, 3))
    model.d.weight = model.e.weight
    return model


def hooked(kind: str) -> nn.Module:
    model = net(lin(4, 4), nn.Tanh(), lin())
    if kind == "output":
        model[0].register_forward_hook(lambda module, args, out: out * 2 + module.weight.sum())
    elif kind == "input":
        model[0].register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
    else:
        model[1].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
    return model


def instance_forward() -> nn.Module:
    model = net(lin(4, 4), lin())
    model[0].forward = lambda x: functional.linear(x, model[0].weight ** 2)
    model[0].bias.requires_grad_(False)
    return model


def shared_name() -> nn.Module:
    model = Custom(two_names, a=lin(4, 4), b=lin())
    model.again = model.a.weight
    return model


def adapted() -> nn.Module:
    model = Custom(lambda m, x: m.base(x) + m.up(m.down(x)), base=lin(), down=lin(4, 2), up=lin(2, 3))
    model.base.requires_grad_(False)
    return model


def compiled_function() -> nn.Module:
    layer = lin(4, 4)
    inner = torch.compile(lambda x: torch.tanh(layer(x)), backend="eager")
    return Custom(lambda m, x: m.o(inner(x)), l=layer, o=lin())


def _tanh(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight.t())


def scripted_function() -> nn.Module:
    inner = torch.jit.script(_tanh)
    return Custom(lambda m, x: inner(x, m.l.weight) + m.l.bias, l=lin())


def by_name(m: Any, x: Tensor) -> Tensor:
    values = dict(m.named_parameters())
    return functional.linear(x, values["l.weight"], values["l.bias"])


EXACT: dict[str, Callable[[], Case]] = {
    "functional linear": lambda: Case(Custom(lambda m, x: functional.linear(x, m.l.weight, m.l.bias), l=lin())),
    "functional convolution": lambda: Case(
        Custom(lambda m, x: functional.conv2d(x, m.c.weight, m.c.bias).mean((2, 3)), c=nn.Conv2d(2, 3, 3)), (2, 5, 5)
    ),
    "einsum": lambda: Case(Custom(lambda m, x: torch.einsum("bi,oi->bo", x, m.l.weight) + m.l.bias, l=lin())),
    "weight in kwargs": lambda: Case(
        Custom(lambda m, x: functional.linear(input=x, weight=m.l.weight, bias=m.l.bias), l=lin())
    ),
    "weights in a list": lambda: Case(
        Custom(
            lambda m, x: x @ torch.cat([m.a.weight, m.b.weight]).t() + torch.cat([m.a.bias, m.b.bias]), a=lin(4, 1),
            b=lin(4, 2),
        )
    ),
    "parameters looked up by name": lambda: Case(Custom(by_name, l=lin())),
    "two names for one parameter": lambda: Case(shared_name()),
    "tied embedding and decoder": lambda: Case(tied(), torch.randint(3, (SIZE, 4))),
    "nested raw parameters": lambda: Case(net(lin(4, 4), Scale(), lin())),
    "called twice and used raw": lambda: Case(Custom(lambda m, x: m.a(torch.tanh(m.a(x))) @ m.a.weight, a=lin(4, 4))),
    "called under no_grad": lambda: Case(Custom(gated, l=lin())),
    "hook that changes an output": lambda: Case(hooked("output")),
    "hook that changes an input": lambda: Case(hooked("input")),
    "hook that changes a gradient": lambda: Case(hooked("gradient")),
    "gradient reversed by a tensor hook": lambda: Case(Custom(reversed_gradient, a=lin(4, 4), p=nn.PReLU(), b=lin())),
    "forward set on the instance": lambda: Case(instance_forward()),
    "weight norm": lambda: Case(net(parametrizations.weight_norm(lin(4, 4)), lin())),
    "orthogonal weights": lambda: Case(net(parametrizations.orthogonal(lin(4, 4)), lin())),
    "pruned weights": lambda: Case(net(prune.l1_unstructured(lin(4, 4), "weight", amount=0.5), lin())),
    "checkpointed": lambda: Case(
        Custom(lambda m, x: checkpoint(m.i, x, use_reentrant=False), i=net(lin(4, 4), nn.ReLU(), lin()))
    ),
    "batch in two halves": lambda: Case(Custom(lambda m, x: torch.cat([m.l(half) for half in x.chunk(2)]), l=lin())),
    "in-place relu": lambda: Case(net(lin(4, 4), nn.ReLU(inplace=True), lin(), nn.ReLU(inplace=True))),
    "records sorted": lambda: Case(Custom(sorted_rows, l=lin())),
    "records rolled": lambda: Case(Custom(lambda m, x: m.l(x.roll(1, 0)).roll(-1, 0), l=lin())),
    "time folded into the batch": lambda: Case(
        Custom(lambda m, x: m.l(x.flatten(0, 1)).unflatten(0, (len(x), -1)).mean(1), l=lin()), (5, 4)
    ),
    "time first, as many times as records": lambda: Case(
        Custom(lambda m, x: m.l(x.transpose(0, 1)).mean(0), l=lin()), (SIZE, 4)
    ),
    "a batch of one squeezed away": lambda: Case(
        Custom(lambda m, x: m.l(x).squeeze(), l=lin(4, 1)), loss=lambda out, y: (out - y).square()
    ),
    "vmap inside": lambda: Case(Custom(lambda m, x: torch.func.vmap(m.l)(x), l=lin())),
    "jvp inside": lambda: Case(Custom(lambda m, x: sum(torch.func.jvp(m.l, (x,), (torch.ones_like(x),))), l=lin())),
    "custom autograd function": lambda: Case(Custom(lambda m, x: Matmul.apply(x, m.l.weight) + m.l.bias, l=lin())),
    "scripted function": lambda: Case(scripted_function()),
    "compiled function": lambda: Case(compiled_function()),
    "graph module": lambda: Case(torch.fx.symbolic_trace(net(lin(4, 4), nn.Tanh(), lin()))),
    "layer in another thread": lambda: Case(Custom(elsewhere, a=lin(4, 4), b=lin())),
    "generated weights": lambda: Case(
        Custom(generated, l=lin(), maker=lin(2, 12), code=nn.Parameter(torch.ones(2)))
    ),
    "parameters of some records only": lambda: Case(Custom(experts, a=lin(), b=lin())),
    "gradient inside forward": lambda: Case(Custom(penalised, a=lin(4, 4), b=lin())),
    "embedding bag": lambda: Case(Custom(lambda m, x: m.l(m.e(x)), e=nn.EmbeddingBag(9, 4), l=lin()),
                                  torch.randint(9, (SIZE, 5))),
    "packed sequence": lambda: Case(
        Custom(packed, r=nn.GRU(4, 5, batch_first=True), l=lin(5, 3)),
        (torch.randn(SIZE, 7, 4, dtype=DOUBLE), torch.tensor([7, 2, 5, 3, 1, 4])),
    ),
    "adapter beside a frozen layer": lambda: Case(adapted()),
    "weights clamped by forward": lambda: Case(
        Custom(lambda m, x: (m.l.weight.data.clamp_(-0.1, 0.1), m.l(x))[1], l=lin())
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    check(EXACT[name]())


def test_there_are_enough_models() -> None:
    assert len(EXACT) >= 24
