"""The independence probe: records that touch each other are found before training, and named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.errors import DataError, UnsupportedModelError, UsageError
from evenhand.gradients import Engine, probe
from evenhand.gradients.doctor.independence_probe import _alike as alike
from evenhand.gradients.record_by_record import HeldGradients, folded

LOSS = nn.CrossEntropyLoss(reduction="none")


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *extra, nn.Linear(6, 3))


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.arange(size) % 3


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OwnCode(nn.Module):
    """Mixes records in its own forward, before a layer that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x / x.norm())


class Attending(nn.Module):
    """Batch and time exchanged: attention runs over the records."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[:, None], x[:, None], x[:, None])[0][:, 0]


class Running(nn.Module):
    def __init__(self, count_only: bool) -> None:
        super().__init__()
        self.count_only = count_only
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if not self.count_only:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x + 0.1 * torch.randn_like(x), 0.3)
        return x * torch.bernoulli(torch.full((len(x), 1), 0.8)) + torch.rand(len(x), 1)


ACCEPTED = {
    "plain": lambda: net(),
    "dropout": lambda: net(nn.Dropout(0.5), nn.AlphaDropout(0.2)),
    "functional randomness": lambda: net(Noisy()),
    "a counter": lambda: net(Running(count_only=True)),
    "batch norm in eval mode": lambda: net(nn.BatchNorm1d(6)).eval(),
    "fallback": lambda: net(nn.PReLU()),
    "records flipped and back": lambda: net(type("Flip", (nn.Linear,), {"forward": _flipped})(6, 6)),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.3, batch_first=True), nn.Flatten(),
        nn.Linear(4, 3),
    ),
}  # fmt: skip

COUPLED = {
    "batch norm": (lambda: net(nn.BatchNorm1d(6)), r"'1' \(BatchNorm1d\)"),
    "centred": (lambda: net(nn.Sequential(nn.Tanh(), Centred())), r"'1\.1' \(Centred\)"),
    "own code": (lambda: net(OwnCode()), r"'1' \(OwnCode\)"),
    "attention over records": (lambda: net(Attending()), r"'1\.a' \(MultiheadAttention\)"),
    "root": (lambda: nn.Sequential(Centred()), "no trainable|Centred"),
}


def _flipped(self: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x.flip(0), self.weight, self.bias).flip(0)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("name", ACCEPTED)
def test_independent_records_pass(name: str, size: int) -> None:
    model = ACCEPTED[name]()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    torch.manual_seed(5)
    probe(model, LOSS, *batch(size))
    torch.manual_seed(5)
    batch(size)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    probe(model, LOSS, *batch(size))
    assert torch.equal(torch.rand(1), drawn)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(not m._forward_hooks and "forward" not in m.__dict__ for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_records_are_found_and_the_module_named(name: str) -> None:
    make, message = COUPLED[name]
    with pytest.raises((UnsupportedModelError, UsageError), match=message):
        probe(make(), LOSS, *batch())


def _weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=outputs.dtype)
    return functional.cross_entropy(outputs, targets, weight, reduction="none") / weight[targets].sum()


def _ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=0, reduction="none") / (targets != 0).sum().clamp(
        min=1
    )


def _contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return -torch.log_softmax(outputs @ outputs.t(), 1).diagonal()


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets).expand(len(targets))


@pytest.mark.parametrize("loss_fn", [_weighted, _ignoring, _contrastive, _mean])
def test_losses_that_couple_records(loss_fn: object) -> None:
    with pytest.raises(UnsupportedModelError, match="the loss of a record depends on the other records"):
        probe(net(), loss_fn, *batch())  # type: ignore[arg-type]


def test_a_mean_loss_is_told_what_to_use() -> None:
    with pytest.raises(UnsupportedModelError, match="reduction='none'"):
        probe(net(), nn.CrossEntropyLoss(), *batch())


def test_state_written_from_the_data_is_refused_by_name() -> None:
    model = net(Running(count_only=False))
    buffer = model[1].mean
    with pytest.raises(UnsupportedModelError, match=r"'1\.mean' from the data"):
        probe(model, LOSS, *batch())
    assert model[1].mean is buffer
    assert not buffer.any()
    assert model[1].count == 0


def test_labels_and_shapes() -> None:
    x, _ = batch()
    with pytest.raises(DataError, match="does not fit") as caught:
        probe(net(), LOSS, x, torch.full((6,), 41))
    assert "41" not in str(caught.value)
    assert caught.value.__context__ is None
    with pytest.raises(UnsupportedModelError, match=r"shape \(8, 3\) for 4 records"):
        probe(nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Linear(2, 3)), LOSS, *batch())
    with pytest.raises(UsageError, match="at least one record"):
        probe(net(), LOSS, *batch(0))


def test_rows_that_are_not_finite_do_not_alarm() -> None:
    x, y = batch()
    x[1] = torch.nan
    x[2] = 1e30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe(net(), LOSS, x, y)


def test_records_that_fit_well_raise_no_alarm_and_stay_on_the_kernels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inputs, targets = 3 * torch.randn(6, 8), torch.arange(6) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    assert loss_fn(model(inputs), targets).max() < 1e-3
    probe(model, loss_fn, inputs, targets)
    engine = Engine(model, loss_fn)
    engine.run(inputs, targets)
    hard = engine.run(inputs, (targets + 1) % 4)
    assert not isinstance(hard.weighted_sum.__self__._raw, HeldGradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_that_are_not_finite_are_compared_place_by_place(dtype: torch.dtype) -> None:
    rows = torch.ones(40_000, dtype=dtype)
    rows[20_000] = torch.nan
    other, moved, further = rows.clone(), rows.roll(1), rows.clone()
    further[39_999] = 2.0
    first = {"weight": folded(rows, 5)}
    assert alike(first, {"weight": folded(other, 5)}, 1e-6)
    assert not alike(first, {"weight": folded(moved, 5)}, 1e-6)
    assert not alike(first, {"weight": folded(further, 5)}, 1e-3)
    assert not alike(first, {}, 1e-3)
