"""Choose the rows that a rule protects least: those whose bounded gradient is longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.mechanism.step import Mechanism, clamp_weights
from evenhand.mechanism.weights import weights_of
from evenhand.methods.rules import SampleRule
from evenhand.types import State, Stats

_LENGTHS = np.geomspace(1e-2, 1e4, 256)
"""Norms that are tried, in multiples of a class's bound."""
_NEARER = np.geomspace(1 / 1.06, 1.06, 65)
_LOSSES = (1e3, -1e3)
_GROUPS = 16
_TIE = 1e-3


@dataclass(frozen=True)
class WorstRows:
    """Hold one row per owner class: norm, loss and group, and the length of its weighted gradient."""

    norm: NDArray[np.float64]
    loss: NDArray[np.float64]
    group: NDArray[np.int64]
    reach: NDArray[np.float64]


class WorstRowSearch:
    """Search the worst rows step by step; again only where bound, epoch, answers or memory have changed."""

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._fillers = int(2 * mechanism.plan.expected_batch) + 1
        self._last: tuple[Any, WorstRows] | None = None

    def find(self, position: int, answers: Mapping[str, Tensor], memory: Mapping[str, Any]) -> WorstRows:
        """Return the row of each class that the rule lets furthest, the longest gradient where several go as far.

        An attacker knows the bounds before the step, and the noisy answers of the step before. For a rule that looks at
        the whole batch, the row stands among many others of ordinary loss, and its reach is what the rule declares.
        """
        mechanism = self._mechanism
        bound = mechanism.bound(mechanism.plan.level_at(position), torch.device("cpu"))
        state = State(position, bound.clone(), answers, memory, mechanism.public)
        key = None if answers or memory else (tuple(bound.tolist()), state.epoch)
        if key is None or self._last is None or self._last[0] != key:
            rows = [_worst_of(mechanism, state, owner, self._fillers) for owner in range(len(bound))]
            norm, loss, group, reach = (np.array(column) for column in zip(*rows, strict=True))
            self._last = key, WorstRows(norm, loss, group.astype(np.int64), reach)
        return self._last[1]


def _worst_of(mechanism: Mechanism, state: State, owner: int, fillers: int) -> tuple[float, float, int, float]:
    bound = float(state.bound[owner])
    if not isinstance(mechanism.rule, SampleRule):
        norm = 1e3 * bound
        reaches = [_above(mechanism, state, owner, norm, loss, fillers) for loss in _LOSSES]
        return norm, _LOSSES[int(np.argmax(reaches))], 0, float(mechanism.rule.sensitivity(state)[owner])
    groups = min(_GROUPS, mechanism.public.groups)
    lengths, group = np.meshgrid(bound * _LENGTHS, np.arange(groups), indexing="ij")
    first = _longest(mechanism, state, owner, lengths.ravel(), group.ravel())
    if first[0] == bound * _LENGTHS[-1]:
        return first[0], _LOSSES[0], first[1], first[2]
    again = _longest(mechanism, state, owner, first[0] * _NEARER, np.full(len(_NEARER), first[1]))
    norm, chosen, reach = max(first, again, key=lambda row: row[2])
    return norm, _LOSSES[0], chosen, reach


def _longest(
    mechanism: Mechanism, state: State, owner: int, norm: NDArray[np.float64], group: NDArray[np.int64]
) -> tuple[float, int, float]:
    """Return norm, group and reach of the row that goes furthest, the longest of those within a tie."""
    reach = reach_of(
        mechanism,
        state,
        Stats(
            torch.from_numpy(norm),
            torch.full((len(norm),), _LOSSES[0], dtype=torch.float64),
            torch.from_numpy(group),
            torch.full((len(norm),), owner),
            torch.arange(len(norm)),
        ),
    ).numpy()
    best = np.flatnonzero(reach >= (1 - _TIE) * reach.max())
    place = best[int(np.argmax(norm[best]))]
    return float(norm[place]), int(group[place]), float(reach[place])


def reach_of(mechanism: Mechanism, state: State, stats: Stats) -> Tensor:
    """Return the length of each row's weighted gradient, as the step bounds it."""
    weights = clamp_weights(weights_of(mechanism.rule, stats, state), stats, mechanism.rule.sensitivity(state))
    return weights * stats.norm


def _above(mechanism: Mechanism, state: State, owner: int, norm: float, loss: float, fillers: int) -> float:
    """Return how far a row goes that stands in a batch with others of loss 0, for a rule that looks at all of them."""
    count = fillers + 1
    stats = Stats(
        torch.zeros(count, dtype=torch.float64).index_fill_(0, torch.tensor([0]), norm),
        torch.zeros(count, dtype=torch.float64).index_fill_(0, torch.tensor([0]), loss),
        torch.zeros(count, dtype=torch.long),
        torch.full((count,), owner),
        torch.arange(count),
    )
    return float(reach_of(mechanism, state, stats)[0])
