"""Canaries: records that nobody else has, put into the training data by a secret coin each.

There are two forms. A *gradient* canary pulls at one number that the model gets for it alone, further than the bound
allows, so that its whole clipped gradient lies there and disturbs nothing: the sharpest record there can be. An *input*
canary is a record with random numbers as inputs and the target of another record: what a person could send.

A canary that is in is an ordinary training record for sampler, engine, step and ledger. One that is out is a record
that the sampler never draws; the public facts, and so plan, rates and noise, have room for all canaries whatever the
coins say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from evenhand.data.dataset import Data
from evenhand.data.record_seeds import Quiet
from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import apply_loss, call, join, take
from evenhand.training.losses import Loss
from evenhand.types import Facts

PULL = 1000.0
"""Norm of a gradient canary's gradient, far above every bound that rules are given."""
LOUD = 3.0
"""Size of an input canary's numbers, in root mean squares of the records' own."""
_LOOKED_AT = 2048


@dataclass(frozen=True)
class Canaries:
    """Owner class, group and coin of every canary. A coin that is True puts its canary in. All of it is secret."""

    owner: NDArray[np.int64]
    group: NDArray[np.int64]
    coins: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.coins)

    @classmethod
    def toss(cls, count: int, owners: Sequence[int], groups: int, draw: np.random.Generator) -> Canaries:
        """Return canaries of which every owner class and group has about equally many, each with a fair coin.

        Examples:
          >>> canaries = Canaries.toss(6, [0, 2], 3, np.random.default_rng(0))
          >>> canaries.owner.tolist(), canaries.group.tolist()
          ([0, 2, 0, 2, 0, 2], [0, 0, 1, 1, 2, 2])
        """
        number = np.arange(count)
        owner = np.asarray(owners, dtype=np.int64)[number % len(owners)]
        return cls(owner, number // len(owners) % groups, draw.random(count) < 0.5)


def planted(data: Data, canaries: Canaries, records: Callable[[Tensor], tuple[Any, Any]]) -> Data:
    """Return the data with the canaries that are in.

    Rows come in the order: records, canaries that are in, canaries that are out. The columns of owners and groups end
    before the last, so that no sampler draws those, while the facts count all of them.

    Args:
      data: with one row per record.
      canaries: to put in, or leave out.
      records: returns inputs and targets of canaries by number, of the form of the data's own.
    """
    count, numbers = len(data), np.arange(len(canaries))
    order = torch.from_numpy(np.concatenate([numbers[canaries.coins], numbers[~canaries.coins]]))
    present = order[: int(canaries.coins.sum())]

    def fetch(rows: Tensor) -> tuple[Any, Any]:
        others = rows >= count
        where = torch.argsort(others.long(), stable=True)
        parts = (data.fetch(rows[~others]), records(order[rows[others] - count]))
        (first, form), (second, _) = (tree_flatten(part) for part in parts)
        joined = [_joined(one, two) for one, two in zip(first, second, strict=True)]
        inputs, targets = tree_unflatten(take(joined, torch.argsort(where)), form)
        return inputs, targets

    def column(of_records: Tensor, of_canaries: NDArray[np.int64]) -> Tensor:
        return torch.cat([of_records, torch.from_numpy(of_canaries)[present].to(of_records.dtype)])

    return replace(
        data,
        facts=_with_room(data.facts, canaries),
        owner=column(data.owner, canaries.owner),
        group=column(data.group, canaries.group),
        fetch=Quiet(fetch),
        together=None,
        partition=None,
    )


def _joined(one: Any, two: Any) -> Any:
    """Return the rows of both; what all records share stays as it is."""
    return join([one, two]) if isinstance(one, Tensor) else one


def _with_room(facts: Facts, canaries: Canaries) -> Facts:
    """Return the facts of data that hold every canary, in or out."""
    more = np.bincount(canaries.owner, minlength=len(facts.owners)).tolist()
    owners = tuple((name, size + extra) for (name, size), extra in zip(facts.owners, more, strict=True))
    return replace(facts, records=facts.records + len(canaries), owners=owners)


class WithProbe(nn.Module):
    """A model with one more number for every gradient canary: a record's gradient is its own, a canary's is its number.

    The model stays the caller's and is trained in place. Its own parameters get exactly the gradients that they would
    without canaries.
    """

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        self.probe = nn.Embedding(canaries + 1, 1, padding_idx=0)
        nn.init.zeros_(self.probe.weight)

    def forward(self, inputs: Any, canary: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return the model's outputs, every record's probe, and which records are canaries (0: none)."""
        return call(self.model, inputs), self.probe(canary)[:, 0], canary


@dataclass(frozen=True)
class ProbeLoss:
    """The training's own loss for records; for gradient canaries one whose slope in their own number is ``PULL``."""

    loss: Loss

    def __call__(self, outputs: tuple[Any, Tensor, Tensor], targets: Any) -> Tensor:
        """Return one value per record; a canary's is 1."""
        values, probe, canary = outputs
        losses = apply_loss(self.loss, values, targets)
        return torch.where(canary > 0, 1.0 + PULL * (probe - probe.detach()), losses)


def with_probe_numbers(data: Data) -> Data:
    """Return the data with a number beside every record's inputs, which tells that it is no canary."""

    def fetch(rows: Tensor) -> tuple[Any, Any]:
        inputs, targets = data.fetch(rows)
        return {"inputs": inputs, "canary": torch.zeros(len(rows), dtype=torch.long)}, targets

    return replace(data, fetch=Quiet(fetch), origin=data.origin or data.whole)


def gradient_canaries(data: Data) -> Callable[[Tensor], tuple[Any, Any]]:
    """Return the records of gradient canaries: their numbers.

    Inputs and targets are the first record's, so that they fit the model; a canary's loss does not depend on them.
    """

    def records(numbers: Tensor) -> tuple[Any, Any]:
        inputs, targets = data.fetch(torch.zeros(len(numbers), dtype=torch.long))
        return {"inputs": inputs, "canary": numbers + 1}, targets

    return records


def input_canaries(data: Data, count: int, draw: np.random.Generator) -> Callable[[Tensor], tuple[Any, Any]]:
    """Return the records of input canaries: signs at random, larger than records are, with the targets of records.

    Raises:
      UsageError: inputs are not one tensor of real numbers.
    """
    some = torch.from_numpy(np.sort(draw.choice(len(data), min(len(data), _LOOKED_AT), replace=False)))
    inputs, _ = data.fetch(some)
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point() and not inputs.is_nested):
        raise UsageError(
            "Input canaries are random numbers, and the inputs of these records are not one tensor of real numbers: "
            'use form="gradient". Nothing was spent.'
        )
    usable = inputs[torch.isfinite(inputs.flatten(1)).all(1)].double()
    size = LOUD * max(float(usable.square().mean().sqrt()), 1e-6)
    signs = torch.from_numpy(draw.integers(0, 2, (count, *inputs.shape[1:])) * 2 - 1).to(inputs.dtype) * size
    targets = data.fetch(torch.from_numpy(draw.choice(len(data), count)))[1]
    return lambda numbers: (signs[numbers], take(targets, numbers))
