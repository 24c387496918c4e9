"""What a rule says about a batch, one weight per record."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from evenhand.errors import UnsupportedModelError
from evenhand.gradients.row_norms import numbers
from evenhand.methods.queries import Count, Query
from evenhand.methods.rules import BatchRule, Rule, SampleRule
from evenhand.types import State, Stats

_OURS = ("evenhand.methods.",)


def weights_of(rule: Rule, stats: Stats, state: State) -> Tensor:
    """A sample rule sees one row at a time, so that it cannot couple records even by mistake."""
    if isinstance(rule, SampleRule):
        weights = by_row(rule.weight, stats, state)
    elif isinstance(rule, BatchRule):
        weights = rule.weights(stats if _ours(rule) else _copied(stats), state)
    else:
        raise UnsupportedModelError(
            f"{type(rule).__name__} is neither a SampleRule nor a BatchRule: derive it from one."
        )
    if weights.shape != stats.norm.shape:
        raise UnsupportedModelError(f"The rule {rule.name!r} must give one weight per record.")
    return weights


def by_row(function: Callable[[Stats, State], Tensor], stats: Stats, state: State) -> Tensor:
    """``function`` applied to each row on its own (vmap).

    Our own rules and queries are applied to whole columns, which is quicker: the conformance kit holds them to giving
    the same numbers either way. A user's code gets the guarantee from vmap itself.
    """
    if _ours(getattr(function, "__self__", None)):
        return function(stats, state)
    stats = _copied(stats)
    columns: tuple[Tensor, ...] = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    if not len(stats.norm):  # vmap needs a row: a made-up one tells the shape of none
        columns = tuple(column.new_ones(1) * 0 for column in columns)
    return vmap(lambda *row: function(Stats(*row), state))(*columns)[: len(stats.norm)]


def total_of(query: Query, width: int, sensitivity: float, stats: Stats, state: State) -> NDArray[np.float64]:
    """What a query sums up to, a vector of length ``width``, with each record held to ``sensitivity``.

    That is the number which is charged, and is not asked for again.
    """
    if isinstance(query, Count) and getattr(query.value, "__func__", None) is Count.value:
        places = by_row(query.place, stats, state)
        if places.shape != stats.norm.shape or places.is_floating_point() or places.is_complex():
            raise UnsupportedModelError(f"The query {query.name!r} must give one whole number per record.")
        return counted(places, width) * np.float64(min(1.0, sensitivity))
    values = by_row(query.value, stats, state)
    if values.shape != (len(stats.norm), width):
        raise UnsupportedModelError(f"The query {query.name!r} must give one vector of length {width} per record.")
    return numbers(held(values.double(), sensitivity).sum(0))


def counted(places: Tensor, width: int) -> NDArray[np.int64]:
    """How many of these places are 0, 1 ... ``width - 1``; a place outside counts nowhere.

    >>> counted(torch.tensor([0, 2, 2, 3, -1, 2**40]), 3)
    array([1, 0, 2])
    """
    inside = np.minimum(numbers(places.long()).view(np.uint64), width)  # what was negative is very large
    return np.bincount(inside.view(np.int64), minlength=width)[:width]


def held(values: Tensor, sensitivity: float) -> Tensor:
    """Rows no longer than that; a row that is not finite becomes 0.

    >>> held(torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 0.0]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000],
            [0.0000, 0.0000]])
    """
    values = values / sensitivity  # squares of very small numbers would vanish
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    if len(values) and not float(norms.max()) <= 1.0:  # also if one is not a number
        good = torch.isfinite(values).all(1, keepdim=True)
        values, norms = torch.where(good, values, 0.0), torch.where(good, norms, 1.0)
        values = values / norms.clamp_(min=1.0)
    return values * sensitivity


def _ours(part: object) -> bool:
    return type(part).__module__.startswith(_OURS)


def _copied(stats: Stats) -> Stats:
    """Columns of its own for a user's code: what it writes into them must not change how its weights are bounded."""
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    return Stats(*(column.clone() for column in columns))
