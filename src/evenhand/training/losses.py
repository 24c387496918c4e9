"""Losses with one value per record, by name: a mean over the batch would let one record change the others' gradients.

A loss is a frozen dataclass that is called as ``loss(outputs, targets)``. Several values of one record (labels, places
of a sequence) are averaged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand import _validate
from evenhand.errors import DataError, UsageError
from evenhand.gradients.batch_utils import call, logits
from evenhand.methods.priors import Prior

if TYPE_CHECKING:
    from evenhand.data import Data

Loss: TypeAlias = Callable[[Any, Any], Tensor]


class LogitLoss:
    """A loss of logits: of what a model returns it is given the scores, see ``batch_utils.logits``."""

    reads_logits = True


@dataclass(frozen=True)
class CrossEntropy(LogitLoss):
    """``-log p`` of the true class; ``smoothing`` mixes that with the mean over all classes (label smoothing).

    Examples:
      >>> CrossEntropy()(torch.zeros(2, 4), torch.tensor([0, 3]))
      tensor([1.3863, 1.3863])
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _validate.number(self.smoothing, "smoothing", low=0, high=1, open_low=False)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per record."""
        words = by_word(outputs, targets)
        return _within(functional.cross_entropy(words, targets, reduction="none", label_smoothing=self.smoothing))

    @property
    def as_torch(self) -> nn.CrossEntropyLoss:
        """Return torch's equal loss for records with one label: the engine recognises it."""
        return _as_torch(self.smoothing)


@dataclass(frozen=True)
class Focal(LogitLoss):
    """``-alpha (1 - p)^gamma log p`` of the true class: records that fit well count less (Lin et al. 2017).

    With ``gamma`` 0 this is cross-entropy times ``alpha``.

    Examples:
      >>> Focal(gamma=2)(torch.zeros(1, 2), torch.tensor([0]))  # 0.25 * log 2
      tensor([0.1733])
    """

    gamma: float = 2.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _validate.number(self.gamma, "gamma", low=0, open_low=False)
        _validate.number(self.alpha, "alpha", low=0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per record."""
        unlikely = functional.cross_entropy(by_word(outputs, targets), targets, reduction="none")
        # 1 - p as -expm1(log p) keeps its digits where p is close to 1; the floor keeps the power differentiable there.
        rest = (-torch.expm1(-unlikely)).clamp(min=torch.finfo(unlikely.dtype).tiny)
        return _within(self.alpha * rest**self.gamma * unlikely)


@dataclass(frozen=True)
class Binary(LogitLoss):
    """Binary cross-entropy of logits, averaged over a record's outputs.

    Targets are 0 or 1 for every output (one or several labels), or class numbers: then every class against the rest.

    Examples:
      >>> Binary()(torch.zeros(2, 3), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
      tensor([0.6931, 0.6931])
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per record."""
        if not targets.is_floating_point() and outputs.dim() == 2 and outputs.shape[1] > 1 and targets.dim() == 1:
            wanted = (targets.unsqueeze(1) == torch.arange(outputs.shape[1], device=targets.device)).to(outputs.dtype)
        else:
            wanted = targets.to(outputs.dtype).reshape(outputs.shape)
        return _within(functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none"))


@dataclass(frozen=True)
class MeanSquared(LogitLoss):
    """Squared error, averaged over a record's outputs.

    Examples:
      >>> MeanSquared()(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]))
      tensor([1., 4.])
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per record."""
        if outputs.numel() != targets.numel():
            raise DataError(
                f"The targets are real numbers of shape {tuple(targets.shape[1:])} a record, and the model gives "
                f"{tuple(outputs.shape[1:])}: give it one output for each number (1 for a single one). If they are "
                "classes, pass whole numbers, y.long()."
            )
        return _within((outputs.reshape(targets.shape) - targets).square())


@dataclass(frozen=True)
class ClassWeighted(LogitLoss):
    """Another loss times a fixed weight of the record's class.

    Weights are public numbers that you choose; taken from the private labels they would leak. A weighted MEAN, which
    divides by the weights in the batch, couples records and is not offered.

    Examples:
      >>> ClassWeighted([1, 10])(torch.zeros(2, 2), torch.tensor([0, 1]))
      tensor([0.6931, 6.9315])
    """

    weights: Sequence[float]
    loss: str | Loss = field(default="cross_entropy")

    def __post_init__(self) -> None:
        if not isinstance(self.weights, list | tuple) or not self.weights:
            raise UsageError("weights must be a list with one number per class, for example weights=[1,5].")
        object.__setattr__(self, "weights", tuple(_validate.number(w, "weights", low=0) for w in self.weights))
        object.__setattr__(self, "loss", named(self.loss))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per record."""
        if outputs.dim() != 2 or outputs.shape[1] != len(self.weights):
            raise UsageError(
                f"There are {len(self.weights)} class weights, but the model has other outputs: give one weight per "
                "class, in the order of the labels."
            )
        values = named(self.loss)(outputs, targets)
        return torch.tensor(self.weights, dtype=values.dtype, device=values.device)[targets] * values


@dataclass(frozen=True)
class LogitAdjusted(LogitLoss):
    """Cross-entropy of ``outputs + tau * log prior``: rare labels must be told with a margin (Menon et al. 2021).

    The offsets are constants, so a record's loss depends on that record alone. ``prior`` is a ``Prior`` (noisy counts
    that were charged, or declared ones), or counts or shares that are publicly known; counts taken from private labels
    would leak. With several labels per record, or a single output for two classes, it is binary cross-entropy with log
    odds as offsets. A prior by group is pooled: the group belongs to the decision, see ``goals``.

    Examples:
      >>> LogitAdjusted([3, 1], tau=1)(torch.zeros(2, 2), torch.tensor([0, 1]))  # -log(3/4), -log(1/4)
      tensor([0.2877, 1.3863])
    """

    prior: Prior | Sequence[float]
    tau: float = 1.0

    def __post_init__(self) -> None:
        _validate.number(self.tau, "tau", low=0, open_low=False)
        if not isinstance(self.prior, Prior):
            object.__setattr__(self, "prior", Prior.declared(self.prior))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per record."""
        if self._several or (outputs.numel() == targets.numel() and len(self.offsets) == 2):
            row = self._row(outputs)
            return Binary()(outputs + (row if self._several else row[1] - row[0]), targets)
        words = by_word(outputs, targets)
        if words.dim() < 2 or words.shape[1] != len(self.offsets):
            raise UsageError(
                f"The prior has {len(self.offsets)} labels, but the model has other outputs: give one count per label, "
                "in the order of the labels."
            )
        row = self._row(words).reshape(1, -1, *[1] * (words.dim() - 2))
        return _within(functional.cross_entropy(words + row, targets, reduction="none"))

    @property
    def offsets(self) -> tuple[float, ...]:
        """Return the constants that are added to the outputs, one per label: the engine adds them by itself."""
        assert isinstance(self.prior, Prior)
        return _offsets(self.prior, self.tau)

    @property
    def as_torch(self) -> nn.Module | None:
        """Return torch's equal loss of outputs with the offsets, for records with one label; None for several."""
        return None if self._several else _as_torch(0.0)

    @property
    def _several(self) -> bool:
        return isinstance(self.prior, Prior) and self.prior.kind == "each label"

    def _row(self, outputs: Tensor) -> Tensor:
        return torch.tensor(self.offsets, dtype=outputs.dtype, device=outputs.device)


LOSSES: dict[str, type[CrossEntropy | Focal | Binary | MeanSquared | ClassWeighted | LogitAdjusted]] = {
    "cross_entropy": CrossEntropy,
    "focal": Focal,
    "binary": Binary,
    "mse": MeanSquared,
    "class_weighted": ClassWeighted,
    "logit_adjusted": LogitAdjusted,
}


def named(loss: str | Loss) -> Loss:
    """Return the loss that a name with settings stands for; a function is returned as it is.

    Examples:
      >>> named("focal:gamma=1,alpha=0.5")
      Focal(gamma=1, alpha=0.5)
      >>> named("class_weighted:weights=[1,5],loss=focal")
      ClassWeighted(weights=(1.0, 5.0), loss=Focal(gamma=2.0, alpha=1.0))
    """
    if not isinstance(loss, str):
        return loss
    name, _, rest = loss.partition(":")
    kind = LOSSES[_validate.known(name, LOSSES, "loss")]
    settings: dict[str, Any] = {}
    for entry in re.split(r",(?![^\[]*\])", rest) if rest else []:
        key, equals, value = entry.partition("=")
        if not equals:
            raise UsageError(f"A loss takes NAME:KEY=VALUE,KEY=VALUE, for example focal:gamma=2; {name!r} has more.")
        settings[_validate.known(key, [f.name for f in fields(kind)], f"setting of the loss {name}")] = _value(value)
    for needed in ("weights", "prior"):
        if needed in (f.name for f in fields(kind)) and not isinstance(settings.get(needed), list):
            raise UsageError(f"The loss {name} needs {needed}: {name}:{needed}=[1,5] for two classes.")
    return kind(**settings)


def by_word(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs with the classes in the second place, as torch wants them.

    A language model gives (record, place, word). Torch's (record, word, place) is taken only where it cannot be that:
    with as many places as words outputs are read as (record, place, word). Losses and metrics both read them here.

    Examples:
      >>> tokens = torch.zeros(2, 5, dtype=torch.long)
      >>> by_word(torch.zeros(2, 5, 9), tokens).shape, by_word(torch.zeros(2, 9, 5), tokens).shape
      (torch.Size([2, 9, 5]), torch.Size([2, 9, 5]))
    """
    if targets.dim() > 1 and outputs.shape[:-1] == targets.shape:
        return outputs.movedim(-1, 1)
    return outputs


def default_loss(data: Data, model: nn.Module | None = None) -> Loss:
    """Return cross-entropy for classes, binary cross-entropy for several labels, squared error for real numbers.

    A ``model`` with a single output for two classes gets binary cross-entropy.

    Examples:
      >>> import evenhand as eh
      >>> default_loss(eh.data.digits()[0])
      CrossEntropy(smoothing=0.0)
    """
    parameters = () if model is None else model.parameters()
    inputs, targets = data.on(next((p.device for p in parameters), torch.device("cpu"))).fetch(torch.arange(1))
    if targets.is_floating_point():
        return Binary() if targets.dim() == 2 and data.facts.labels else MeanSquared()
    if model is not None and targets.dim() == 1 and _single(model, inputs):
        if (labels := len(data.facts.labels)) > 2:
            raise UsageError(f"The model has one output, and there are {labels} labels: give it one output per label.")
        return Binary()
    return CrossEntropy()


def _single(model: nn.Module, inputs: Any) -> bool:
    """Return whether the model has one output per record; False if it cannot take the inputs, which others tell."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return logits(call(model, inputs)).numel() == 1
    except Exception:  # whatever a user's model raises: the probe names it with its own words
        return False
    finally:
        model.train(was_training)


@cache
def _as_torch(smoothing: float) -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(reduction="none", label_smoothing=smoothing)


@lru_cache(64)
def _offsets(prior: Prior, tau: float) -> tuple[float, ...]:
    return tuple(tau * offset for offset in prior.pooled().offsets()[0])


def _within(values: Tensor) -> Tensor:
    """Return one value per record: the mean of all values within it."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)


def _value(text: str) -> Any:
    """Return a setting as JSON, else as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError("A setting of a loss must be a finite number.")
    return value
