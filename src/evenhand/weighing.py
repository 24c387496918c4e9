"""What a rule says about a batch, one weight per record."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from evenhand.errors import UnsupportedModelError
from evenhand.rules import BatchRule, Rule, SampleRule
from evenhand.types import State, Stats

_OURS = ("evenhand.rules.", "evenhand.queries.")


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


def held(values: Tensor, sensitivity: float) -> Tensor:
    """Rows no longer than that; a row that is not finite becomes 0.

    >>> held(torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 0.0]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000],
            [0.0000, 0.0000]])
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    if not len(values) or float(norms.max()) <= sensitivity:  # false if one is not a number
        return values
    good = torch.isfinite(values).all(1, keepdim=True)
    values, norms = torch.where(good, values, 0.0), torch.where(good, norms, 0.0)
    return values * (sensitivity / norms.clamp_(min=sensitivity))


def _ours(part: object) -> bool:
    return type(part).__module__.startswith(_OURS)


def _copied(stats: Stats) -> Stats:
    """Columns of its own for a user's code: what it writes into them must not change how its weights are bounded."""
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    return Stats(*(column.clone() for column in columns))
