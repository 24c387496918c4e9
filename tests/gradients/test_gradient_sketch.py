"""Folds: few numbers that tell how far apart two tensors are, and gradients that are handed over one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenhand.gradients import batch_utils, probe
from evenhand.gradients.batch_utils import buffers_restored
from evenhand.gradients.doctor.independence_probe import _alike as alike
from evenhand.gradients.engine import Engine
from evenhand.gradients.record_by_record import PIECE, WIDTHS, apart, each_gradient, fold_of, folded

WIDTH = max(WIDTHS)
LOSS = nn.CrossEntropyLoss(reduction="none")
DIFFERENCES = {
    "one number": lambda n: torch.zeros(n).index_fill_(0, torch.tensor([n // 2]), 1.0),
    "all alike": torch.ones,
    "every 256th": lambda n: torch.arange(n).remainder(256).eq(3).float(),
    "every 1024th": lambda n: torch.arange(n).remainder(1024).eq(0).float(),
    "up and down": lambda n: 1.0 - 2.0 * torch.arange(n).remainder(2),
    "random": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("count", [1, 1000, 1024, WIDTH + 1, 8 * WIDTH + 5, 16 * 1024, PIECE + 7, 9 * PIECE + 3])
def test_the_length_of_a_fold_is_that_of_what_was_folded(kind: str, count: int) -> None:
    """Whatever is folded; a tensor that is no longer than a fold is not folded at all."""
    values = DIFFERENCES[kind](count)
    exact = float(values.double().norm())
    for seed in range(5):
        found = float(np.linalg.norm(fold_of(values, seed)))
        assert found == pytest.approx(exact, rel=0.5 if count >= 1009 else 1e-12)


def test_folds_add_up() -> None:
    one, other = torch.randn(2, 5 * PIECE + 11, dtype=torch.float64)
    np.testing.assert_allclose(fold_of(one, 3) + fold_of(other, 3), fold_of(one + other, 3), atol=1e-10)
    assert any(len(fold_of(one, 3)) != len(fold_of(one, seed)) for seed in range(20)), "no width is that of all layers"


@pytest.mark.parametrize("count", [5, 20 * WIDTH])
def test_places_that_are_not_finite_never_cancel(count: int) -> None:
    values = torch.zeros(count)
    assert not folded(values, 0)[1].any()
    for places in ([0], [1, 3], list(range(count))):
        spoilt = values.clone()
        spoilt[places] = math.inf
        total, odd = folded(spoilt, 0)
        assert odd.any()
        assert not total.any()
        assert np.isnan(fold_of(spoilt, 0)).all()
        assert math.isnan(apart({"a": fold_of(spoilt, 0)}, {"a": fold_of(values, 0)}))
    for seed in range(40 if count > WIDTH else 0):
        for width in WIDTHS:  # two that fall on the same number, with signs of their own
            spoilt = values.clone()
            spoilt[[7, 7 + width]] = math.nan
            assert folded(spoilt, seed)[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_any_precision_can_be_folded(dtype: torch.dtype) -> None:
    values = torch.randn(3000).to(dtype)
    np.testing.assert_array_equal(fold_of(values, 1), fold_of(values.double(), 1))
    turned = torch.randn(60, 50).t()
    np.testing.assert_array_equal(fold_of(turned, 1), fold_of(turned.contiguous(), 1))


def test_gradients_are_those_of_autograd_one_at_a_time_and_leave_no_trace() -> None:
    leaves = {name: torch.randn(4, 4, requires_grad=True) for name in ("a", "b", "unused")}
    outside = torch.randn(4, 4, requires_grad=True)

    def loss() -> Tensor:
        return (leaves["a"] @ leaves["b"] @ leaves["a"] @ outside).sum()

    expected = torch.autograd.grad(loss(), [leaves["a"], leaves["b"]])
    found: dict[str, Tensor] = {}

    def note(name: str, gradient: Tensor) -> None:
        assert all(leaf.grad is None for leaf in leaves.values()), "none is held but the one that is handed over"
        found[name] = gradient

    each_gradient(loss(), leaves, note)
    torch.testing.assert_close(found, dict(zip(("a", "b"), expected, strict=True)))
    assert all(leaf.grad is None for leaf in (*leaves.values(), outside))

    def failing(name: str, gradient: Tensor) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match=r"a|b"):
        each_gradient(loss(), leaves, failing)
    assert all(leaf.grad is None for leaf in leaves.values())
    loss().backward()
    assert leaves["a"].grad is not None, "no hook is left behind"


def test_copies_for_restoring_are_shared_until_something_is_written() -> None:
    model = nn.BatchNorm1d(2000)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with buffers_restored(model):
        with buffers_restored(model):
            model(torch.randn(4, 2000))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), "the inner one restores"
        model.weight.data.fill_(5.0)
        with buffers_restored(model):
            model.weight.data.fill_(7.0)
        assert (model.weight == 5.0).all(), "what was there when the inner one began"
    assert torch.equal(model.weight, before["weight"])


def test_a_wrong_sum_of_a_large_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that are right do not save a sum that belongs to other places of the parameter."""
    model, x, y = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 3)), torch.randn(8, 200), torch.arange(8)
    engine = Engine(model, LOSS)
    book = type(engine.run(x, y % 3).weighted_sum.__self__._raw)  # type: ignore[attr-defined]
    assert next(iter(engine._habits.values())) is not None, "served by kernels"
    right = book.weighted_sum

    def rolled(self: object, *args: object, **more: object) -> dict[str, Tensor]:
        return {name: part.roll(1, -1) for name, part in right(self, *args, **more).items()}

    monkeypatch.setattr(book, "weighted_sum", rolled)
    wary = Engine(model, LOSS)
    wary.run(x, y % 3)
    assert all(habits is None for habits in wary._habits.values()), "not believed"


def test_the_probe_sees_a_coupling_through_a_large_layer() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - 1e-4 * x.mean(0)

    model = nn.Sequential(nn.Linear(100, 400), Centred(), nn.Linear(400, 3))
    with pytest.raises(Exception, match="depends on the other records"):
        probe(model, LOSS, torch.randn(4, 100), torch.arange(4) % 3)


def test_sparse_gradients_come_dense() -> None:
    table = torch.randn(5, 2, requires_grad=True)
    found: dict[str, Tensor] = {}
    rows = nn.functional.embedding(torch.tensor([1, 1, 3]), table, sparse=True)
    each_gradient(rows.sum(), {"table": table}, found.__setitem__)
    assert found["table"].tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


def test_copies_of_another_precision_are_not_shared_and_none_is_kept() -> None:
    model = nn.Linear(3, 2)
    with buffers_restored(model):
        model.weight.data = model.weight.data.double()
        with buffers_restored(model):
            model.weight.data.fill_(1.0)
        assert not (model.weight == 1.0).any()
        model.weight.data = model.weight.data.float()
    assert not batch_utils._COPIES.get()


def test_losses_and_places_that_are_not_finite_count_by_themselves() -> None:
    one, other = torch.tensor([1.0]), torch.tensor([1.1])
    assert not alike({"": folded(one, 0)}, {"": folded(other, 0)}, 1e-3)
    same = {"weight": folded(torch.ones(5), 0)}
    assert not alike({"": folded(one, 0), **same}, {"": folded(other, 0), **same}, 1e-3)
    spoilt = torch.zeros(2, 40_000)
    spoilt[0, 20_000] = spoilt[1, 20_001] = math.nan
    assert not alike({"weight": folded(spoilt[0], 0)}, {"weight": folded(spoilt[1], 0)}, 1e-3)


def test_a_sum_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(8, 4), torch.arange(8) % 3
    book = type(Engine(model, LOSS).run(x, y).weighted_sum.__self__._raw)  # type: ignore[attr-defined]
    right = book.weighted_sum

    def lifted(self: object, *args: object, **more: object) -> dict[str, Tensor]:
        return {name: part.unsqueeze(0) for name, part in right(self, *args, **more).items()}

    monkeypatch.setattr(book, "weighted_sum", lifted)
    engine = Engine(model, LOSS)
    engine.run(x, y)
    assert all(habits is None for habits in engine._habits.values()), "not believed"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_a_number_do_no_harm() -> None:
    model, x, y = nn.Sequential(nn.Linear(8, 0), nn.ReLU(), nn.Linear(0, 3)), torch.randn(6, 8), torch.arange(6) % 3
    probe(model, LOSS, x, y)
    assert Engine(model, LOSS).run(x, y).norm.shape == (6,)
