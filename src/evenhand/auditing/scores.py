"""Score every canary by what a training released: high where it seems to be in.

Scores are functions of what was released, of the plan, and of the canaries; coins never enter. Any such function is
allowed in a bound: a clumsy one shows less, never too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenhand.accounting.plan import Plan
from evenhand.auditing.canaries import Canaries, WithProbe
from evenhand.data.dataset import Data
from evenhand.gradients.batch_utils import WithLoss, take
from evenhand.gradients.engine import per_sample
from evenhand.training.losses import Loss

Vector = NDArray[np.float64]
_CHUNK = 512
_CENTRED = 2048
"""Records of which the mean gradient is taken out of what was released."""


class Score(Protocol):
    """A score that looks on while a model is trained."""

    def see(self, plan: Plan, position: int) -> None:
        """Look at the private gradient of step ``position``, which parameters carry, and at the weights before it."""

    def values(self) -> Vector:
        """Return a score for every canary, after the last step."""


def watched(optimizer: torch.optim.Optimizer, score: Score, plan: Plan) -> torch.optim.Optimizer:
    """Return the optimizer, which shows the score what it is given: private gradients and iterates, nothing else."""
    position = iter(range(plan.steps))
    optimizer.register_step_pre_hook(lambda *_: score.see(plan, next(position)))
    return optimizer


def log_likelihood(signal: Vector, size: Vector, noise: Vector, rate: Vector) -> Vector:
    """Return the log-likelihood ratio of "in" over "out" for a canary that is sampled at ``rate``.

    Args:
      signal: inner product of the noisy sum with the canary's gradient.
      size: norm of that gradient.
      noise: standard deviation of the noise.
      rate: with which the canary, if it is in, is in the batch.

    Examples:
      >>> one = np.ones(1)
      >>> [log_likelihood(x * one, one, one, rate * one).round(2).item() for x, rate in ((0.5, 1.0), (3.0, 0.5))]
      [0.0, 1.89]
    """
    with np.errstate(divide="ignore"):
        exponent = (signal - size**2 / 2) / noise**2
        ratio: Vector = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    return ratio


class ProbeScore:
    """Read each gradient canary's own number: out of every private gradient, or out of the last weights alone."""

    def __init__(self, model: WithProbe, canaries: Canaries, *, last: bool) -> None:
        self._probe, self._canaries, self._last = model.probe.weight, canaries, last
        self._total = np.zeros(len(canaries))

    def see(self, plan: Plan, position: int) -> None:
        """Add the log-likelihood ratio of this step's private gradient."""
        if self._last:
            return
        assert self._probe.grad is not None
        level, owner = plan.level_at(position), self._canaries.owner
        size = level.bound * np.asarray(plan.scales)[owner]
        noisy = self._probe.grad[1:, 0].detach().double().numpy() * plan.expected_batch
        noise, rate = np.full(len(owner), level.noise * level.bound), np.asarray(plan.rates)[owner]
        self._total += log_likelihood(noisy * size, size, noise, rate)

    def values(self) -> Vector:
        """Return the sum over steps; of the last weights, how far descent has moved the numbers."""
        if not self._last:
            return self._total
        return -self._probe.detach()[1:, 0].double().numpy()


class GradientScore:
    """Compare every private gradient with each input canary's own gradient at the weights of that step.

    What the records and the other canaries are expected to add is taken out first: the attacker knows them all, but not
    the coins.
    """

    def __init__(self, model: nn.Module, loss: Loss, data: Data, canaries: Canaries, records: Any) -> None:
        self._model, self._loss, self._canaries = model, loss, canaries
        self._both = WithLoss(model, loss)
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._inputs, self._targets = records(torch.arange(len(canaries)))
        some = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:_CENTRED].sort().values
        self._others, self._owner = data.fetch(some), data.owner[some].long()
        self._weight = len(data) / max(1, len(some))
        self._total = np.zeros(len(canaries))

    def see(self, plan: Plan, position: int) -> None:
        """Add the log-likelihood ratio of this step's private gradient, with the noise that the scores show."""
        level, owner = plan.level_at(position), self._canaries.owner
        gradients = {name: value.grad for name, value in self._parameters.items() if value.grad is not None}
        released = {name: value.double() * plan.expected_batch for name, value in gradients.items()}
        rates, scales = (torch.tensor(column, dtype=torch.float64) for column in (plan.rates, plan.scales))
        with still(self._model):
            norms = self._take_out(released, self._others, self._owner, self._weight, rates, level.bound * scales)
            kind = torch.from_numpy(owner)
            canaries = (self._inputs, self._targets)
            norms = self._take_out(released, canaries, kind, 0.5, rates, level.bound * scales)
            slopes = self._slopes({name: value.float() for name, value in released.items()})
        size = np.minimum(norms.numpy(), level.bound * np.asarray(plan.scales)[owner])
        clipped = np.divide(size, norms.numpy(), out=np.zeros_like(size), where=norms.numpy() > 0)
        rate = np.asarray(plan.rates)[owner]
        signal = slopes * clipped + rate * size**2 / 2  # its own expected part was taken out with the others'
        usable = np.isfinite(signal) & (size > 0)
        spread = float(np.std(signal[usable] / size[usable])) if usable.any() else 0.0
        noise = np.full(len(owner), max(level.noise * level.bound, spread))
        ratio = log_likelihood(np.where(usable, signal, 0.0), np.where(usable, size, 0.0), noise, rate)
        self._total += np.where(usable, ratio, 0.0)

    def values(self) -> Vector:
        """Return the sum over steps."""
        return self._total

    def _take_out(
        self,
        released: dict[str, Tensor],
        records: tuple[Any, Any],
        owner: Tensor,
        weight: float,
        rates: Tensor,
        bounds: Tensor,
    ) -> Tensor:
        """Subtract what clipped records add in expectation, ``weight`` times; return the norms of their gradients."""
        result = per_sample(self._model, self._loss, *records)
        norm = result.norm.double()
        factors = torch.minimum(torch.ones_like(norm), bounds[owner] / norm.clamp(min=1e-300)) * rates[owner] * weight
        for name, value in result.weighted_sum(torch.nan_to_num(factors)).items():
            released[name] -= value.double()
        return norm

    def _slopes(self, direction: dict[str, Tensor]) -> Vector:
        """Return the inner product of every canary's gradient with a direction, by a derivative of a derivative.

        The gradient of a weighted sum of losses, multiplied with the direction, has these products as its slopes in the
        weights.
        """
        trained, parts = [self._parameters[name] for name in direction], list[Tensor]()
        for start in range(0, len(self._canaries), _CHUNK):
            rows = slice(start, start + _CHUNK)
            with torch.enable_grad():
                loss = self._both(take(self._inputs, rows), take(self._targets, rows))
                weights = torch.ones_like(loss, requires_grad=True)
                gradients = torch.autograd.grad((weights * loss).sum(), trained, create_graph=True, allow_unused=True)
                pairs = zip(gradients, direction.values(), strict=True)
                along = sum([(one * other).sum() for one, other in pairs if one is not None], torch.zeros(()))
                parts += torch.autograd.grad(along, [weights])
        return torch.cat(parts).double().numpy()


class LossScore:
    """Look at the first and the last weights only: canaries that the model learned have lost the more."""

    def __init__(self, model: nn.Module, loss: Loss, records: Any, count: int) -> None:
        self._both = WithLoss(model, loss)
        self._inputs, self._targets = records(torch.arange(count))
        self._before = self._losses()

    def see(self, plan: Plan, position: int) -> None:
        """Look at nothing: iterates stay hidden from this attacker."""

    def values(self) -> Vector:
        """Return how much each canary's loss has fallen."""
        return self._before - self._losses()

    def _losses(self) -> Vector:
        parts = []
        with still(self._both.model), torch.no_grad():
            for start in range(0, len(self._targets), _CHUNK):
                rows = slice(start, start + _CHUNK)
                parts.append(self._both(take(self._inputs, rows), take(self._targets, rows)).double())
        return torch.cat(parts).numpy()


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Evaluate a model inside the block: no dropout is drawn, and modes and generators are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
