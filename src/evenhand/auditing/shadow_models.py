"""Train many models of one setting together, each on records that secret coins chose, and return their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.data.record_seeds import Quiet
from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import apply_loss, call
from evenhand.gradients.stacked_models import Chain, run_stacked
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.replicas import Replicas
from evenhand.mechanism.step import Mechanism, rehearse
from evenhand.methods import registry
from evenhand.training.config import Config
from evenhand.training.losses import Loss
from evenhand.training.steps.stacks import most_together, train_stacked

_FIRST_STEPS, _FIRST_RATE = 400, 0.01
_MEASURED = 2**22
"""Numbers that are held at once while losses are measured."""


@dataclass(frozen=True)
class Shadows:
    """Hold what all shadow trainings share: settings, plan, records, the form of the model and its first weights."""

    config: Config
    plan: Plan
    data: Data
    chain: Chain
    model: nn.Module
    loss: Loss

    def train(self, present: NDArray[np.bool_], told: Callable[[int, int], None]) -> NDArray[np.float64]:
        """Train a model for every row of ``present``, on the records that are true there; return all losses.

        Nothing is released, and no ledger is written: weights live in memory until this returns.

        Args:
          present: (models, records).
          told: called with the number of models trained and their total.

        Returns:
          The loss of every record under every last model, (models, records).
        """
        parts, done = list[NDArray[np.float64]](), 0
        most = most_together(self.plan.expected_batch, self.chain)
        for start in range(0, len(present), most):
            told(done, len(present))
            chosen = present[start : start + most]
            parts.append(self._losses(self._trained(chosen, start)))
            done += len(chosen)
        told(done, len(present))
        return np.concatenate(parts)

    def _trained(self, present: NDArray[np.bool_], start: int) -> dict[str, Tensor]:
        """Train a stack of models, which all begin with the same weights; return their parameters, stacked."""
        seed, plan = self.config.insecure_seed, self.plan
        rule = registry.build("rule", **plan.rule)
        queries = tuple(registry.build("query", **query) for query in plan.queries)
        rehearse(Mechanism(plan, rule, queries, Stream.fresh()))

        def stream(number: int) -> Stream:
            return Stream.fresh() if seed is None else Stream.insecure(seed, 1000 + number)

        count = len(present)
        mechanisms = [Mechanism(plan, rule, queries, stream(start + number)) for number in range(count)]
        rows = [torch.from_numpy(np.flatnonzero(chosen)) for chosen in present]
        stack = Replicas(mechanisms, [self.data] * count, self.chain, self.loss, rows)
        values = dict(self.model.named_parameters())
        first = {name: torch.stack([values[name].detach()] * count) for name in self.chain.names}
        last, average = train_stacked(stack, first, [plan.steps] * count, self.config, lambda *_: None)
        return last if average is None else average

    def _losses(self, parameters: dict[str, Tensor]) -> NDArray[np.float64]:
        inputs, targets = self.data.fetch(torch.arange(len(self.data)))
        flat = inputs.flatten(1).double()
        most = max(1, _MEASURED // (len(flat) * self.chain.width))
        parts = []
        for start in range(0, len(next(iter(parameters.values()))), most):
            chosen = {name: value[start : start + most] for name, value in parameters.items()}
            count = len(next(iter(chosen.values())))
            rows = flat.expand(count, *flat.shape), targets.expand(count, *targets.shape)
            parts.append(run_stacked(self.chain, chosen, *rows, self.loss).loss)
        return torch.cat(parts).numpy()


def first_weights(model: nn.Module, data: Data, loss: Loss) -> nn.Module:
    """Train a model in place without privacy on other records than those attacked, and return it.

    Annamalai and De Cristofaro (2024) let trainings begin there: where ordinary records are learned already their
    gradients are short, and an odd record's stands out.
    """
    inputs, targets = data.fetch(torch.arange(len(data)))
    optimizer = torch.optim.Adam(model.parameters(), _FIRST_RATE)
    for _ in range(_FIRST_STEPS):
        optimizer.zero_grad()
        apply_loss(loss, call(model, inputs), targets).mean().backward()
        optimizer.step()
    return model


def with_wrong_labels(data: Data, rows: NDArray[np.int64], draw: np.random.Generator) -> Data:
    """Return the data in which these records have another class than their own.

    Raises:
      UsageError: targets are not one class per record.
    """
    classes, everybody = len(data.facts.labels), torch.arange(len(data))
    inputs, targets = data.fetch(everybody)
    if targets.dim() != 1 or targets.is_floating_point() or classes < 2:
        raise UsageError(
            'initial="worst" attacks records with a wrong class, and these targets are not one class per record: use '
            'initial="settings". Nothing was spent.'
        )
    wrong, chosen = targets.clone(), torch.from_numpy(rows)
    moved = torch.from_numpy(draw.integers(1, classes, len(rows)))
    wrong[chosen] = (targets[chosen] + moved) % classes
    return replace(
        data, fetch=Quiet(lambda numbers: (inputs[numbers], wrong[numbers])), origin=data.origin or data.whole
    )
