"""A vocabulary that is both looked up and the weight of the last layer: one norm, without adding tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import Case, check, compare, oracle
from oracles import Custom, Oracle
from torch import Tensor, nn

from evenhand.gradients import Engine
from evenhand.gradients import norms_and_sums as module
from evenhand.gradients.layers.embedding import lookup
from evenhand.gradients.layers.linear import Outer, Rank1
from evenhand.gradients.layers.tied_tables import tied_norms
from evenhand.gradients.memory import ScratchBuffers

WORDS, WIDTH = 300, 20
ROOM, WEIGHT = ScratchBuffers(lean=False), frozenset({"weight"})


def language_model(**more: Any) -> nn.Module:
    def forward(m: Any, ids: Tensor) -> Tensor:
        h = torch.tanh(m.l(m.e(ids)))
        return m.head(h + m.e(ids.flip(1)) if m.twice else h)

    model = Custom(forward, e=nn.Embedding(WORDS, WIDTH, **more), l=nn.Linear(WIDTH, WIDTH),
                   head=nn.Linear(WIDTH, WORDS, bias=False))  # fmt: skip
    model.head.weight = model.e.weight
    model.twice = False
    return model


def next_word(outputs: Tensor, targets: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(outputs.mT, targets, reduction="none")
    return each.mean(1)


def words(size: int = 6, times: int = 4) -> Tensor:
    ids = torch.randint(WORDS, (size, times))
    ids[:, -1] = ids[:, 0]
    return ids


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each group with several calls was measured by inner products."""
    seen: list[bool] = []

    def count(shares: Any, parameters: int) -> Tensor | None:
        norms = tied_norms(shares, parameters)
        seen.append(norms is not None)
        return norms

    monkeypatch.setattr(module, "tied_norms", count)
    return seen


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("more", [{}, {"padding_idx": 3}])
def test_a_tied_vocabulary(counted: list[bool], more: dict[str, Any], twice: bool) -> None:
    model = language_model(**more)
    model.twice = twice
    engine = Engine(model, next_word)
    for _ in range(3):
        ids = words()
        compare(engine.run(ids, ids), oracle(model, next_word, ids, ids))
    assert counted
    assert all(counted)


def test_parts_of_a_batch(agrees: Oracle) -> None:
    ids = words()
    agrees(language_model(), ids, ids, next_word, kernels=True)


def test_another_weight_between_them_is_left_alone(counted: list[bool]) -> None:
    """With a bias in the last layer the gradients are not those of one weight."""
    model = language_model()
    model.head.bias = nn.Parameter(torch.zeros(WORDS, dtype=torch.float64))
    ids = words()
    compare(Engine(model, next_word).run(ids, ids), oracle(model, next_word, ids, ids))
    assert not any(counted)


def test_long_records_are_added_up(counted: list[bool]) -> None:
    """Many times and a small table: adding the gradients is quicker."""
    model, ids = language_model(), words(4, 200)
    compare(Engine(model, next_word).run(ids, ids), oracle(model, next_word, ids, ids))
    assert not any(counted)


def test_in_float32_and_in_doubt(counted: list[bool]) -> None:
    """Gradients that cancel between the table and the layer: the rows are computed apart, exactly."""
    model = Custom(lambda m, ids: m.head(m.e(ids)).mean((1, 2)), e=nn.Embedding(WORDS, WIDTH),
                   head=nn.Linear(WIDTH, WORDS, bias=False)).float()  # fmt: skip
    model.head.weight = model.e.weight
    ids, targets = words(), torch.tensor([1.0, -1.0, 2.0, 1e-3, 1e3, 0.0])
    loss = lambda out, y: out * y * 1e4  # noqa: E731
    result = Engine(model, loss).run(ids, targets)
    expected = oracle(model.double(), loss, ids, targets.double())
    compare(result, expected, 1e-4)
    assert any(counted)


@pytest.mark.parametrize("times", [1, 3])
def test_every_pair_of_calls(times: int) -> None:
    """Layers and look-ups, of vectors and of sequences, in any number."""
    torch.manual_seed(times)

    def linear() -> Outer | Rank1:
        x, g = torch.randn(5, times, 7).double(), torch.randn(5, times, 11).double()
        return Rank1(x[:, 0], g[:, 0], WEIGHT) if times == 1 else Outer(x, g, WEIGHT, ROOM)

    def table() -> Any:
        return lookup(torch.randint(11, (5, 4)), torch.randn(5, 4, 7).double(), 11, 2, ROOM)

    for shares in ([linear(), table()], [table(), table()], [linear(), linear(), table(), table()]):
        norms = tied_norms(shares, 1 << 30)
        added = sum(share.instantiate()["weight"] for share in shares)
        torch.testing.assert_close(norms, added.flatten(1).norm(dim=1), rtol=1e-12, atol=0)


def test_what_cancels_is_no_negative_square() -> None:
    x, g = torch.randn(3, 2, 4), torch.randn(3, 2, 5)
    shares = [Outer(x, g, WEIGHT, ROOM), Outer(-x, g, WEIGHT, ROOM)]
    norms = tied_norms(shares, 1 << 30)
    assert norms is not None
    assert bool((norms >= 0).all())
    assert float(norms.max()) < 1e-6


def test_a_tied_model_of_transformers_size_is_exact_twice() -> None:
    check(Case(language_model(), words(), lambda out, y: next_word(out, y.unsqueeze(1).expand(-1, 4))))
