"""Made-up rows and states: what the tests of rules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenhand.types import Public, State, Stats


def column(values: Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def index(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.long)


def rows(
    norm: Sequence[float] | Tensor,
    loss: Sequence[float] | Tensor | None = None,
    group: Sequence[int] | Tensor | None = None,
    owner: Sequence[int] | Tensor | None = None,
    record: Sequence[int] | Tensor | None = None,
) -> Stats:
    count = len(norm)
    zero = [0] * count
    return Stats(
        norm=column(norm),
        loss=column(norm if loss is None else loss),
        group=index(zero if group is None else group),
        owner=index(zero if owner is None else owner),
        record=index(list(range(count)) if record is None else record),
    )


def state(
    bound: Sequence[float] = (1.0,),
    answers: Mapping[str, Sequence[float]] | None = None,
    memory: Mapping[str, Any] | None = None,
    step: int = 0,
    **public: Any,
) -> State:
    told = {name: column(values) for name, values in (answers or {}).items()}
    return State(step, column(bound), told, memory or {}, Public(**public))
