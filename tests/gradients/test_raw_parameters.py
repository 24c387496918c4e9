"""Parameters that a model uses itself: served exactly, record by record, or left to the fallback; never wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import Custom, Oracle, cross_entropy, lin
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evenhand.errors import UsageError
from evenhand.gradients import Engine
from evenhand.gradients.norms_and_sums import RecordedGradients
from evenhand.gradients.unserved.raw_parameters import uses

DOUBLE = torch.float64
Made = Callable[[], tuple[nn.Module, tuple[int, ...]]]


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def model(forward: Any, shape: tuple[int, ...], **layers: Any) -> Made:
    """Made anew for every test: a sequence goes through ``l``, then the mean over time."""
    return lambda: (
        Custom(forward, l=lin(4, 4), o=lin(), **{name: make() for name, make in layers.items()}),
        shape,
    )


def end(m: Any, x: Tensor) -> Tensor:
    return m.o(torch.tanh(x).mean(1))


def vit(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.cls.expand(len(x), -1, -1), m.l(x)], dim=1)
    x = x + m.pos[:, : x.shape[1]]
    return m.o((x + m.gamma * torch.tanh(x))[:, 0])


def gpt(m: Any, x: Tensor) -> Tensor:
    return end(m, m.l(x) + m.pos(torch.arange(x.shape[1])))


def gated(m: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(m.gate)
    return end(m, gate * m.l(x) + (1 - gate) * x)


def queries(m: Any, x: Tensor) -> Tensor:
    asked = m.q.expand(len(x), -1, -1)
    return m.o((torch.softmax(asked @ m.l(x).mT, -1) @ x).mean(1))


def edited(m: Any, x: Tensor) -> Tensor:
    hidden = m.l(x).clone()
    hidden *= m.scale
    hidden += m.shift
    return end(m, hidden)


def root_norm(m: Any, x: Tensor) -> Tensor:
    x = m.l(x)
    return end(m, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * m.w)


def time_first(m: Any, x: Tensor) -> Tensor:
    x = m.l(x).transpose(0, 1)
    return m.o(torch.tanh((x + m.pos[: len(x)]) * m.scale).mean(0))


def deep(m: Any, x: Tensor) -> Tensor:
    mixed = torch.cat([m.a.unsqueeze(0), m.b.view(1, 2).t().reshape(1, 2)], dim=1).permute(1, 0)
    return end(m, m.l(x) * mixed.squeeze(1).exp() / m.c[1] - m.c[0])


def hooked(m: Any, x: Tensor) -> Tensor:
    """Hooks on the results of the very operations where scales meet data, one of them needed for nothing else."""
    raw, hidden = x * m.r, m.l(x) * m.s
    for each in (raw, hidden):
        each.register_hook(lambda grad: -0.5 * grad)
    return end(m, raw + hidden)


def written(m: Any, x: Tensor) -> Tensor:
    hidden = m.l(x).clone()
    hidden[:, 0] = m.s
    return end(m, hidden)


def looked_up_twice(m: Any, x: Tensor) -> Tensor:
    return end(m, m.l(x) + m.pos(torch.arange(x.shape[1]) // 2))


def distances(m: Any, x: Tensor) -> Tensor:
    """Relative positions, as Swin adds them to attention."""
    places = torch.arange(x.shape[1])
    bias = m.table[(places[:, None] - places).flatten() + x.shape[1] - 1].view(x.shape[1], -1)
    h = m.l(x)
    return end(m, torch.softmax(h @ h.mT + bias, -1) @ h)


def masked(m: Any, x: Tensor) -> Tensor:
    h, before = m.l(x), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    bias = torch.where(before, m.s, -10.0) + m.s.masked_fill(before, 1.0)
    return end(m, torch.softmax(h @ h.mT + bias, -1) @ h)


SERVED: dict[str, Made] = {
    "raw convolution": model(
        lambda m, x: end(m, functional.conv1d(m.l(x), m.w, padding=1)), (5, 6, 4), w=lambda: par(6, 6, 3)
    ),
    "tokens, positions, scales": model(
        vit, (5, 6, 4), cls=lambda: par(1, 1, 4), pos=lambda: par(1, 9, 4), gamma=lambda: par(4)
    ),
    "embedded positions": model(gpt, (5, 6, 4), pos=lambda: nn.Embedding(9, 4)),
    "gate": model(gated, (5, 6, 4), gate=lambda: par(1)),
    "temperature": model(lambda m, x: end(m, m.l(x) / functional.softplus(m.t)), (5, 6, 4), t=lambda: par(1)),
    "log temperature": model(lambda m, x: end(m, m.l(x)) * m.t.exp(), (5, 6, 4), t=lambda: par(1)),
    "raw data times a scale": model(lambda m, x: m.o(m.l(x * m.s)), (5, 4), s=lambda: par(4)),
    "scale over raw data": model(lambda m, x: m.o(m.l(m.s / (2 + x.square()))), (5, 4), s=lambda: par(4)),
    "divided by": model(lambda m, x: m.o(m.l(x) / m.s), (5, 4), s=lambda: par(1, 4)),
    "subtracted": model(lambda m, x: m.o(m.s - torch.sub(m.l(x), m.s, alpha=3)), (5, 4), s=lambda: par(4)),
    "masked": model(lambda m, x: m.o(m.l(x) + (x > 0) * m.s), (5, 4), s=lambda: par(4)),
    "learned queries": model(queries, (5, 6, 4), q=lambda: par(1, 3, 4)),
    "edited in place": model(edited, (5, 6, 4), scale=lambda: par(4), shift=lambda: par(6, 1)),
    "prelu": model(lambda m, x: m.o(m.p(m.l(x))), (5, 4), p=lambda: nn.PReLU(4)),
    "prelu with one slope": model(lambda m, x: end(m, m.p(m.l(x))), (5, 6, 4), p=lambda: nn.PReLU()),
    "prelu on raw data": model(lambda m, x: end(m, m.l(m.p(x))), (5, 6, 4), p=lambda: nn.PReLU(6)),
    "root mean square norm": model(root_norm, (5, 6, 4), w=lambda: par(4)),
    "nn.RMSNorm": model(lambda m, x: end(m, m.n(m.l(x))), (5, 6, 4), n=lambda: nn.RMSNorm(4)),
    "functional layer norm": model(
        lambda m, x: end(m, functional.layer_norm(m.l(x), (4,), m.w, m.b)), (5, 6, 4), w=lambda: par(4),
        b=lambda: par(4),
    ),
    "functional linear": model(
        lambda m, x: m.o(functional.linear(torch.tanh(m.l(x)), m.w, m.b)), (5, 4), w=lambda: par(4, 4), b=lambda: par(4)
    ),
    "functional linear over time": model(
        lambda m, x: end(m, functional.linear(x, m.w, m.b)) + end(m, m.l(x) @ m.w), (5, 6, 4), w=lambda: par(4, 4),
        b=lambda: par(4),
    ),
    "raw weight of a layer": model(lambda m, x: end(m, m.l(torch.tanh(m.l(x))) @ m.l.weight), (5, 6, 4)),
    "matrices per head": model(
        lambda m, x: end(m, (m.l(x).unflatten(2, (2, 2)).transpose(1, 2) @ m.w).transpose(1, 2).flatten(2)), (5, 6, 4),
        w=lambda: par(2, 2, 2),
    ),
    "time first": model(time_first, (5, 6, 4), pos=lambda: par(9, 1, 4), scale=lambda: par(4)),
    "repeated": model(lambda m, x: end(m, m.l(x) * (m.s + m.s * 2)), (5, 6, 4), s=lambda: par(4)),
    "through moves": model(deep, (5, 6, 4), a=lambda: par(2), b=lambda: par(2), c=lambda: par(2)),
    "transposed into a product": model(lambda m, x: m.o(m.l(x) @ m.w.t()), (5, 4), w=lambda: par(4, 4)),
    "checkpointed": model(
        lambda m, x: end(m, checkpoint(lambda h: torch.tanh(m.l(h)) * m.s, x, use_reentrant=False)), (5, 6, 4),
        s=lambda: par(4),
    ),
    "gradient changed by a tensor hook": model(hooked, (5, 6, 4), r=lambda: par(4), s=lambda: par(4)),
    "written into the batch": model(written, (5, 6, 4), s=lambda: par(4)),
    "places looked up twice": model(looked_up_twice, (5, 6, 4), pos=lambda: nn.Embedding(9, 4)),
    "a table of distances": model(distances, (5, 6, 4), table=lambda: par(11, 1)),
    "masked places": model(masked, (5, 6, 4), s=lambda: par(6, 6)),
    "copies by repetition": model(lambda m, x: end(m, m.l(x) + m.s.repeat(len(x), 6, 1)), (5, 6, 4), s=lambda: par(4)),
    "functional embedding": model(
        lambda m, x: end(m, m.l(x) + functional.embedding((x[:, :, 0] > 0).long(), m.s)), (5, 6, 4), s=lambda: par(2, 4)
    ),
    "functional embedding, padded and scaled": model(
        lambda m, x: end(m, m.l(x) + 3 * functional.embedding((x[:, :, 0] > 0).long(), m.s, padding_idx=0)),
        (5, 6, 4), s=lambda: par(2, 4),
    ),
    "permuted into a product": model(lambda m, x: m.o(m.l(x) @ m.w.T), (5, 4), w=lambda: par(4, 4)),
    "nothing but parameters": lambda: (
        Custom(lambda m, x: x @ m.w + m.b, w=par(4, 3), b=par(3)),
        (5, 4),
    ),
}  # fmt: skip


LOOPED = {"checkpointed", "gradient changed by a tensor hook"}


def averaged(m: Any, x: Tensor) -> Tensor:
    """The mean over the batch of copies of one parameter is that parameter, but the rows are not its gradients."""
    return end(m, m.l(x) * m.s.expand(len(x), 4).mean(0))


FALLBACK: dict[str, Made] = {
    "product of parameters": model(
        lambda m, x: m.o(m.l(x) @ (m.a @ m.b)), (5, 4), a=lambda: par(4, 2), b=lambda: par(2, 4)
    ),
    "softmax of parameters": model(lambda m, x: m.o(m.l(x) * torch.softmax(m.s, 0)), (5, 4), s=lambda: par(4)),
    "einsum": model(lambda m, x: m.o(torch.einsum("bi,oi->bo", m.l(x), m.w)), (5, 4), w=lambda: par(4, 4)),
    "penalty": model(lambda m, x: m.o(m.l(x) * m.s) + m.s.square().sum(), (5, 4), s=lambda: par(4)),
    "copies averaged over the batch": model(averaged, (5, 6, 4), s=lambda: par(4)),
}  # fmt: skip


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs[:, :3], targets)


FLATTENED = ("functional linear over time", "raw weight of a layer")
"""Rows of records and times in one dimension: whose they are does not follow from their number: no kernel is used."""


@pytest.mark.parametrize("name", SERVED)
def test_served(agrees: Oracle, name: str) -> None:
    made, shape = SERVED[name]()
    x, y = torch.randn(shape, dtype=DOUBLE), torch.randint(3, shape[:1])
    agrees(made, x, y, loss, kernels=None if name in FLATTENED else True, vectorise=name not in LOOPED)


@pytest.mark.parametrize("name", FALLBACK)
def test_left_to_the_fallback(agrees: Oracle, name: str) -> None:
    made, shape = FALLBACK[name]()
    agrees(made, torch.randn(shape, dtype=DOUBLE), torch.randint(3, shape[:1]), loss, kernels=False)


@pytest.mark.parametrize("name", ["tokens, positions, scales", "embedded positions", "time first", "learned queries"])
def test_batches_as_large_as_something_else(name: str) -> None:
    """As many records as times, as positions, as features, and one alone: what was learned must still hold."""
    made, shape = SERVED[name]()
    engine = Engine(made, loss)
    for size in (5, 6, 7, 9, 4, 3, 2, 1):
        x, y = torch.randn(size, *shape[1:], dtype=DOUBLE), torch.randint(3, (size,))
        result = engine.run(x, y)
        alone = torch.cat([Engine(made, loss).run(x[i : i + 1], y[i : i + 1]).norm for i in range(size)])
        torch.testing.assert_close(result.norm, alone, rtol=1e-9, atol=1e-9)
        total = torch.autograd.grad(loss(made(x), y).sum(), list(made.parameters()))
        for found, whole in zip(result.weighted_sum(torch.ones(size)).values(), total, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
        assert isinstance(result.weighted_sum.__self__._raw, RecordedGradients)  # type: ignore[attr-defined]


def test_no_way_is_counted_twice() -> None:
    """Copies for all records that meet the batch once more: what reaches the copies has two meanings."""
    scale, x = par(4), torch.randn(3, 4)
    copies = scale.expand(3, 4)
    once, again = (x * copies).sum(1), (x[:, None] * copies[None]).sum((1, 2))
    named = {"scale": scale}
    assert [len(uses(part, named, 3, None).uses) for part in (once, again, once + again)] == [1, 1, 0]


def test_only_known_ways_count() -> None:
    scale, x = par(4), torch.randn(3, 4)
    (known,) = uses((x * scale).sum(1), {"scale": scale}, 3, None).uses
    assert len(uses((x * scale).sum(1), {"scale": scale}, 3, {known.key}).uses) == 1
    assert not uses((x + scale).sum(1), {"scale": scale}, 3, {known.key}).uses


def test_float32_sums_that_cancel() -> None:
    """Large terms over time that nearly cancel: the norm must not lose what is left."""
    made = Custom(lambda m, x: (m.s * x).sum((1, 2)), s=par(4)).float()
    x = torch.randn(4, 6, 4) * 1e4
    x[:, 3:] = -x[:, :3] + torch.rand(4, 3, 4) * 1e-1
    result = Engine(made, lambda out, y: 3 * out).run(x, torch.zeros(4))
    torch.testing.assert_close(result.norm, 3 * x.double().sum(1).norm(dim=1), rtol=1e-6, atol=0)
    total = result.weighted_sum(torch.ones(4))["s"]
    torch.testing.assert_close(total, 3 * x.double().sum((0, 1)).float(), rtol=1e-5, atol=0)


def test_an_input_changed_after_the_pass_is_noticed() -> None:
    made, shape = SERVED["raw data times a scale"]()
    x = torch.randn(shape, dtype=DOUBLE)
    result = Engine(made, loss).run(x, torch.randint(3, shape[:1]))
    x.mul_(2)
    with pytest.raises(UsageError, match="in place"):
        result.weighted_sum(torch.ones(len(x)))


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_as_many_prompts_as_records_that_are_compared(count: int) -> None:
    """Look up one row of indices for all records, as prompt tuning does: it looks like one of each of four records."""

    def prompted(m: Any, x: Tensor) -> Tensor:
        return end(m, torch.cat([m.p(torch.arange(count).unsqueeze(0)).repeat(len(x), 1, 1), m.l(x)], dim=1))

    made = Custom(prompted, p=nn.Embedding(count, 4), l=lin(4, 4), o=lin())
    engine, x, y = Engine(made, loss), torch.randn(7, 2, 4, dtype=DOUBLE), torch.randint(3, (7,))
    result = engine.run(x, y)
    assert engine.way() == "kernels"
    alone = torch.cat([Engine(made, loss).run(x[i : i + 1], y[i : i + 1]).norm for i in range(7)])
    torch.testing.assert_close(result.norm, alone, rtol=1e-9, atol=1e-9)
