"""Recurrent layers where precision or form is out of the ordinary: float32, cancelling terms, what kernels leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from conftest import by_kernels, cross_entropy
from evenhand.gradients import Engine
from evenhand.gradients.layers.recurrent_gradients import Gates
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.norms_and_sums import TOLERANCE
from evenhand.gradients.record_by_record import precise_reference, row_norms
from evenhand.gradients.row_norms import RowNorms, roundings
from evenhand.types import Pass

DOUBLE = torch.float64
Oracle = Callable[..., Pass]


class Last(nn.Module):
    """A linear layer on what a recurrent one says last."""

    def __init__(self, layer: nn.RNNBase, width: int, read: Any = lambda layer, x: layer(x)[0][:, -1]):
        super().__init__()
        self.layer, self.out, self._read = layer, nn.Linear(width, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self._read(self.layer, x))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_float32_norms_and_sums(kind: Any, scale: float) -> None:
    """Small gradients of large inputs, and the other way round; gates that saturate are no kernel's business."""
    model = Last(kind(24, 32, batch_first=True), 32)
    with torch.no_grad():
        model.layer.weight_ih_l0 /= scale
    x, y = scale * torch.randn(8, 20, 24), torch.randint(3, (8,))
    result = Engine(model, cross_entropy).run(x, y)
    assert by_kernels(result)
    _, rows = precise_reference(model, cross_entropy, x, y)
    torch.testing.assert_close(result.norm, row_norms(rows), rtol=1e-5, atol=0.0)
    weights = torch.randn(8)
    for name, total in result.weighted_sum(weights).items():
        wanted = torch.tensordot(weights.double(), rows[name], 1)
        assert float((total - wanted).norm()) <= 1e-5 * float(row_norms(rows).sum())


def gates(x: Tensor, grad: Tensor, biases: int = 2) -> Gates:
    columns = {"ih": (0, x.shape[2] - 2), "hh": (x.shape[2] - 2, x.shape[2])}
    return Gates(x, grad, columns, [f"bias{i}" for i in range(biases)], 0, ScratchBuffers(lean=False))


def truth(x: Tensor, grad: Tensor, biases: int = 2) -> Tensor:
    weight = torch.bmm(grad.double().mT, x.double()).flatten(1)
    return torch.cat([weight, *[grad.double().sum(1)] * biases], dim=1).norm(dim=1)


@pytest.mark.parametrize("left", [1.0, 0.3, 1e-2, 1e-4])
def test_terms_that_cancel(left: float) -> None:
    """Each pair of times leaves ``left`` of itself; float32 Gram matrices alone would say anything below 1e-3."""
    half, other = torch.randn(16, 4, 64) + 1.0, torch.randn(16, 4, 96) + 1.0
    x = torch.cat([half, half * (1 + left)], dim=1)
    grad = torch.cat([other, -other], dim=1)
    torch.testing.assert_close(gates(x, grad, 0).lengths(RowNorms())[0], truth(x, grad, 0), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gates(x, grad).lengths(RowNorms())[0], truth(x, grad), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("small", [1e-30, 1e-22, 1e-16, 1.0, 1e16, 1e25])
def test_sizes_whose_squares_float32_cannot_hold(small: float) -> None:
    x, grad = torch.randn(6, 5, 64), torch.randn(6, 5, 96) * small
    torch.testing.assert_close(gates(x, grad).lengths(RowNorms())[0], truth(x, grad), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_slips_cover_the_errors(dtype: torch.dtype) -> None:
    """What is not exact enough must say so, in both precisions."""
    for left in (1.0, 1e-2, 1e-5, 1e-8, 0.0):
        half, other = (torch.randn(16, 4, n, dtype=DOUBLE) + 1.0 for n in (64, 96))
        x, grad = (torch.cat(pair, dim=1).to(dtype) for pair in ((half, half + left), (other, -other)))
        share = gates(x, grad, 0)
        lengths, exact = share.lengths(RowNorms())[0], truth(x, grad, 0)
        slip = share.reach(RowNorms()) * roundings(share.terms) * torch.finfo(dtype).eps
        trusted = slip * lengths <= TOLERANCE[dtype] * lengths.square()
        assert bool(((lengths - exact).abs() <= TOLERANCE[dtype] * exact)[trusted].all())
        assert bool((lengths >= exact * (1 - 1e-5)).all())
        assert not trusted.any() if left == 0.0 else trusted.all() if left == 1.0 else True


def test_nothing_at_all_has_norm_zero() -> None:
    share = gates(torch.randn(3, 4, 64), torch.zeros(3, 4, 96))
    assert share.lengths(RowNorms())[0].tolist() == [0.0] * 3
    assert torch.equal(share.reach(RowNorms()), torch.zeros(3, dtype=DOUBLE))


def test_lower_matmul_precision_is_not_trusted_with_gram_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = torch.randn(6, 5, 64), torch.randn(6, 5, 96)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    torch.testing.assert_close(gates(x, grad).lengths(RowNorms())[0], truth(x, grad), rtol=1e-12, atol=0.0)


def packed(layer: nn.RNNBase, x: Tensor) -> Tensor:
    lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layer(sequence)[0], batch_first=True, total_length=x.shape[1])[0].sum(1)


LEFT: dict[str, Callable[[], Last]] = {
    "packed": lambda: Last(nn.LSTM(4, 5, batch_first=True), 5, packed),
    "projection": lambda: Last(nn.LSTM(4, 5, proj_size=2, batch_first=True), 2),
    "unbatched": lambda: Last(nn.GRU(4, 5), 5, lambda r, x: torch.stack([r(row)[0][-1] for row in x])),
    "states in a list": lambda: Last(
        nn.LSTM(4, 5, batch_first=True), 5, lambda r, x: r(x, [torch.ones(1, len(x), 5).to(x)] * 2)[0][:, -1]
    ),
    "row by row": lambda: Last(
        nn.RNN(4, 5, batch_first=True), 5, lambda r, x: torch.cat([r(one)[0][:, -1] for one in x[:, None]])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_to_the_fallback(agrees: Oracle, name: str) -> None:
    x, y = torch.randn(4, 3, 4, dtype=DOUBLE), torch.randint(3, (4,))
    agrees(LEFT[name]().double(), x, y, kernels=False, vectorise=False)


def test_tied_parameters_take_the_fallback(agrees: Oracle) -> None:
    model = Last(nn.LSTM(5, 5, batch_first=True), 5).double()
    model.layer.weight_hh_l0 = model.layer.weight_ih_l0
    x, y = torch.randn(4, 3, 5, dtype=DOUBLE), torch.randint(3, (4,))
    agrees(model, x, y, kernels=False, vectorise=False)


def test_autocast_takes_the_fallback() -> None:
    model = Last(nn.GRU(4, 5, batch_first=True), 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not by_kernels(Engine(model, cross_entropy).run(torch.randn(4, 3, 4), torch.randint(3, (4,))))
