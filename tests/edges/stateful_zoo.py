"""Models and losses that keep state of the records they saw, or whose state somebody writes between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from zoo_training import CLASSES, FEATURES, Case, entropy, mlp


class _ClassWeights:
    """Weights of classes from the labels seen so far."""

    def __init__(self) -> None:
        self.counts = torch.ones(CLASSES)

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.counts += torch.bincount(y, minlength=CLASSES)
        return entropy(out, y) * (self.counts.sum() / self.counts)[y].to(out.dtype)


def class_weights_seen() -> Case:
    return Case(mlp(), _ClassWeights())


class _RunningMean(nn.Module):
    """Centres by a running mean that is kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = mlp(), torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean.to(x.dtype)
        if self.training and len(x) > 4:
            self.mean = 0.99 * self.mean + 0.01 * x.detach().float().mean(0)
        return self.body(centred)


def running_mean_attribute() -> Case:
    return Case(_RunningMean(), entropy)


def _with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)).eval()


def batch_norm_look() -> Case:
    """Between two steps the model looks at the data in train mode."""
    model = _with_norm()

    def look(step: int, inputs: Tensor) -> None:
        if step == 40:
            model.train()(inputs)
            model.eval()

    return Case(model, entropy, between=look)


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("shift", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x - self.shift)


def buffer_by_hand() -> Case:
    """A buffer that no state_dict holds is set to the mean of the data, through ``.data``."""
    model = _Shifted()

    def write(step: int, inputs: Tensor) -> None:
        if step == 60:
            model.shift.data.copy_(inputs.mean(0))

    return Case(model, entropy, between=write)


def buffer_exchanged() -> Case:
    """A buffer is replaced by another tensor."""
    model = _Shifted()

    def write(step: int, inputs: Tensor) -> None:
        if step == 60:
            model.shift = inputs.mean(0)

    return Case(model, entropy, between=write)


def frozen_weights_written() -> Case:
    """A frozen layer is fitted to the data between steps, through ``.data``."""
    model = mlp()
    model[0].requires_grad_(False)

    def write(step: int, inputs: Tensor) -> None:
        if step == 30:
            model[0].bias.data.sub_(inputs.mean() + 0.1)

    return Case(model, entropy, between=write)


def memory_bank() -> Case:
    """Outputs of earlier batches serve as negatives."""
    bank: deque[Tensor] = deque(maxlen=4)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = entropy(out, y)
        if bank:
            value = value + 0.1 * (out @ torch.cat(list(bank)).t().to(out.dtype)).logsumexp(1)
        bank.append(out.detach().float())
        return value

    return Case(mlp(), loss)


class _Centred:
    """A teacher's centre: a running mean of outputs that is subtracted."""

    centre: Any

    def __init__(self) -> None:
        self.centre = np.zeros(CLASSES)

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        value = entropy(out - torch.as_tensor(self.centre, dtype=out.dtype), y)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().double().mean(0).numpy()
        return value


def running_centre() -> Case:
    return Case(mlp(), _Centred())


def baseline_in_a_list() -> Case:
    """The mean loss of the batch before is a baseline, kept in a list that the loss closes over."""
    history = [0.0]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = entropy(out, y)
        baseline = history[-1]
        history.append(float(value.detach().mean()))
        return (value - 0.5 * baseline).abs()

    return Case(mlp(), loss)


def function_attribute() -> Case:
    """A running scale is kept as an attribute of the loss function."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = entropy(out, y)
        loss.scale = 0.9 * loss.scale + 0.1 * float(value.detach().mean())  # type: ignore[attr-defined]
        return value / loss.scale  # type: ignore[attr-defined]

    loss.scale = 1.0  # type: ignore[attr-defined]
    return Case(mlp(), loss)


class _Late(nn.Module):
    """Centres over the batch from its 120th pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x - x.mean(0) if self.calls > 120 and len(x) > 4 else x)


def late_centring() -> Case:
    return Case(_Late(), entropy)


class _Prior(nn.Module):
    """Logits are adjusted by a running prior, kept as a buffer of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prior", torch.full((CLASSES,), 1 / CLASSES))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        seen = torch.bincount(y, minlength=CLASSES) / len(y)
        value = entropy(out + self.prior.log().to(out.dtype), y)
        self.prior.mul_(0.95).add_(0.05 * seen)
        return value


def prior_in_the_loss() -> Case:
    return Case(mlp(), _Prior())


def statistics_in_a_hook() -> Case:
    """A forward hook keeps a running mean of activations, which the loss reads."""
    model, kept = mlp(), {"mean": torch.zeros(16)}

    def note(_: nn.Module, __: Any, out: Tensor) -> None:
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * out.detach().float().mean(0)

    model[0].register_forward_hook(note)
    return Case(model, lambda out, y: entropy(out, y) * (1 + kept["mean"].norm().to(out.dtype)))


def weights_written() -> Case:
    """Trained weights are moved by the data between steps, through ``.data``: stated, as before for other writes."""
    model = mlp()

    def write(step: int, inputs: Tensor) -> None:
        if step == 77:
            model[2].bias.data.add_(inputs.mean())

    return Case(model, entropy, between=write, stated=True)


_CASES = (
    class_weights_seen,
    running_mean_attribute,
    batch_norm_look,
    buffer_by_hand,
    buffer_exchanged,
    frozen_weights_written,
    memory_bank,
    running_centre,
    baseline_in_a_list,
    function_attribute,
    late_centring,
    prior_in_the_loss,
    statistics_in_a_hook,
    weights_written,
)
STATEFUL: dict[str, Callable[[], Case]] = {make.__name__: make for make in _CASES}
