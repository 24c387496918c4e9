"""Averages of noisy answers over the steps, for rules with ``memory=``: post-processing, so they cost nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.types import State

_KINDS = {"none": 0.0, "full": 1.0}


def decay_of(memory: str | float) -> float:
    """Return what the earlier answers are multiplied by in every step: 0 for "none", 1 for "full", or the number.

    Examples:
      >>> decay_of("none"), decay_of("full"), decay_of(0.9)
      (0.0, 1.0, 0.9)
    """
    if isinstance(memory, str):
        if memory not in _KINDS:
            raise UsageError(
                f"memory={_validate.shown(memory)!r} cannot be used: pass 'none' (this step's answer alone), 'full' "
                "(the mean of all answers so far), or a number between 0 and 1 that earlier answers are multiplied "
                "by, for example 0.9."
            )
        return _KINDS[memory]
    return _validate.number(memory, "memory", low=0, high=1)


def noise_left(memory: str | float, steps: int) -> float:
    """Return the noise of an average after ``steps`` steps, as a share of the noise of one answer.

    Examples:
      >>> noise_left("none", 100), noise_left("full", 100), round(noise_left(0.9, 1000), 3)
      (1.0, 0.1, 0.229)
    """
    decay = decay_of(memory)
    if decay == 1.0:
        return 1 / math.sqrt(steps)
    squares, weights = 1 - decay ** (2 * steps), 1 - decay**steps
    return math.sqrt((1 - decay) / (1 + decay) * squares) / weights


def averaged(state: State, query: str, memory: str | float) -> list[float]:
    """Return the mean of a query's noisy answers so far, this step's included; with "none" this step's alone.

    Of an exponential mean the weights are ``memory^age``, divided by their sum: the first steps are not drawn to zero.

    Examples:
      >>> import torch
      >>> state = State(1, torch.ones(1), {"sizes": torch.tensor([4.0])}, {"sizes": [2.0], "sizes_weight": 1.0})
      >>> averaged(state, "sizes", "full"), averaged(state, "sizes", "none")
      ([3.0], [4.0])
    """
    after = remembered(state, query, memory)
    return [total / after[f"{query}_weight"] for total in after[query]]


def remembered(state: State, query: str, memory: str | float) -> Mapping[str, Any]:
    """Return what a rule must remember of this query after this step: weighted sums and their weight, plain numbers."""
    decay = decay_of(memory)
    answer = state.answers[query].tolist()
    before, weight = state.memory.get(query, [0.0] * len(answer)), state.memory.get(f"{query}_weight", 0.0)
    sums = [decay * total + new for total, new in zip(before, answer, strict=True)]
    return {query: sums, f"{query}_weight": decay * weight + 1.0}
