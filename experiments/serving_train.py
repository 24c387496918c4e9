"""Train many linear models on the same draws of batches: one pass over the rows gives the outputs of all of them.

Weights by the method's rule, queries, and the size and making of the noise are the library's own. Only gradients are
summed here, for linear models on fixed features, where a record's gradient is the outer product of its features and the
slopes of its loss: ``tests/experiments`` compares a whole step with the library's. Nothing is released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from evenhand.training.optimizers import MOMENTUM, AdamBC, Descent
from evenhand.training.weight_average import EMA
from evenhand.types import Batch, Pass

EXACT = 2.0**-40
"""Grid of a sum that gets no noise: far below what float32 tells apart."""


@dataclass(frozen=True)
class Recipe:
    """One model to train: its plan and method, optimizer and rate, the offset in its loss, and the average's decay.

    Without counts of labels in the plan there is no offset; with ``average`` 0 the last weights count.
    """

    plan: Any
    method: Any
    optimizer: str
    rate: float
    tau: float = 0.0
    average: float = 0.0
    momentum: float | None = None
    schedule: str = "linear"

    @property
    def stacked(self) -> bool:
        """Return whether this is plain SGD, whose steps are made for all such models at once."""
        return self.optimizer == "sgd" and self.schedule in ("linear", "constant")


@dataclass(frozen=True)
class Trained:
    """The averaged model of a recipe, the noisy counts that it released, and the largest epsilon of both together."""

    model: nn.Linear
    prior: Prior | None
    spent: float | None


class Learner:
    """One model in training: ``model`` has the present weights, ``memory`` what its rule knows from earlier steps.

    ``weights`` is the memory of its weights, then biases; the caller owns it.
    """

    def __init__(self, recipe: Recipe, stream: Stream, data: eh.data.Data, weights: Tensor) -> None:
        plan, labels = recipe.plan, len(data.facts.labels)
        self.recipe, self.mechanism = recipe, Mechanism(plan, recipe.method.rule, recipe.method.queries, stream)
        self.prior = None if plan.prior is None else _prior(plan, stream, data)
        offsets = [0.0] * labels if self.prior is None else self.prior.offsets()[0]
        self.offset = recipe.tau * torch.tensor(offsets, dtype=torch.float32)
        size = weights.numel() - labels
        self.model = nn.Linear(size // labels, labels)
        self.model.weight = nn.Parameter(weights[:size].view(labels, -1))
        self.model.bias = nn.Parameter(weights[size:])
        self.memory = recipe.method.rule.initial(plan.facts)
        self._optimizer = None
        if not recipe.stacked:
            descent = Descent(recipe.optimizer, recipe.rate, recipe.momentum, None, recipe.schedule)
            self._optimizer, self._schedule = descent.build(self.model, plan.steps)

    def weigh(self, batch: Batch, loss: Tensor, norm: Tensor) -> Weighed:
        """Return the weights of the rows by the method's rule."""
        return weigh(self.mechanism, Pass(loss, norm, _not_summed), batch, self.memory)

    def update(self, position: int, gradient: Tensor, weighed: Weighed, noise: GradientNoise) -> None:
        """Let the optimizer, if it is one of torch's, take a step along a private gradient; then the rule's memory."""
        self.memory, commit = conclude(self.mechanism, weighed, noise)
        if self._optimizer is None:
            return
        if self._schedule is not None:
            self._schedule.go_to(position)
        size = self.model.weight.numel()
        self.model.weight.grad = gradient[:size].view_as(self.model.weight).float()
        self.model.bias.grad = gradient[size:].float()
        if isinstance(self._optimizer, AdamBC):
            self._optimizer.see_noise(commit.std / self.recipe.plan.expected_batch)
        self._optimizer.step()


class Team:
    """Models in training on the same draws: their weights are the rows of one matrix."""

    def __init__(self, recipes: Sequence[Recipe], stream: Stream, data: eh.data.Data) -> None:
        width, labels = data.fetch(torch.arange(1))[0].shape[1], len(data.facts.labels)
        self.weights = torch.zeros(len(recipes), labels * (width + 1))
        self.learners = [Learner(recipe, stream, data, row) for recipe, row in zip(recipes, self.weights, strict=True)]
        self._speed = torch.zeros_like(self.weights)
        self._stacked = torch.tensor([float(recipe.stacked) for recipe in recipes]).unsqueeze(1)
        kept = [MOMENTUM["sgd"] if recipe.momentum is None else recipe.momentum for recipe in recipes]
        self._momentum = torch.tensor(kept).unsqueeze(1)
        self._means = [EMA(recipe.average) if recipe.average else None for recipe in recipes]
        self._average, self._updates = self.weights.double(), 0
        parts = [data.fetch(rows)[0] for rows in torch.arange(len(data)).split(4096)]
        self._lengths = torch.cat([(inputs.square().sum(1) + 1.0).sqrt() for inputs in parts])

    def step(self, batch: Batch, position: int) -> None:
        """Make one private step of every model: two products for all of them, the rules one by one."""
        inputs, count = batch.inputs, len(self.learners)
        labels = self.learners[0].model.out_features
        lengths, size = self._lengths[batch.record], labels * inputs.shape[1]
        matrix = self.weights[:, :size].reshape(count * labels, -1)
        outputs = torch.addmm(self.weights[:, size:].reshape(-1), inputs, matrix.T).view(-1, count, labels)
        loss, slopes = slopes_of(outputs + torch.stack([learner.offset for learner in self.learners]), batch.targets)
        norms = slopes.norm(dim=2) * lengths.unsqueeze(1)
        columns = zip(loss.T.contiguous(), norms.T.contiguous(), strict=True)
        weighed = [learner.weigh(batch, *pair) for learner, pair in zip(self.learners, columns, strict=True)]
        slopes *= torch.stack([one.weights for one in weighed], 1).to(slopes.dtype).unsqueeze(2)
        scaled = slopes.view(-1, count * labels)
        sums = torch.cat([(scaled.T @ inputs).view(count, -1), scaled.sum(0).view(count, -1)], 1).double()
        noises = [
            noise_for(learner.mechanism, one, sums.shape[1])
            for learner, one in zip(self.learners, weighed, strict=True)
        ]
        release_rows(
            sums,
            [noise.std for noise in noises],
            [noise.spacing or EXACT for noise in noises],
            [learner.mechanism.normals for learner in self.learners],
            position,
            [learner.recipe.plan.expected_batch for learner in self.learners],
        )
        for learner, gradient, one, noise in zip(self.learners, sums, weighed, noises, strict=True):
            learner.update(position, gradient, one, noise)
        self._descend(sums, position)

    def _descend(self, gradients: Tensor, position: int) -> None:
        """Take a step of SGD with momentum for the models that have no optimizer of their own, then average."""
        torch.mul(self._speed, self._momentum, out=self._speed).add_(gradients.float())
        rates = [_rate(learner.recipe, position) for learner in self.learners]
        self.weights -= torch.tensor(rates).unsqueeze(1) * self._stacked * self._speed
        if any(self._means):
            shares = [1.0 if mean is None else 1 - mean.decay_at(self._updates) for mean in self._means]
            self._average.lerp_(self.weights.double(), torch.tensor(shares, dtype=torch.float64).unsqueeze(1))
        self._updates += 1

    def finish(self) -> list[Trained]:
        """Return the averaged models."""
        if any(self._means):
            self.weights.copy_(self._average)
        return [_trained(learner) for learner in self.learners]


def _rate(recipe: Recipe, position: int) -> float:
    steps = recipe.plan.steps
    return recipe.rate * ((steps - position) / steps if recipe.schedule == "linear" else 1.0)


def _trained(learner: Learner) -> Trained:
    spent = [epsilon for epsilon in learner.recipe.plan.epsilons if epsilon is not None]
    return Trained(learner.model, learner.prior, max(spent, default=None))


def _prior(plan: Any, stream: Stream, data: eh.data.Data) -> Prior:
    counts = release_counts(plan, stream, data)
    return Prior(counts.counts, counts.std, counts.kind, len(data))


def _not_summed(weights: Tensor) -> dict[str, Tensor]:
    raise RuntimeError("The gradients of all models are summed together.")


def slopes_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row and model, and its slopes by the outputs (rows, models, labels).

    The gradient of a linear model is, for each row, the outer product of slopes and inputs (with a 1 for the bias), so
    that its norm is the product of their norms.
    """
    logs, rows = outputs.log_softmax(2), torch.arange(len(targets))
    slopes = logs.exp()
    slopes[rows, :, targets] -= 1.0
    return -logs[rows, :, targets], slopes


Look = Callable[[int, Sequence[Learner]], None]
"""What looks at the models before a step, and after the last one: research, which no epsilon covers."""


def train_together(recipes: Sequence[Recipe], seed: int, data: eh.data.Data, look: Look | None = None) -> list[Trained]:
    """Return the trained models; all recipes must sample alike, so that one draw of batches serves them all."""
    stream, first = Stream.insecure(seed, 0), recipes[0].plan
    if any((r.plan.rates, r.plan.steps) != (first.rates, first.steps) for r in recipes):
        raise ValueError("The recipes sample differently: train them apart.")
    team = Team(recipes, stream, data)
    sampler = PoissonSampler(data.owner, first.rates, stream)
    for position in range(first.steps):
        if look is not None:
            look(position, team.learners)
        team.step(draw(data, sampler, position, 0), position)
    if look is not None:
        look(first.steps, team.learners)
    return team.finish()
