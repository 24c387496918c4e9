"""Step many runs of one small model at once: the gradients in a few batched products, all that is private run by run.

Each replica has its own plan, secret key, Poisson draw and noise. Weights, side queries and the size of the noise come
from the functions of a single run (``step.weigh``, ``step.noise_for``); what is shared is the pass over the rows, the
loop that adds the noise (``add_noise.release_rows``), and the weighing of rows where replicas have equal plans and a
rule that looks at each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.gradients.memory import KeepFreedMemory
from evenhand.gradients.stacked_models import Chain, row_squares, run_stacked
from evenhand.mechanism.add_noise import release_rows
from evenhand.mechanism.sampling import PoissonSampler
from evenhand.mechanism.step import GradientNoise, Mechanism, conclude, noise_for, weigh
from evenhand.types import Batch, Commit, Pass


class Replicas:
    """R runs that take their steps together; replica r trains on ``data[r]`` under ``mechanisms[r]``.

    With ``present`` it trains on those rows of its data alone, by number; the others are never drawn. Every step that
    is taken must be charged in the replica's own ledger before (law 4), unless nothing of it is ever released.

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
        present: Sequence[Tensor] | None = None,
    ) -> None:
        self._mechanisms, self._chain, self._loss = list(mechanisms), chain, loss
        owners = [part.owner for part in data]
        if present is not None:
            owners = [owner[rows] for owner, rows in zip(owners, present, strict=True)]
        self._present = None if present is None else [rows.numpy() for rows in present]
        self._samplers = [
            PoissonSampler(owner, one.plan.rates, one.stream, None if one.whole else one.plan.scales)
            for one, owner in zip(mechanisms, owners, strict=True)
        ]
        self._alike = _alike(mechanisms)
        self._records = _gathered(data)
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
        drawn = self._draw(count, position)
        sizes = np.array([len(rows) for rows in drawn])
        width = max(1, int(sizes.max()))
        filled, numbered = np.arange(width) < sizes[:, None], np.arange(count * width).reshape(count, width)
        places = np.full((count, width), self._records.blank)
        places[filled] = np.concatenate(drawn) + np.repeat(self._records.starts[:count], sizes)
        where = torch.from_numpy(places)
        inputs, targets, squares = self._records.at(where)
        result = run_stacked(self._chain, parameters, inputs, targets, self._loss, squares)
        weights = torch.zeros(count * width, dtype=torch.float64)
        dimension = sum(parameters[name][0].numel() for name in self._chain.names)
        noises, commits = dict[int, GradientNoise](), dict[int, Commit]()
        for part in self._alike:
            members = part.members[part.members < count]
            if not len(members):
                continue
            rows = torch.from_numpy(numbered[members][filled[members]])
            seen = Pass(result.loss.view(-1)[rows], result.norm.view(-1)[rows], _unused, finite=result.finite)
            batch = self._records.batch(where.view(-1)[rows], [drawn[member] for member in members], position)
            weighed = weigh(part.mechanism, seen, batch, part.memory)
            weights[rows] = weighed.weights
            noise = noise_for(part.mechanism, weighed, dimension)
            part.memory, commit = conclude(part.mechanism, weighed, noise)
            noises |= dict.fromkeys(members.tolist(), noise)
            commits |= dict.fromkeys(members.tolist(), commit)
            self.left_out, self.drawn = self.left_out + weighed.left_out, self.drawn + len(rows)
        totals = result.weighted_sum(weights.view(count, width))
        self._add_noise(totals, [noises[replica] for replica in range(count)], position)
        return totals, [commits[replica] for replica in range(count)]

    def _draw(self, count: int, position: int) -> list[NDArray[np.int64]]:
        """Return the rows that a step uses of the data of each of the first replicas."""
        drawn = [sampler.rows(position).numpy() for sampler in self._samplers[:count]]
        if self._present is None:
            return drawn
        return [present[rows] for present, rows in zip(self._present, drawn, strict=False)]

    def _add_noise(self, totals: Tensor, noises: Sequence[GradientNoise], position: int) -> None:
        """Write over the sums the noisy ones divided by the expected batch sizes; without noise if not private."""
        using = self._mechanisms[: len(noises)]
        batches = [one.plan.expected_batch for one in using]
        if using[0].plan.guarantee == "not private":
            totals /= torch.tensor(batches, dtype=torch.float64).unsqueeze(1)
            return
        stds, spacings = [noise.std for noise in noises], [noise.spacing for noise in noises]
        release_rows(totals, stds, spacings, [one.normals for one in using], position, batches)


@dataclass
class _Alike:
    """Replicas whose rows are weighed in one call, the mechanism of the first of them, and their rule's memory."""

    members: NDArray[np.int64]
    mechanism: Mechanism
    memory: Mapping[str, Any]


def _alike(mechanisms: Sequence[Mechanism]) -> list[_Alike]:
    """Return the replicas in parts whose weights are one function of each row: equal plans, a sample rule, no queries.

    Without the answer of a query a rule's memory follows from plan and step alone, so that one serves the whole part.
    """
    parts: dict[tuple[str, int], list[int]] = {}
    for place, one in enumerate(mechanisms):
        alone = one.whole or bool(one.queries)
        parts.setdefault((one.plan.digest, place if alone else -1), []).append(place)
    firsts = [(np.array(places), mechanisms[places[0]]) for places in parts.values()]
    return [_Alike(places, first, first.rule.initial(first.plan.facts)) for places, first in firsts]


def _unused(weights: Tensor) -> dict[str, Tensor]:
    raise RuntimeError("The gradients of replicas are summed together.")


@dataclass(frozen=True)
class _Records:
    """Records of all replicas in one piece, and where each replica's begin; the last row, ``blank``, is zeros."""

    inputs: Tensor
    targets: Tensor
    squares: Tensor
    group: Tensor
    owner: Tensor
    starts: NDArray[np.int64]

    @property
    def blank(self) -> int:
        return len(self.inputs) - 1

    def at(self, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and the squared lengths of the inputs of the records at these places (R, B)."""
        flat, columns = where.view(-1), (self.inputs, self.targets, self.squares)
        inputs, targets, squares = (part.index_select(0, flat).view(*where.shape, *part.shape[1:]) for part in columns)
        return inputs, targets, squares

    def batch(self, where: Tensor, drawn: Sequence[NDArray[np.int64]], position: int) -> Batch:
        """Return the columns of the records at these places, whose numbers in their own data are ``drawn``."""
        numbers = torch.from_numpy(np.concatenate(drawn))
        return Batch(None, None, self.group[where], self.owner[where], numbers, position, 0)


def _gathered(data: Sequence[Data]) -> _Records:
    """Return the records of all replicas; data that several of them share are there once."""
    distinct = {id(part): part for part in data}
    begins = dict(zip(distinct, np.cumsum([0, *(len(part) for part in distinct.values())]).tolist(), strict=False))
    fetched = [part.fetch(torch.arange(len(part))) for part in distinct.values()]
    inputs, targets = [rows.flatten(1).double() for rows, _ in fetched], [labels for _, labels in fetched]
    columns = [inputs, targets, [part.group for part in distinct.values()], [part.owner for part in distinct.values()]]
    padded = [torch.cat([*column, torch.zeros_like(column[0][:1])]) for column in columns]
    starts = np.array([begins[id(part)] for part in data])
    return _Records(padded[0], padded[1], row_squares(padded[0]), padded[2], padded[3], starts)
