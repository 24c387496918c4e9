"""Weights the way the step must see them, and how far one record can move their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from evenhand.errors import UsageError
from evenhand.methods.rules import BatchRule, Rule, SampleRule
from evenhand.step import bounded
from evenhand.testing.cases import Case
from evenhand.types import State, Stats

Reading = Callable[[Stats, State], Tensor]


def columns(stats: Stats) -> tuple[Tensor, ...]:
    """The columns in the order in which Stats takes them."""
    return (stats.norm, stats.loss, stats.group, stats.owner, stats.record)


def taken(stats: Stats, index: Tensor) -> Stats:
    """The rows with these numbers, in this order."""
    return Stats(*(column[index] for column in columns(stats)))


def by_row(function: Reading, stats: Stats, state: State) -> Tensor:
    """``function`` on each row alone: what a sample rule and a query mean, whatever the step does for speed."""
    rows = columns(stats)
    if not stats.norm.numel():  # vmap cannot run on no rows: the shape is that of a made-up row, taken zero times
        return by_row(
            function, Stats(*(row.new_ones(1) for row in rows[:2]), *(row.new_zeros(1) for row in rows[2:])), state
        )[:0]
    return vmap(lambda *row: function(Stats(*row), state))(*rows)


def weights(rule: Rule, stats: Stats, state: State) -> Tensor:
    """What the rule returns, before the step holds it to its bound."""
    if isinstance(rule, SampleRule):
        return by_row(rule.weight, stats, state)
    if isinstance(rule, BatchRule):
        return rule.weights(stats, state)
    raise UsageError(f"{type(rule).__name__} is neither a SampleRule nor a BatchRule: derive it from one.")


def movements(rule: Rule, case: Case, state: State) -> Tensor:
    """For each row, how far removing it moves the weighted sum when gradients point where that hurts most.

    Exact: ``w_r n_r + sum_j |w_j(with) - w_j(without)| n_j``, reached by gradients that are all parallel. For a sample
    rule other rows cannot move, and its weight counts as returned; a batch rule is held to its bound by the step first.
    """
    stats = case.stats()
    if isinstance(rule, SampleRule):
        return weights(rule, stats, state) * stats.norm
    sensitivity = rule.sensitivity(state)
    here = bounded(weights(rule, stats, state), stats, sensitivity)
    moved = here * stats.norm
    for removed in range(len(case.rows)):
        rest = case.stats(without=removed)
        there = bounded(weights(rule, rest, state), rest, sensitivity)
        stayed = torch.cat([here[:removed], here[removed + 1 :]])
        moved[removed] += ((stayed - there).abs() * rest.norm).sum()
    return moved


def same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Equality of tensors, numbers, and mappings and sequences of them; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        close = torch.allclose(left, right, rtol=tolerance, atol=0.0, equal_nan=True)
        return close if tolerance else torch.equal(left.nan_to_num(nan=-77.0), right.nan_to_num(nan=-77.0)) and close
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key], tolerance) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b, tolerance) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and (bool(left == right) or (left != left and right != right))
