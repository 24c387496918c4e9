"""Train many linear models on the same draws of batches: one pass over the rows gives the outputs of all of them.

Weights by the method's rule, queries, and the size and making of the noise are the library's own. Only gradients are
summed here, for linear models on fixed features, where a record's gradient is the outer product of its features and the
slopes of its loss: ``tests/experiments`` compares a whole step with the library's. Nothing is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.mechanism.add_noise import release_rows
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.release_counts import release_counts
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import GradientNoise, Mechanism, Weighed, conclude, noise_for, weigh
from evenhand.methods.priors import Prior
from evenhand.training.optimizers import AdamBC, Descent
from evenhand.training.weight_average import EMA, Average
from evenhand.types import Batch, Pass


@dataclass(frozen=True)
class Recipe:
    """One model to train: its plan and method, optimizer and rate, the offset in its loss, and the average's decay."""

    plan: Any
    method: Any
    optimizer: str
    rate: float
    tau: float
    average: float


@dataclass(frozen=True)
class Trained:
    """The averaged model of a recipe, the noisy counts that it released, and the epsilon of both together."""

    model: nn.Linear
    prior: Prior
    spent: float


class _Learner:
    """One model in training."""

    def __init__(self, recipe: Recipe, stream: Stream, data: eh.data.Data, width: int) -> None:
        plan = recipe.plan
        self.recipe, self.mechanism = recipe, Mechanism(plan, recipe.method.rule, recipe.method.queries, stream)
        counts = release_counts(plan, stream, data)
        self.prior = Prior(counts.counts, counts.std, counts.kind, len(data))
        self.offset = recipe.tau * torch.tensor(self.prior.offsets()[0], dtype=torch.float32)
        self.model = nn.Linear(width, len(data.facts.labels))
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        built = Descent(recipe.optimizer, recipe.rate, None, None, "linear").build(self.model, plan.steps)
        self.optimizer, self._schedule = built
        self._memory, self._average = recipe.method.rule.initial(plan.facts), Average(self.model, EMA(recipe.average))

    def weigh(self, batch: Batch, outputs: Tensor, lengths: Tensor) -> tuple[Weighed, Tensor]:
        """Return the weights of the rows by the method's rule, and the slopes of their losses times these weights."""
        loss, slopes = slopes_of(outputs + self.offset, batch.targets)
        seen = Pass(loss, slopes.norm(dim=1) * lengths, _not_summed)
        weighed = weigh(self.mechanism, seen, batch, self._memory)
        return weighed, slopes * weighed.weights.to(slopes.dtype).unsqueeze(1)

    def update(self, position: int, gradient: Tensor, weighed: Weighed, noise: GradientNoise) -> None:
        """Let the optimizer take one step along a private gradient: all weights, then the biases, in one row."""
        if self._schedule is not None:
            self._schedule.go_to(position)
        self._memory, commit = conclude(self.mechanism, weighed, noise)
        size = self.model.weight.numel()
        self.model.weight.grad = gradient[:size].view_as(self.model.weight).float()
        self.model.bias.grad = gradient[size:].float()
        if isinstance(self.optimizer, AdamBC):
            self.optimizer.see_noise(commit.std / self.recipe.plan.expected_batch)
        self.optimizer.step()
        self._average.update()

    def finish(self) -> Trained:
        """Return the averaged model."""
        self._average.apply()
        return Trained(self.model, self.prior, self.recipe.plan.epsilons[0])


def _not_summed(weights: Tensor) -> dict[str, Tensor]:
    raise RuntimeError("The gradients of all models are summed together.")


def slopes_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row, and its slopes by the outputs.

    The gradient of a linear model is, for each row, the outer product of slopes and inputs (with a 1 for the bias), so
    that its norm is the product of their norms.
    """
    logs, rows = outputs.log_softmax(1), torch.arange(len(targets))
    slopes = logs.exp()
    slopes[rows, targets] -= 1.0
    return -logs[rows, targets], slopes


def step_together(learners: Sequence[_Learner], batch: Batch, position: int) -> None:
    """Make one private step of every model: two products for all of them, the rest model by model."""
    inputs = batch.inputs
    lengths = (inputs.square().sum(1) + 1.0).sqrt()
    weights = torch.cat([learner.model.weight.detach() for learner in learners])
    outputs = torch.addmm(torch.cat([learner.model.bias.detach() for learner in learners]), inputs, weights.T)
    parts = outputs.chunk(len(learners), 1)
    weighed = [learner.weigh(batch, part, lengths) for learner, part in zip(learners, parts, strict=True)]
    scaled = torch.cat([slopes for _, slopes in weighed], 1)
    sums = torch.cat([(scaled.T @ inputs).view(len(learners), -1), scaled.sum(0).view(len(learners), -1)], 1).double()
    noises = [
        noise_for(learner.mechanism, one, sums.shape[1]) for learner, (one, _) in zip(learners, weighed, strict=True)
    ]
    release_rows(
        sums,
        [noise.std for noise in noises],
        [noise.spacing for noise in noises],
        [learner.mechanism.normals for learner in learners],
        position,
        [learner.recipe.plan.expected_batch for learner in learners],
    )
    for learner, gradient, (one, _), noise in zip(learners, sums, weighed, noises, strict=True):
        learner.update(position, gradient, one, noise)


def train_together(recipes: Sequence[Recipe], seed: int, data: eh.data.Data) -> list[Trained]:
    """Return the trained models; all recipes must sample alike, so that one draw of batches serves them all."""
    stream, first = Stream.insecure(seed, 0), recipes[0].plan
    if any((r.plan.rates, r.plan.steps) != (first.rates, first.steps) for r in recipes):
        raise ValueError("The recipes sample differently: train them apart.")
    width = data.fetch(torch.arange(1))[0].shape[1]
    learners = [_Learner(recipe, stream, data, width) for recipe in recipes]
    sampler = PoissonSampler(data.owner, first.rates, stream)
    for position in range(first.steps):
        step_together(learners, draw(data, sampler, position, 0), position)
    return [learner.finish() for learner in learners]
