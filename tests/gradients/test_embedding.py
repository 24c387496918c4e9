"""Embeddings and bags of them: repeated indices, padding, both ways of finding places, cancelling sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import Custom, Oracle, lin
from torch import Tensor, nn

from evenhand.gradients import Engine
from evenhand.gradients.layers.embedding import _first
from evenhand.gradients.memory import ScratchBuffers

SIZE = 6


def loop(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Each record's gradient by plain autograd: vmap does not know bags."""
    found = []
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        named = dict(model.named_parameters())
        found.append(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))
    return found


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4)])
def test_embedding(agrees: Oracle, shape: tuple[int, ...], padding: int | None) -> None:
    layer = nn.Embedding(5, 4, padding_idx=padding)
    model = Custom(lambda m, x: m.o(torch.tanh(m.e(x)).reshape(len(x), -1, 4).mean(1)), e=layer, o=lin())
    agrees(model, torch.randint(5, (SIZE, *shape)), torch.randint(3, (SIZE,)), kernels=True)


@pytest.mark.parametrize("lean", [True, False])
def test_places_of_one_index_share_a_number(lean: bool) -> None:
    room, index = ScratchBuffers(lean=lean), torch.randint(9, (20, 15))
    for _ in range(2):
        place = _first(index, 9, room)
        assert torch.equal(place[:, :, None] == place[:, None], index[:, :, None] == index[:, None])
        assert 0 <= int(place.min()) <= int(place.max()) < 15
        index = index.flip(0)


@pytest.mark.parametrize("options", [{}, {"mode": "sum"}, {"padding_idx": 2}, {"mode": "sum", "padding_idx": 2}])
def test_bags(options: dict[str, Any]) -> None:
    model = Custom(lambda m, x: m.o(m.e(x)), e=nn.EmbeddingBag(5, 4, **options), o=lin())
    x, y = torch.randint(5, (SIZE, 7)), torch.randint(3, (SIZE,))
    x[0] = 2
    result, expected = Engine(model, nn.CrossEntropyLoss(reduction="none")).run(x, y), loop(model, x, y)
    assert type(result.weighted_sum.__self__._raw).__name__ == "RecordedGradients"  # type: ignore[attr-defined]
    norm = torch.stack([torch.cat([g.flatten() for g in rows.values()]).norm() for rows in expected])
    torch.testing.assert_close(result.norm, norm, rtol=1e-9, atol=1e-9)
    weights = torch.randn(SIZE, dtype=torch.float64)
    for name, total in result.weighted_sum(weights).items():
        wanted = sum(w * rows[name] for w, rows in zip(weights, expected, strict=True))
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-9)


def test_bags_of_other_kinds_are_exact_too() -> None:
    def weighted(m: Any, x: Tensor) -> Tensor:
        return m.o(m.e(x, per_sample_weights=torch.ones(x.shape, dtype=torch.float64) * 2))

    for model in (
        Custom(lambda m, x: m.o(m.e(x)), e=nn.EmbeddingBag(5, 4, mode="max"), o=lin()),
        Custom(weighted, e=nn.EmbeddingBag(5, 4, mode="sum"), o=lin()),
        Custom(lambda m, x: m.o(m.e(x.flatten(), torch.arange(len(x)) * 7)), e=nn.EmbeddingBag(5, 4), o=lin()),
    ):
        x, y = torch.randint(5, (SIZE, 7)), torch.randint(3, (SIZE,))
        result = Engine(model, nn.CrossEntropyLoss(reduction="none")).run(x, y)
        norm = [torch.cat([g.flatten() for g in rows.values()]).norm() for rows in loop(model, x, y)]
        torch.testing.assert_close(result.norm, torch.stack(norm), rtol=1e-9, atol=1e-9)


def test_float32_gradients_that_cancel_at_an_index() -> None:
    model = Custom(lambda m, x: (m.e(x[:, :, 0].long()) * x[:, :, 1:]).sum((1, 2)), e=nn.Embedding(3, 4)).float()
    x = torch.randn(5, 8, 5) * 1e4
    x[:, 4:] = -x[:, :4] + torch.rand(5, 4, 5) * 1e-1
    x[:, :, 0] = 1.0
    result = Engine(model, lambda out, y: out).run(x, torch.zeros(5))
    torch.testing.assert_close(result.norm, x[:, :, 1:].double().sum(1).norm(dim=1), rtol=1e-6, atol=0)
