"""Models, losses and arguments that are refused, by name and without data values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.errors import DataError, EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients import per_sample

LOSS = nn.CrossEntropyLoss(reduction="none")


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *extra, nn.Linear(6, 3))


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BatchNorm": (lambda: net(nn.BatchNorm1d(6)), r"'2' \(BatchNorm1d\).*GroupNorm"),
    "BatchNorm without statistics": (lambda: net(nn.BatchNorm1d(6, track_running_stats=False)).eval(), "BatchNorm1d"),
    "InstanceNorm": (
        lambda: nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), net()),
        "track_running_stats=False",
    ),
    "ScriptModule": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 3))), r"'0' \(.*ScriptModule"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(3, 4, max_norm=1.0), net()), "drop max_norm"),
    "scale_grad_by_freq": (
        lambda: nn.Sequential(nn.Embedding(3, 4, scale_grad_by_freq=True), net()),
        "scale_grad_by_freq",
    ),
    "sparse": (lambda: nn.Sequential(nn.Embedding(3, 4, sparse=True), net()), "sparse=False"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), net()), "not initialised"),
    "complex": (lambda: nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), net()), "complex"),
    "compiled": (lambda: nn.Sequential(torch.compile(nn.Linear(4, 4)), net()), "torch.compile"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        per_sample(make(), LOSS, *batch())


def test_batch_norm_in_eval_mode_is_accepted() -> None:
    model = net(nn.BatchNorm1d(6)).eval()
    assert bool(torch.isfinite(per_sample(model, LOSS, *batch()).norm).all())


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), lambda o, y: LOSS(o, y)[:, None].expand(-1, 2), lambda o, y: 1.0, lambda o, y: y]
)
def test_a_loss_that_is_not_per_record_is_refused(loss_fn: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="one loss per record"):
        per_sample(net(), loss_fn, *batch())


def test_a_label_out_of_range_is_not_printed() -> None:
    x, y = batch()
    y[2] = 77
    with pytest.raises(DataError, match=r"0 \.\. C-1") as caught:
        per_sample(net(), LOSS, x, y)
    assert caught.value.__context__ is None
    assert "77" not in str(caught.value)


def test_bad_arguments() -> None:
    x, y = batch()
    with pytest.raises(UsageError, match="first dimension"):
        per_sample(net(), LOSS, x, y[:3])
    result = per_sample(net(), LOSS, x, y)
    with pytest.raises(UsageError, match="one weight per record"):
        result.weighted_sum(torch.ones(4))
    with pytest.raises(UsageError, match="not finite"):
        result.weighted_sum(torch.full((5,), torch.nan))
    with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
        per_sample(net(), LOSS, x, y)
    x.add_(1)
    with pytest.raises(UsageError, match="changed in place"):
        result.weighted_sum(torch.ones(5))


def test_a_loss_of_one_column_is_one_loss_a_record() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3), torch.randn(5, 1)
    column, plain = (
        per_sample(model, loss, x, y) for loss in (nn.MSELoss(reduction="none"), lambda o, t: (o - t).square()[:, 0])
    )
    assert torch.allclose(column.norm, plain.norm)
    with pytest.raises(UnsupportedModelError, match=r"targets.unsqueeze\(1\)"), pytest.warns(UserWarning, match="size"):
        per_sample(model, nn.MSELoss(reduction="none"), x, y[:, 0])


@pytest.mark.parametrize(
    ("inputs", "targets", "width", "words"),
    [
        (torch.rand(90, 4), torch.rand(90), 2, r"one output for each number \(1 for a single one\)"),
        (torch.arange(360).reshape(90, 4), torch.arange(90) % 2, 2, r"torch.int64 .* pass inputs.float\(\)"),
    ],
    ids=["real targets of two outputs", "whole numbers as inputs"],
)
def test_what_is_wrong_with_kinds_and_shapes_is_said(
    inputs: Tensor, targets: Tensor, width: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(EvenhandError, match=words):
        eh.fit(nn.Linear(4, width), (inputs, targets), epsilon=3.0, epochs=1, out=tmp_path)
