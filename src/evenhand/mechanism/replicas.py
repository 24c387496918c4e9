"""Step many runs of one small model at once: the gradients in a few batched products, all that is private run by run.

Each replica has its own plan, secret key, Poisson draw, rule memory and noise. Weights, side queries and the size of
the noise come from the functions of a single run (``step.weigh``, ``step.noise_for``); what is shared is the pass over
the rows, and the loop that adds the noise (``add_noise.release_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.gradients.memory import KeepFreedMemory
from evenhand.gradients.stacked_models import Chain, run_stacked
from evenhand.mechanism.add_noise import release_rows
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.mechanism.step import GradientNoise, Mechanism, conclude, noise_for, weigh
from evenhand.types import Batch, Commit, Pass


class Replicas:
    """R runs that take their steps together; replica r trains on ``data[r]`` under ``mechanisms[r]``.

    Every step that is taken must be charged in the replica's own ledger before (law 4).

    Formal guarantees:
      Replica r releases what a single run with its key would: the same rows, answers, weights, bounds and noise, of a
      sum in float64. Nothing that it computes depends on the other replicas but the number of rows it is padded to,
      whose weights are 0.
    """

    def __init__(
        self,
        mechanisms: Sequence[Mechanism],
        data: Sequence[Data],
        chain: Chain,
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        self._mechanisms, self._data, self._chain, self._loss = list(mechanisms), list(data), chain, loss
        self._samplers = [
            PoissonSampler(part.owner, one.plan.rates, one.stream, None if one.whole else one.plan.scales)
            for one, part in zip(mechanisms, data, strict=True)
        ]
        self._memories: list[Mapping[str, Any]] = [one.rule.initial(one.plan.facts) for one in mechanisms]
        self._rows = max(_usual_rows(one.plan.expected_batch) for one in mechanisms)
        self._inputs, self._targets, self._starts = _gathered(data)
        self.left_out = self.drawn = 0
        self._freed_memory = KeepFreedMemory(self)

    def step(self, parameters: Mapping[str, Tensor], position: int) -> tuple[Tensor, list[Commit]]:
        """Return the private gradients of the first replicas, and what each of their ledgers must say.

        Args:
          parameters: stacked, by name; as many replicas take the step as there are in them.
          position: the step of every plan.

        Returns:
          One row per replica with the gradient of all parameters in the order of ``Chain.names``, float64, owned by the
          caller; and one commit per replica.
        """
        count = len(next(iter(parameters.values())))
        drawn = [sampler.draw(position)[0] for sampler in self._samplers[:count]]
        width = max(self._rows, *(len(rows) for rows in drawn))
        places = np.full((count, width), len(self._inputs) - 1)
        for replica, rows in enumerate(drawn):
            places[replica, : len(rows)] = rows.numpy() + self._starts[replica]
        where = torch.from_numpy(places)
        result = run_stacked(self._chain, parameters, self._inputs[where], self._targets[where], self._loss)
        weights = torch.zeros(count, width, dtype=torch.float64)
        weighed = []
        for replica, rows in enumerate(drawn):
            size, part = len(rows), self._data[replica]
            seen = Pass(result.loss[replica, :size], result.norm[replica, :size], _unused, finite=result.finite)
            batch = Batch(None, None, part.group[rows], part.owner[rows], rows, position, 0)
            one = weigh(self._mechanisms[replica], seen, batch, self._memories[replica])
            weights[replica, :size] = one.weights
            weighed.append(one)
            self.left_out, self.drawn = self.left_out + one.left_out, self.drawn + size
        totals, using = result.weighted_sum(weights), self._mechanisms[:count]
        noises = [noise_for(one, part, totals.shape[1]) for one, part in zip(using, weighed, strict=True)]
        self._add_noise(totals, noises, position)
        concluded = [conclude(*step) for step in zip(using, weighed, noises, strict=True)]
        self._memories[:count] = [memory for memory, _ in concluded]
        return totals, [commit for _, commit in concluded]

    def _add_noise(self, totals: Tensor, noises: Sequence[GradientNoise], position: int) -> None:
        """Write over the sums the noisy ones divided by the expected batch sizes; without noise if not private."""
        using = self._mechanisms[: len(noises)]
        batches = [one.plan.expected_batch for one in using]
        if using[0].plan.guarantee == "not private":
            totals /= torch.tensor(batches, dtype=torch.float64).unsqueeze(1)
            return
        stds, spacings = [noise.std for noise in noises], [noise.spacing for noise in noises]
        release_rows(totals, stds, spacings, [one.normals for one in using], position, batches)


def _usual_rows(expected: float) -> int:
    """Return a number of rows that a draw rarely exceeds: up to it every step is padded to the same number."""
    return math.ceil(expected + 4 * math.sqrt(expected)) + 8


def _unused(weights: Tensor) -> dict[str, Tensor]:
    raise RuntimeError("The gradients of replicas are summed together.")


def _gathered(data: Sequence[Data]) -> tuple[Tensor, Tensor, list[int]]:
    """Return inputs and targets of all records in one piece, and where each replica's begin; a row of zeros is last.

    Data that several replicas share are there once.
    """
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    starts: dict[int, int] = {}
    total = 0
    for part in data:
        if id(part) not in starts:
            rows, labels = part.fetch(torch.arange(len(part)))
            inputs.append(rows.flatten(1).double())
            targets.append(labels)
            starts[id(part)], total = total, total + len(part)
    inputs.append(torch.zeros_like(inputs[0][:1]))
    targets.append(torch.zeros_like(targets[0][:1]))
    return torch.cat(inputs), torch.cat(targets), [starts[id(part)] for part in data]
