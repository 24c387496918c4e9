"""Train many linear models on the same draws of batches: one pass over the rows gives the outputs of all of them.

A private step is the library's own: weights by the method's rule, queries, noise. Only the pass is made here, for
linear models on fixed features, where the gradient of a record is the outer product of its features and the slope of
its loss: ``tests/experiments`` compares it with the gradient engine. Float sums are plain here; nothing is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.release_counts import release_counts
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.methods.priors import Prior
from evenhand.training.optimizers import AdamBC, Descent
from evenhand.training.weight_average import EMA, Average
from evenhand.types import Pass


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

    def step(self, position: int, batch: Any, outputs: Tensor, lengths: Tensor) -> None:
        """Make one private step from the outputs of all rows of the batch."""
        if self._schedule is not None:
            self._schedule.go_to(position)
        result = linear_pass(batch.inputs, batch.targets, outputs + self.offset, lengths)
        released = private_gradient(self.mechanism, result, batch, self._memory)
        self._memory = released.memory
        for name, parameter in self.model.named_parameters():
            parameter.grad = released.gradient[name].to(parameter.dtype)
        if isinstance(self.optimizer, AdamBC):
            self.optimizer.see_noise(released.commit.std / self.recipe.plan.expected_batch)
        self.optimizer.step()
        self._average.update()

    def finish(self) -> Trained:
        """Return the averaged model."""
        self._average.apply()
        return Trained(self.model, self.prior, self.recipe.plan.epsilons[0])


def linear_pass(inputs: Tensor, targets: Tensor, outputs: Tensor, lengths: Tensor) -> Pass:
    """Return the pass of a linear model with cross-entropy: losses, gradient norms, and weighted sums on demand.

    ``lengths`` are the norms of the rows with a 1 for the bias.
    """
    logs = outputs.log_softmax(1)
    rows = torch.arange(len(targets))
    slopes = logs.exp()
    slopes[rows, targets] -= 1.0

    def weighted_sum(weights: Tensor) -> dict[str, Tensor]:
        scaled = slopes * weights.to(slopes.dtype).unsqueeze(1)
        return {"weight": scaled.T @ inputs, "bias": scaled.sum(0)}

    return Pass(loss=-logs[rows, targets], norm=slopes.norm(dim=1) * lengths, weighted_sum=weighted_sum)


def train_together(recipes: Sequence[Recipe], seed: int, data: eh.data.Data) -> list[Trained]:
    """Return the trained models; all recipes must sample alike, so that one draw of batches serves them all."""
    stream, first = Stream.insecure(seed, 0), recipes[0].plan
    if any((r.plan.rates, r.plan.steps) != (first.rates, first.steps) for r in recipes):
        raise ValueError("The recipes sample differently: train them apart.")
    width = data.fetch(torch.arange(1))[0].shape[1]
    learners = [_Learner(recipe, stream, data, width) for recipe in recipes]
    sampler = PoissonSampler(data.owner, first.rates, stream)
    for position in range(first.steps):
        batch = draw(data, sampler, position, 0)
        lengths = (batch.inputs.square().sum(1) + 1.0).sqrt()
        weights = torch.cat([learner.model.weight.detach() for learner in learners])
        outputs = torch.addmm(torch.cat([learner.model.bias.detach() for learner in learners]), batch.inputs, weights.T)
        for learner, part in zip(learners, outputs.chunk(len(learners), 1), strict=True):
            learner.step(position, batch, part, lengths)
    return [learner.finish() for learner in learners]
