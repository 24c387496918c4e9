"""Models whose records are coupled, or whose layers hide: refused by the engine or by the probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import DOUBLE, SIZE, Case, lin, net
from oracles import Custom, cross_entropy
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from evenhand.errors import UnsupportedModelError
from evenhand.gradients import Engine, probe


class Standardised(nn.Module):
    """Batch statistics by hand: no BatchNorm to recognise."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


class Running(nn.Module):
    """Keeps a mean of the data: in a buffer, or in an attribute that no state dict shows."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("mean", torch.zeros(4, dtype=DOUBLE))
        else:
            self.mean = torch.zeros(4, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return centred


class Reordered(nn.Module):
    """Returns the losses themselves, in the order of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.l = lin().double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        order = y.argsort(stable=True)
        return cross_entropy(self.l(x[order]), y[order])


def mixed_up(m: Any, x: Tensor) -> Tensor:
    return m.l(0.7 * x + 0.3 * x[torch.randperm(len(x))])


def inner_step(m: Any, x: Tensor) -> Tensor:
    weight = m.l.weight
    (slope,) = torch.autograd.grad(functional.linear(x, weight).square().sum(), weight, create_graph=True)
    return functional.linear(x, weight - 0.1 * slope, m.l.bias)


def branching(m: Any, x: Tensor) -> Tensor:
    return m.a(x) if x[:, 0].sum() > 0 else m.a(x) + m.b(x)


def decaying(m: Any, x: Tensor) -> Tensor:
    m.l.weight.data.mul_(0.9)
    return m.l(x)


def halving(m: Any, x: Tensor) -> Tensor:
    return m.l(x.mul_(0.5))


def attending(m: Any, x: Tensor) -> Tensor:
    return m.l(m.a(x, x, x, need_weights=False)[0].mean(1))


def over_records(m: Any, x: Tensor) -> Tensor:
    return m.l(m.r(x)[0][:, -1])


def per_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """Weighted by how often the class occurs in the batch."""
    return cross_entropy(outputs, targets) / torch.bincount(targets, minlength=3)[targets]


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return -torch.log_softmax(outputs @ outputs.t(), 1).diagonal()


HIDDEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: torch.jit.script(net(lin())), "ScriptModule"),
    "traced": (lambda: torch.jit.trace(net(lin()), torch.zeros(2, 4, dtype=DOUBLE)), "ScriptModule"),
    "traced inside": (lambda: net(lin(4, 4), torch.jit.trace(lin().double(), torch.zeros(2, 4).double())), "'1'"),
    "compiled": (lambda: torch.compile(net(lin()), backend="eager"), "compiled"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), lin()), "not initialised"),
    "complex": (lambda: nn.Sequential(nn.Linear(4, 4, dtype=torch.complex128), lin()), "complex"),
    "sparse embedding": (lambda: net(nn.Embedding(9, 4, sparse=True), lin()), "sparse=False"),
    "sparse bag": (lambda: net(nn.EmbeddingBag(9, 4, sparse=True), lin()), "sparse=False"),
    "renormalised embedding": (lambda: net(nn.Embedding(9, 4, max_norm=1.0), lin()), "drop max_norm"),
    "batch norm": (lambda: net(lin(4, 4), nn.BatchNorm1d(4), lin()), r"'1' \(BatchNorm1d\)"),
    "batch norm that never learns its statistics": (
        lambda: net(nn.BatchNorm1d(4, track_running_stats=False), lin()).eval(),
        r"'0' \(BatchNorm1d\)",
    ),
    "reentrant checkpoint": (
        lambda: Custom(lambda m, x: torch.utils.checkpoint.checkpoint(m.i, x, use_reentrant=True), i=net(lin())),
        "does not depend",
    ),
    "an unused layer": (lambda: Custom(lambda m, x: m.a(x), a=lin(), b=lin()), r"'b\.(weight|bias)'"),
    "a detached layer": (lambda: Custom(lambda m, x: m.b(m.a(x).detach()), a=lin(4, 4), b=lin()), r"'a\."),
}

COUPLED: dict[str, Callable[[], Case]] = {
    "batch statistics by hand": lambda: Case(net(lin(4, 4), Standardised(), lin())),
    "coupled loss": lambda: Case(net(lin()), loss=per_class),
    "contrastive loss": lambda: Case(net(lin()), loss=contrastive),
    "divided by the batch size": lambda: Case(Custom(lambda m, x: m.l(x) / len(x), l=lin())),
    "place in the batch": lambda: Case(Custom(lambda m, x: m.l(x + torch.arange(len(x))[:, None]), l=lin())),
    "mixup": lambda: Case(Custom(mixed_up, l=lin())),
    "inner step on the batch": lambda: Case(Custom(inner_step, l=lin())),
    "a branch for the whole batch": lambda: Case(Custom(branching, a=lin(), b=lin())),
    "attention over records": lambda: Case(Custom(attending, a=nn.MultiheadAttention(4, 2), l=lin()), (SIZE, 4)),
    "recurrence over records": lambda: Case(Custom(over_records, r=nn.LSTM(4, 4), l=lin()), (5, 4)),
    "rows mixed by a wrong reshape": lambda: Case(
        Custom(lambda m, x: m.l(x.transpose(0, 1).reshape(len(x), -1)), l=lin(20, 3)), (5, 4)
    ),
    "buffer written from data": lambda: Case(net(Running(buffer=True), lin())),
    "attribute written from data": lambda: Case(net(Running(buffer=False), lin())),
    "spectral norm while it learns": lambda: Case(net(parametrizations.spectral_norm(lin(4, 4)), lin())),
    "weights that decay in forward": lambda: Case(Custom(decaying, l=lin())),
    "losses in another order": lambda: Case(
        Reordered(), (torch.randn(SIZE, 4).double(), torch.arange(SIZE).flip(0) % 3), lambda losses, y: losses
    ),
    "input edited in place": lambda: Case(Custom(halving, l=lin())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules", "ignore:None of the inputs have")
@pytest.mark.parametrize("name", HIDDEN)
def test_the_engine_refuses_what_it_cannot_observe(name: str) -> None:
    make, message = HIDDEN[name]
    inputs = torch.randint(9, (SIZE, 4)) if "embedding" in name or "bag" in name else torch.randn(SIZE, 4).double()
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(make(), cross_entropy).run(inputs, torch.arange(SIZE) % 3)


@pytest.mark.parametrize("name", COUPLED)
def test_the_probe_refuses_records_that_depend_on_each_other(name: str) -> None:
    case = COUPLED[name]()
    with pytest.raises(UnsupportedModelError):
        probe(case.model, case.loss, case.inputs(), torch.arange(SIZE) % 3)
