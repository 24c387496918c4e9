"""Compute the weight that a rule gives each record, and the sum that a query asks for."""

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
    """Return one weight per record, not yet bounded. A sample rule sees one row at a time: it cannot couple records."""
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
    """Return ``function`` applied to each row by itself (vmap).

    Rules and queries of this package are applied to whole columns, which is quicker: the conformance kit tests that the
    numbers are the same. For a user's code vmap guarantees that no row sees another, and every row has the number 0:
    when a record goes, those behind it get other numbers, which would tell of it.
    """
    if _ours(getattr(function, "__self__", None)):
        return function(stats, state)
    stats = _copied(stats)
    columns: tuple[Tensor, ...] = (stats.norm, stats.loss, stats.group, stats.owner, torch.zeros_like(stats.record))
    if not len(stats.norm):  # vmap needs a row: a made-up one tells the shape of none
        columns = tuple(column.new_ones(1) * 0 for column in columns)
    return vmap(lambda *row: function(Stats(*row), state))(*columns)[: len(stats.norm)]


def total_of(query: Query, width: int, sensitivity: float, stats: Stats, state: State) -> NDArray[np.float64]:
    """Return the exact sum of a query over the rows, of length ``width``; every record adds at most ``sensitivity``.

    The sum is secret until noise is added. ``sensitivity`` is what is charged: the query is not asked for it again.
    """
    if isinstance(query, Count) and getattr(query.value, "__func__", None) is Count.value:
        places = by_row(query.place, stats, state)
        if places.shape != stats.norm.shape or places.is_floating_point() or places.is_complex():
            raise UnsupportedModelError(f"The query {query.name!r} must give one whole number per record.")
        return count_places(places, width) * np.float64(min(1.0, sensitivity))
    values = by_row(query.value, stats, state)
    if values.shape != (len(stats.norm), width):
        raise UnsupportedModelError(f"The query {query.name!r} must give one vector of length {width} per record.")
    return numbers(clip_rows(values.double(), sensitivity).sum(0))


def count_places(places: Tensor, width: int) -> NDArray[np.int64]:
    """Return how many of these places are 0, 1 ... ``width - 1``; other places are not counted.

    >>> count_places(torch.tensor([0, 2, 2, 3, -1, 2**40]), 3)
    array([1, 0, 2])
    """
    inside = np.minimum(numbers(places.long()).view(np.uint64), width)  # what was negative is very large
    return np.bincount(inside.view(np.int64), minlength=width)[:width]


def clip_rows(values: Tensor, sensitivity: float) -> Tensor:
    """Return the rows scaled down to an L2 norm of at most ``sensitivity``; a row that is not finite becomes 0.

    >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 0.0]]), 1.0)
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
    """Return whether a rule or query belongs to this package."""
    return type(part).__module__.startswith(_OURS)


def _copied(stats: Stats) -> Stats:
    """Return copies of the columns for a user's code: writing into them must not change how weights are bounded."""
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    return Stats(*(column.clone() for column in columns))
